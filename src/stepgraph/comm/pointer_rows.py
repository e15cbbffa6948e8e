"""The pointer table's rows: where each rank's captured input lies, known to all of them after the capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from stepgraph.comm.errors import CommError

Exchange = Callable[[Any], list[Any]]
"""Gives every rank's value, in the order of ranks."""


class PeerMemory(Protocol):
    """How one process makes its memory known to others of its node."""

    def export(self, address: int) -> tuple[bytes, int]:
        """A handle of the allocation that an address is in, and the offset in it."""

    def open(self, handle: bytes) -> int:
        """Where a peer's allocation lies in this process; the same at every call."""


@dataclass(frozen=True)
class _Taken:
    address: int
    nbytes: int


class PointerRows:
    """Hands out rows during captures and finds their addresses afterwards.

    capacity: rows there are. Row 0 is the caller's own.
    """

    def __init__(self, rank: int, capacity: int) -> None:
        self._rank, self._capacity = rank, capacity
        self._pending: list[_Taken] = []
        self._first = 1  # of those that are pending

    def take(self, address: int, nbytes: int, *, capturing: bool) -> int:
        """The row for an input at this address. A warm-up must not take one: it would read it before it is filled.

        Raises:
            CommError: not while capturing, or no row is left.
        """
        if not capturing:
            raise CommError("a row of the pointer table is taken only while the stream captures, not in a warm-up")
        row = self._first + len(self._pending)
        if row >= self._capacity:
            raise CommError(f"all {self._capacity - 1} rows of the pointer table are taken; capture fewer sizes")
        self._pending.append(_Taken(address, nbytes))
        return row

    def exchange(self, exchange: Exchange, memory: PeerMemory) -> tuple[int, list[list[int]]]:
        """The first of the rows taken since the last call, and for each the addresses by rank.

        Raises:
            CommError: on all ranks, where they have taken different rows, or one cannot export its memory.
        """
        mine: list[tuple[bytes, int, int]] | str
        try:
            mine = [(*memory.export(taken.address), taken.nbytes) for taken in self._pending]
        except CommError as error:
            mine = str(error)
        everyone = exchange(mine)
        for rank, theirs in enumerate(everyone):
            if isinstance(theirs, str):
                raise CommError(f"rank {rank} cannot share the memory of its captured inputs: {theirs}")
        sizes = [[nbytes for *_, nbytes in theirs] for theirs in everyone]
        for rank, theirs in enumerate(sizes):
            if theirs != sizes[0]:
                raise CommError(
                    f"rank {rank} has captured {len(theirs)} inputs to read in place, rank 0 {len(sizes[0])}, or of "
                    f"other sizes; all ranks must capture the same"
                )
        first, taken_rows = self._first, self._pending
        rows = [
            [
                taken.address if rank == self._rank else memory.open(theirs[index][0]) + theirs[index][1]
                for rank, theirs in enumerate(everyone)
            ]
            for index, taken in enumerate(taken_rows)
        ]
        self._first, self._pending = first + len(taken_rows), []
        return first, rows
