"""The choice of an algorithm, and the tables that it is made by."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.comm.choice import Algorithm, Choice, Facts, Source, choose
from stepgraph.comm.communicator import make_all_reduce
from stepgraph.comm.errors import CommError
from stepgraph.comm.thresholds import Table, Thresholds, load_table, read_table, table_name, write_table

MIB = 1 << 20
SIZES = st.integers(0, 256 * MIB)
READY = Facts(capturing=False, push_bytes=16 * MIB, stage_bytes=16 * MIB)
H200_X4 = load_table("NVIDIA H200", 4, (9, 0))


@st.composite
def thresholds(draw: st.DrawFn) -> Thresholds:
    sizes = sorted(draw(st.lists(SIZES, min_size=3, max_size=3)))
    multicast = draw(st.none() | st.tuples(SIZES, SIZES).map(lambda pair: (min(pair), max(pair))))
    return Thresholds(*sizes, multicast)


TABLES = st.builds(Table, st.just("a device"), st.just(2), thresholds(), thresholds(), st.just("drawn"))
MAYBE = st.none() | st.just("because")
FACTS = st.builds(Facts, st.booleans(), MAYBE, MAYBE, MAYBE, SIZES, SIZES)


@given(TABLES, SIZES, FACTS)
def test_every_message_has_one_way_with_a_reason(table: Table, nbytes: int, facts: Facts) -> None:
    choice = choose(table, nbytes, facts)
    assert choice.reason
    assert (choice.source is Source.PUSHED) == (choice.algorithm is Algorithm.PUSH)
    assert (choice.source is Source.OWN) == (choice.algorithm is Algorithm.LIBRARY)
    if choice.source is Source.ROW:  # only while the stream really captures, and only where rows can be exchanged
        assert facts.capturing and facts.no_rows is None
        assert choice.algorithm in (Algorithm.PULL, Algorithm.TWO_SHOT)
    if choice.source is Source.STAGED:
        assert nbytes <= facts.stage_bytes
    if choice.algorithm is Algorithm.PUSH:
        assert nbytes <= facts.push_bytes
    if choice.algorithm is Algorithm.MULTICAST:
        assert facts.no_multicast is None


@given(TABLES, SIZES, FACTS)
def test_what_is_in_the_way_is_told(table: Table, nbytes: int, facts: Facts) -> None:
    choice = choose(table, nbytes, facts)
    if facts.no_kernels is not None:
        assert choice == Choice(Algorithm.LIBRARY, Source.OWN, facts.no_kernels)
    elif facts.capturing and facts.no_rows is not None:
        assert facts.no_rows in choice.reason


@given(TABLES, FACTS, st.lists(SIZES, min_size=2, max_size=2).map(sorted))
def test_larger_messages_never_go_back_to_an_earlier_algorithm(table: Table, facts: Facts, sizes: list[int]) -> None:
    order = [Algorithm.PUSH, Algorithm.PULL, Algorithm.TWO_SHOT, Algorithm.LIBRARY]
    plain = replace(table, captured=replace(table.captured, multicast=None), eager=replace(table.eager, multicast=None))
    small, large = (order.index(choose(plain, size, facts).algorithm) for size in sizes)
    assert small <= large


@given(SIZES, FACTS)
def test_eager_and_captured_without_rows_go_the_same_way(nbytes: int, facts: Facts) -> None:
    eager = choose(H200_X4, nbytes, replace(facts, capturing=False))
    captured = choose(H200_X4, nbytes, replace(facts, capturing=True, no_rows="several nodes"))
    assert (eager.algorithm, eager.source) == (captured.algorithm, captured.source)


def test_push_with_a_row_raises() -> None:
    with pytest.raises(CommError, match="push never takes a row"):
        Choice(Algorithm.PUSH, Source.ROW, "asked for")


def test_one_size_two_algorithms() -> None:
    """The chapter's: 512 KiB on four ranks is pushed eagerly, and pulled in two shots under capture."""
    eager, captured = (choose(H200_X4, 512 * 1024, replace(READY, capturing=capturing)) for capturing in (False, True))
    assert (eager.algorithm, eager.source) == (Algorithm.PUSH, Source.PUSHED)
    assert (captured.algorithm, captured.source) == (Algorithm.TWO_SHOT, Source.ROW)


def test_multicast_is_known_and_refused() -> None:
    choice = choose(H200_X4, 2 * MIB, READY)
    assert choice.algorithm is Algorithm.TWO_SHOT
    assert "multicast would be next, and is refused: switched off" in choice.reason
    assert choose(H200_X4, 2 * MIB, replace(READY, no_multicast=None)).algorithm is Algorithm.MULTICAST


def test_above_what_is_staged_the_library_sums() -> None:
    choice = choose(H200_X4, 32 * MIB, READY)
    assert choice.algorithm is Algorithm.LIBRARY
    assert "the staging buffer holds" in choice.reason
    assert choose(H200_X4, 32 * MIB, replace(READY, capturing=True)).source is Source.ROW  # zero copy has no such limit


@given(TABLES)
def test_a_table_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, table: Table) -> None:
    folder = tmp_path_factory.mktemp("tables")
    path = write_table(table, folder)
    assert path.name == table_name(table.device, table.world)
    assert read_table(path.read_text(), "here") == table


def test_a_tuned_table_goes_before_the_published_one(tmp_path: Path) -> None:
    mine = Table("NVIDIA H200", 4, Thresholds(1, 2, 3), Thresholds(4, 5, 6), "mine")
    write_table(mine, tmp_path)
    assert load_table("NVIDIA H200", 4, (9, 0), tmp_path) == mine
    assert load_table("NVIDIA H200", 4, (9, 0)).source.startswith("SGLang")


def test_a_folder_that_was_given_must_have_the_table(tmp_path: Path) -> None:
    with pytest.raises(CommError, match=f"{tmp_path} has none for 4 ranks; .*tune allreduce --tp 4 --out {tmp_path}"):
        load_table("NVIDIA H200", 4, (9, 0), tmp_path)
    write_table(Table("another card", 4, Thresholds(1, 2, 3), Thresholds(4, 5, 6), "mine"), tmp_path)
    with pytest.raises(CommError, match="nvidia_h200_x4.json does not exist; .*tune allreduce --tp 4 --out"):
        load_table("NVIDIA H200", 4, (9, 0), tmp_path)


def test_a_damaged_table_is_told_where_nothing_would_use_it(tmp_path: Path) -> None:
    (tmp_path / "nvidia_h200_x2.json").write_text("{")

    class Group:
        device, world = torch.device("cpu"), 2

        def exchange(self, value: object) -> list[object]:
            return [value, value]

        def all_reduce_(self, tensor: torch.Tensor) -> None: ...

    with pytest.raises(CommError, match="nvidia_h200_x2.json is not JSON"):
        make_all_reduce(Group(), tables=tmp_path)  # type: ignore[arg-type]
    (tmp_path / "nvidia_h200_x2.json").unlink()
    write_table(Table("NVIDIA H200", 2, Thresholds(1, 2, 3), Thresholds(4, 5, 6), "mine"), tmp_path)
    assert make_all_reduce(Group(), tables=tmp_path).kernels is None  # type: ignore[arg-type]


def test_every_published_table_can_be_read() -> None:
    for capability in ((9, 0), (10, 0), (8, 0)):
        for world in range(2, 9):
            assert load_table("some card", world, capability).world == world


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "not JSON"),
        ("{}", "a table has"),
        (json.dumps({"device": "d", "world": 2, "source": "s", "captured": {}, "eager": {}}), "push"),
    ],
)
def test_a_damaged_table_is_refused(text: str, message: str) -> None:
    with pytest.raises(CommError, match=message):
        read_table(text, "here.json")


def test_thresholds_come_in_order() -> None:
    with pytest.raises(CommError, match="push <= pull <= two_shot"):
        Thresholds(3, 2, 4)
