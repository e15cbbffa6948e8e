"""All-reduce that knows whether it is captured."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from stepgraph.comm.choice import Algorithm, Choice, Facts, Source, choose
from stepgraph.comm.errors import CommError
from stepgraph.comm.group import Group
from stepgraph.comm.in_flight import OneInFlight
from stepgraph.comm.record import Collective, CollectiveLog
from stepgraph.comm.thresholds import Table
from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.platforms.capturing import is_capturing
from stepgraph.runtime.platforms.tape import opaque


class Kernels(Protocol):
    """Our own algorithms on one device; see `comm.symmetric`."""

    facts: Facts

    def unfit(self, x: torch.Tensor) -> str | None:
        """Why a tensor cannot go through them, or None."""

    def run(self, choice: Choice, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Launch; see `AllReduce`. Takes a pointer row where the choice says so."""

    def gathers(self, tensor: torch.Tensor) -> bool:
        """Whether `gather` takes it."""

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors, [world, *tensor.shape]."""

    def exchange(self) -> None:
        """Fill the rows that were taken since the last call. Of all ranks together, and never while capturing."""

    def check(self) -> None:
        """Raises CommError: a kernel has waited longer than its limit for a rank; says for which."""

    def close(self) -> None:
        """Give back what peers' memory was mapped."""


class AllReduce:
    """Sums tensors over the ranks of a group, each by the algorithm that fits its size, captured or not.

    The choice is made when the operation is launched: of a captured one at the capture, for all replays. `log` has it.

    kernels: of the device; None: only the library, and `why_library` says why. table: their thresholds.
    """

    def __init__(
        self, group: Group, kernels: Kernels | None = None, table: Table | None = None, why_library: str = ""
    ) -> None:
        if (kernels is None) != (table is None):
            raise CommError("all-reduce: kernels and their table of thresholds come together")
        self.log = CollectiveLog()
        self.in_flight = OneInFlight(group.device)
        self.kernels = kernels
        self._group, self._table, self._why_library = group, table, why_library
        self._library = opaque(group.all_reduce_)
        self._no_rows: str | None = None  # in the recording that has begun
        self._taken = False

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, *, choice: Choice | None = None
    ) -> torch.Tensor:
        """The sum of the ranks' `x`, plus `residual`, which is the same on all of them.

        **x is consumed.** The result may lie in its memory (push, two-shot pull and the library write there) or in a
        new tensor (one-shot pull): use what is returned, and nothing else that shares memory with x. residual is left
        as it is. From our kernels all ranks get the same bits, each element summed in the order of the ranks; of what
        the library does, and in which order, that is not certain.

        x: any shape, contiguous, and the same shape and dtype on all ranks. Eagerly nobody compares these: unequal ones
        may hang, abort, or sum what does not belong together. Of captured ones `exchange` does. residual: the same
        shape and dtype. choice: instead of the table's, for measuring. Raises as `check` too, and in a closed group.

        Raises:
            CommError: a residual of another shape or dtype, another operation in flight, or a choice that this tensor
                or device cannot have.
        """
        if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
            raise CommError(
                f"all-reduce: x is {_shown(x)} and the residual {_shown(residual)}; give one of x's shape and dtype"
            )
        capturing = is_capturing(self._group.device)
        nbytes = x.numel() * x.element_size()
        choice = self.require(choice, x, capturing=capturing) if choice else self.choose(x, capturing=capturing)
        self._group.check()
        if capturing:
            self.log.add(Collective("all_reduce", nbytes, choice))
        if not nbytes:
            return x
        self.in_flight.enter(capturing=capturing)
        try:
            if self.kernels is not None and choice.algorithm is not Algorithm.LIBRARY:
                return self.kernels.run(choice, x, residual)
            self._library(x)
            return x if residual is None else x.add_(residual)
        finally:
            self.in_flight.leave(capturing=capturing)

    def choose(self, x: torch.Tensor, *, capturing: bool) -> Choice:
        """What would sum x now."""
        if self.kernels is None or self._table is None:
            return Choice(Algorithm.LIBRARY, Source.OWN, self._why_library)
        facts = replace(self.kernels.facts, capturing=capturing)
        if facts.no_rows is None:
            facts = replace(facts, no_rows=self._no_rows)
        unfit = self.kernels.unfit(x)
        if facts.no_kernels is None and unfit is not None:
            facts = replace(facts, no_kernels=unfit)
        return choose(self._table, x.numel() * x.element_size(), facts)

    def take(self) -> None:
        """For an engine, until `close`: its graphs are all that hold these collectives, and `log` is theirs.

        Raises:
            CommError: another engine has it. Each would let go of memory that the other's graphs read.
        """
        if self._taken:
            raise CommError(
                "all-reduce: another engine has it; release that one first (`llm.core.release()`, on all ranks), or "
                "make an all-reduce for each engine"
            )
        self._taken = True
        self.log.by_key.clear()

    def begin(self, key: BatchDescriptor, no_rows: str | None = None) -> None:
        """A recording begins: what it freezes is this key's. no_rows: why its inputs cannot be read in place."""
        self.log.begin(key)
        self.in_flight.begin()
        self._no_rows = no_rows

    def exchange(self) -> None:
        """After a capture, on all ranks: what was captured is the same everywhere, and addresses become known.

        Raises:
            CommError: on all ranks, where one has captured other collectives; or while capturing.
        """
        if is_capturing(self._group.device):
            raise CommError("addresses are exchanged after a capture, never in it")
        self._group.agree("the collectives that were captured", _summary(self.log))
        if self.kernels is not None:
            self.kernels.exchange()

    def check(self) -> None:
        """Raises CommError: another rank is gone, or a kernel has waited too long for one."""
        self._group.check()
        if self.kernels is not None:
            self.kernels.check()

    def close(self) -> None:
        """Let go of peers' memory: before anyone gives graphs back, whose memory it is, and after their last replay.
        Other graphs may be captured then."""
        if self.kernels is not None:
            self.kernels.close()
        self._group.exchange(None, "letting go of graphs")
        self._taken = False

    def require(self, choice: Choice, x: torch.Tensor, *, capturing: bool) -> Choice:
        """The choice, where x can have it. Raises CommError: says why it cannot."""
        if choice.algorithm is Algorithm.LIBRARY:
            return choice
        reason = self._why_library if self.kernels is None else self.kernels.unfit(x)
        if self.kernels is not None:
            facts, nbytes = self.kernels.facts, x.numel() * x.element_size()
            room = {Source.PUSHED: facts.push_bytes, Source.STAGED: facts.stage_bytes}.get(choice.source, nbytes)
            reason = reason or facts.no_kernels
            if choice.source is Source.ROW and not capturing:
                reason = reason or "a pointer row is taken only while the stream captures"
            if choice.source is Source.ROW:
                reason = reason or facts.no_rows
            if choice.algorithm is Algorithm.MULTICAST:
                reason = reason or facts.no_multicast
            if nbytes > room:
                reason = reason or f"{nbytes} bytes are more than the {room} there are for it"
        if reason is not None:
            raise CommError(f"all-reduce by {choice.algorithm} ({choice.source}): {reason}")
        return choice


def _shown(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype}"


def _summary(log: CollectiveLog) -> list[tuple[str, list[tuple[str, int, str, str]]]]:
    return [
        (str(key), [(one.kind, one.nbytes, one.choice.algorithm.value, one.choice.source.value) for one in collectives])
        for key, collectives in sorted(log.by_key.items(), key=lambda item: str(item[0]))
    ]
