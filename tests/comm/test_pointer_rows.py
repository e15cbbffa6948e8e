"""The contract of pointer rows, with two ranks in one process and memory that is made up."""

from __future__ import annotations

import contextlib

import pytest

from stepgraph.comm.errors import CommError
from stepgraph.comm.pointer_rows import PointerRows

MINE, THEIRS = 1000, 5000  # where an allocation lies in its own process
MAPPED = 70000  # where a peer's lies here


class Memory:
    def export(self, address: int) -> tuple[bytes, int]:
        base = MINE if address < THEIRS else THEIRS
        return str(base).encode(), address - base

    def open(self, handle: bytes) -> int:
        return MAPPED + int(handle)


class Refusing(Memory):
    def export(self, address: int) -> tuple[bytes, int]:
        raise CommError("not with expandable segments")


def exchange_with(theirs: PointerRows, memory: Memory | None = None):
    """What rank 0 gets from an exchange with rank 1."""

    def exchange(mine):
        sent = []
        with contextlib.suppress(CommError):
            theirs.exchange(lambda value: sent.append(value) or [mine, value], memory or Memory())
        return [mine, sent[0]]

    return exchange


def pair() -> tuple[PointerRows, PointerRows]:
    return PointerRows(0, 100), PointerRows(1, 100)


def test_addresses_are_known_after_the_capture() -> None:
    mine, theirs = pair()
    assert mine.take(MINE + 16, 64, capturing=True) == 1
    assert mine.take(MINE + 80, 64, capturing=True) == 2
    theirs.take(THEIRS, 64, capturing=True)
    theirs.take(THEIRS + 128, 64, capturing=True)
    first, rows = mine.exchange(exchange_with(theirs), Memory())
    assert first == 1
    assert rows == [[MINE + 16, MAPPED + THEIRS], [MINE + 80, MAPPED + THEIRS + 128]]
    assert mine.take(MINE, 8, capturing=True) == 3  # the next capture goes on


def test_no_row_in_a_warm_up() -> None:
    with pytest.raises(CommError, match="only while the stream captures"):
        PointerRows(0, 100).take(MINE, 64, capturing=False)


@pytest.mark.parametrize("sizes", [[], [64, 64], [32]])
def test_other_counts_or_sizes_raise(sizes: list[int]) -> None:
    mine, theirs = pair()
    mine.take(MINE, 64, capturing=True)
    for nbytes in sizes:
        theirs.take(THEIRS, nbytes, capturing=True)
    with pytest.raises(CommError, match="all ranks must capture the same"):
        mine.exchange(exchange_with(theirs), Memory())


def test_unequal_counts_raise_on_the_other_rank_too() -> None:
    mine, theirs = pair()
    mine.take(MINE, 64, capturing=True)
    with pytest.raises(CommError, match="all ranks must capture the same"):
        theirs.exchange(lambda value: [[(b"1000", 0, 64)], value], Memory())


def test_memory_that_cannot_be_shared_raises_on_all() -> None:
    mine, theirs = pair()
    mine.take(MINE, 64, capturing=True)
    theirs.take(THEIRS, 64, capturing=True)
    with pytest.raises(CommError, match="rank 1 cannot share .* expandable segments"):
        mine.exchange(exchange_with(theirs, Refusing()), Memory())


def test_the_table_ends() -> None:
    rows = PointerRows(0, 2)
    rows.take(MINE, 64, capturing=True)
    with pytest.raises(CommError, match="all 1 rows"):
        rows.take(MINE, 64, capturing=True)
