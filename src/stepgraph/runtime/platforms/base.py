"""The seam to the device: what a platform must offer so that a step can be recorded and replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from stepgraph.runtime.nodes import GraphNode

if TYPE_CHECKING:
    from stepgraph.runtime.breakable import BreakableRecording

T = TypeVar("T")


class Recording(Protocol):
    """One recorded step. It reads and writes the addresses it was recorded with, and runs no Python of the step."""

    @property
    def num_nodes(self) -> int | None:
        """Recorded operations, or None where the platform cannot count them."""

    def replay(self) -> None:
        """Submit the step on the current stream. Asynchronous where the device is."""

    def nodes(self) -> list[GraphNode]:
        """Every recorded operation with its region, in an order in which they may run.

        Raises:
            CaptureError: released, or the platform cannot look into its recordings; says what it needs.
        """

    def release(self) -> None:
        """Give back what the recording holds. It cannot be replayed afterwards."""


class HostMirror(Protocol):
    """The host's side of the step buffers: brings bytes written on the host to the device's slab."""

    def upload(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Copy these [start, stop) byte ranges, in the order of the current stream.

        The host bytes may be rewritten as soon as the call returns.
        """


class Platform(Protocol):
    """A device that steps run on.

    One contract for all: what `record` returns replays without the step's Python, on frozen addresses;
    a host read of a device value inside a recorded step raises CaptureError and names the Python line.
    """

    name: str
    device: torch.device

    def new_pool(self) -> Any:
        """A memory pool that recordings may share; they must then not replay at the same time."""

    def warm_up(self, step: Callable[[], T]) -> T:
        """Run the step eagerly where it will be recorded, so that kernels compile and workspaces grow first."""

    def record(self, step: Callable[[], T], pool: Any) -> tuple[Recording, T]:
        """Record one call of `step`; also returns what it returned, whose storages every replay overwrites.

        Raises:
            CaptureError: the step did what a recording cannot hold.
            torch.OutOfMemoryError: no room.

        After either the pool takes no further recordings; those that it holds still replay. A function marked with
        `graph_break` is called and recorded like any other.
        """

    def record_breakable(
        self, step: Callable[[], T], pool: Any, *, every_op: bool = False
    ) -> tuple[BreakableRecording, T]:
        """Record one call of `step` with its breaks left out: they run eagerly here and at every replay.

        The step really runs, so that its breaks see the values that they would see eagerly.
        every_op: for debugging, every operator is a break of its own.

        Raises:
            CaptureError: as `record`; or, on the tape, a segment read a tensor that a break hides.
            torch.OutOfMemoryError: no room.

        An error inside a break keeps its type and names the break. After any error the pool is as `record` leaves it.
        """

    def record_eager(self, step: Callable[[], T]) -> tuple[BreakableRecording, T]:
        """For debugging: a recording that is one break, the whole step. It runs once, and again at every replay."""

    def host_mirror(self, host: torch.Tensor, slab: torch.Tensor) -> HostMirror:
        """A mirror that brings `host`, uint8 bytes on the host, to the equally long start of `slab`."""

    def synchronize(self) -> None:
        """Wait until the device has finished everything submitted."""
