"""Groups of processes over gloo: sums on the tape, agreement, and what happens when a rank is gone."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from comm.ranks_in_processes import results, run_ranks

from stepgraph.comm.all_reduce import AllReduce
from stepgraph.comm.choice import Algorithm, Choice, Source
from stepgraph.comm.errors import CommError
from stepgraph.comm.gather import Gather
from stepgraph.comm.group import Group
from stepgraph.comm.ranks import Ranks
from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.platforms.tape import TapePlatform

KEY = BatchDescriptor.decode(1)


def captured(group: Group) -> dict[str, Any]:
    """A step with an all-reduce and a gather in it, recorded once and replayed with other inputs."""
    all_reduce = AllReduce(group, why_library="a CPU")
    gather = Gather(group, all_reduce)
    x = torch.zeros(4)
    platform = TapePlatform()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        return all_reduce(x * 2, torch.ones(4)), gather(x)

    platform.warm_up(step)
    in_warm_up = len(all_reduce.log.by_key)
    all_reduce.begin(KEY)
    recording, (summed, gathered) = platform.record(step, None)
    seen = []
    for turn in range(3):
        x.fill_(float(10 * turn + group.rank))
        recording.replay()
        seen.append((summed.tolist(), gathered[:, 0].tolist()))
    all_reduce.exchange()
    frozen = [one.as_dict() for one in all_reduce.log.by_key[KEY]]
    recording.release()
    return {"seen": seen, "frozen": frozen, "in_warm_up": in_warm_up}


@pytest.mark.parametrize("world", [2, 4])
def test_captured_collectives_run_again_at_every_replay(tmp_path: Path, world: int) -> None:
    for result in results(run_ranks(world, tmp_path, captured)):
        ranks = range(world)
        assert result["seen"] == [
            ([sum(2.0 * (10 * turn + rank) for rank in ranks) + 1] * 4, [10.0 * turn + rank for rank in ranks])
            for turn in range(3)
        ]
        assert [one["kind"] for one in result["frozen"]] == ["all_reduce", "gather"]
        assert result["frozen"][0]["algorithm"] == "library" and result["frozen"][0]["bytes"] == 16
        assert result["in_warm_up"] == 0


def agreement(group: Group) -> list[Any]:
    group.agree("a number", 7)
    said = []
    try:
        group.agree("the sizes", [1, 2] if group.rank else [1, 2, 4])
    except CommError as error:
        said.append(str(error))
    return [*said, group.share({"from": group.rank}), group.exchange(group.rank)]


def several(group: Group) -> tuple[Any, ...]:
    return agreement(group), other_captures(group), in_the_capture(group), in_order(group)


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """What `several` gave on each: starting processes takes longer than what they do."""
    return results(run_ranks(2, tmp_path_factory.mktemp("ranks"), several))


def test_ranks_that_disagree_are_told_on_all(of_two_ranks: list[tuple[Any, ...]]) -> None:
    for (said, shared, exchanged), *_ in of_two_ranks:
        assert said == "ranks disagree on the sizes: rank 0: [1, 2, 4]; rank 1: [1, 2]"
        assert shared == {"from": 0}
        assert exchanged == [0, 1]


def other_captures(group: Group) -> str:
    all_reduce = AllReduce(group, why_library="a CPU")
    all_reduce.begin(KEY)
    platform = TapePlatform()
    platform.record(lambda: [all_reduce(torch.ones(4)) for _ in range(2)], None)
    if group.rank:
        all_reduce.log.by_key[KEY].pop()
    try:
        all_reduce.exchange()
    except CommError as error:
        return str(error)
    return "nothing"


def test_unequal_captures_raise_on_all_ranks(of_two_ranks: list[tuple[Any, ...]]) -> None:
    for _, said, *_ in of_two_ranks:
        assert "ranks disagree on the collectives that were captured" in said


def in_the_capture(group: Group) -> str:
    all_reduce = AllReduce(group, why_library="a CPU")
    with pytest.raises(CommError, match="after a capture, never in it"):
        TapePlatform().record(all_reduce.exchange, None)
    with pytest.raises(CommError, match="a CPU"):
        all_reduce(torch.ones(4), choice=Choice(Algorithm.PUSH, Source.PUSHED, "asked for"))
    all_reduce.in_flight.enter(capturing=False)
    with pytest.raises(CommError, match="one operation may be in flight"):
        all_reduce(torch.ones(4))
    all_reduce.in_flight.leave(capturing=False)
    return "done"


def test_exchange_in_a_capture_and_two_in_flight_are_refused(of_two_ranks: list[tuple[Any, ...]]) -> None:
    assert [done for _, _, done, _ in of_two_ranks] == ["done"] * 2


def one_gives_up(group: Group) -> None:
    if group.rank == 1:
        raise MemoryError("no room for a graph")
    group.all_reduce_(torch.ones(4))  # waits for rank 1


def test_a_rank_that_raises_is_known_to_one_that_waits(tmp_path: Path) -> None:
    first, second = run_ranks(2, tmp_path, one_gives_up)
    assert second.error == "MemoryError: no room for a graph"
    assert first.error is not None and "rank 1 failed: no room for a graph" in first.error
    assert max(first.seconds, second.seconds) < 60


def one_exits(group: Group) -> None:
    if group.rank == 1:
        sys.exit(0)
    group.all_reduce_(torch.ones(4))


def test_a_rank_that_exits_is_told_of_in_words(tmp_path: Path) -> None:
    first, second = run_ranks(2, tmp_path, one_exits, limit=30)
    assert second.error == "SystemExit: 0"
    assert first.error is not None
    assert first.error.endswith("rank 1 failed: it left by sys.exit(0) while the others had not ended"), first.error


def does_something_else(group: Group, what: str) -> str:
    """Rank 1 comes for an agreement, or leaves."""
    if group.rank == 0:
        group.share([1] * 1000, "sharing prompts")
    elif what == "same":
        group.same(7, "comparing a batch")
    elif what == "agree":
        group.agree("the sizes", [1, 2])
    return "left"


@pytest.mark.parametrize(
    ("what", "doing"),
    [("same", "comparing a batch"), ("agree", "agreeing on the sizes"), ("leave", "closing the group")],
)
def test_ranks_that_meet_for_different_things_raise_at_once(tmp_path: Path, what: str, doing: str) -> None:
    for one in run_ranks(2, tmp_path, does_something_else, what, limit=30):
        assert one.error is not None and one.seconds < 15
        assert f"rank 0 is sharing prompts; rank 1 is {doing}; all must make the same calls" in one.error


def one_is_killed(group: Group) -> None:
    group.exchange(None)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank == 2:  # in no collective at all, and never looks
        time.sleep(100)
    if group.rank == 3:
        time.sleep(1)
        raise RuntimeError("CUDA error: unspecified launch failure")  # what its device may say of it
    while True:
        group.all_reduce_(torch.ones(4))


def test_a_killed_rank_ends_all_others_by_name(tmp_path: Path) -> None:
    started = time.monotonic()
    first, killed, third, fourth = run_ranks(4, tmp_path, one_is_killed)
    assert killed.code == -signal.SIGKILL
    assert first.error is not None and "rank 1 died" in first.error
    assert third.error == "ended: rank 1 died"
    assert fourth.error == "CommError: rank 3 of 4: rank 1 died"
    assert time.monotonic() - started < 60


def in_order(group: Group) -> list[str]:
    order: list[str] = []
    import torch.distributed as dist

    def note(what: str) -> None:
        order.append(f"{what}, group {'there' if dist.is_initialized() else 'gone'}")

    group.before_close(lambda: note("kernels"))
    group.before_close(lambda: note("graphs"))
    group.close()
    note("end")
    return order


def test_graphs_go_before_the_process_group(of_two_ranks: list[tuple[Any, ...]]) -> None:
    for *_, order in of_two_ranks:
        assert order == ["graphs, group there", "kernels, group there", "end, group gone"]


def test_ranks_are_read_from_a_launcher() -> None:
    ranks = Ranks(1, 4, 1, 2, "here", 29500)
    assert Ranks.of(ranks.environment()) == ranks
    assert ranks.spans_nodes
    assert Ranks.of({}) is None
    with pytest.raises(CommError, match="LOCAL_RANK"):
        Ranks.of({"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(CommError, match="no number"):
        Ranks.of({**ranks.environment(), "RANK": "x"})
    for name, number in (("RANK", "4"), ("RANK", "-1"), ("WORLD_SIZE", "0"), ("LOCAL_RANK", "2"), ("WORLD_SIZE", "1")):
        with pytest.raises(CommError, match="count from 0"):
            Ranks.of({**ranks.environment(), name: number})
