"""The seam to the device: what a platform must offer so that a step can be recorded and replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from stepgraph.runtime.nodes import GraphNode

if TYPE_CHECKING:
    from stepgraph.runtime.breakable import BreakableRecording

T = TypeVar("T")


@dataclass(frozen=True)
class DeviceMemory:
    """A device's memory at one moment, in bytes.

    total, free: the device's own figures; free counts what other processes have too.
    reserved: what torch's allocator holds in this process, graph pools included. allocated: of it, in tensors.
    """

    total: int
    free: int
    reserved: int
    allocated: int

    @property
    def outside(self) -> int:
        """Taken on the device, but not by torch's allocator: context, modules, graphs, mappings, other processes."""
        return self.total - self.free - self.reserved


@dataclass(frozen=True)
class LoopTerms:
    """When a step that runs again and again in one launch ends.

    most: of its runs. control: int32 [2] on the device: `halt`, which the step sets to 1 to end it, and how often it
    has run. done: int32 [1] of memory that both share, how often it has run, as a tensor of the device; told: as one of
    the host, valid once a mark behind it was waited for.
    """

    most: int
    control: torch.Tensor
    done: torch.Tensor
    told: torch.Tensor

    @property
    def halt(self) -> torch.Tensor:
        """int32 [1]."""
        return self.control[:1]

    @staticmethod
    def on(platform: Platform, most: int) -> LoopTerms:
        """With memory of their own."""
        with torch.inference_mode(False):
            control = torch.zeros(2, dtype=torch.int32, device=platform.device)
        return LoopTerms(most, control, *platform.shared((1,), torch.int32))


class Recording(Protocol):
    """One recorded step. It reads and writes the addresses it was recorded with, and runs no Python of the step."""

    @property
    def node_types(self) -> Mapping[str, int]:
        """How many recorded operations there are of each type, without those inside child graphs."""

    @property
    def instantiate_seconds(self) -> float:
        """Of the time that recording took, what making it executable took."""

    @property
    def num_nodes(self) -> int | None:
        """Recorded operations, or None where the platform cannot count them."""

    def replay(self) -> None:
        """Submit the step on the current stream. Asynchronous where the device is."""

    def loop(self, terms: LoopTerms) -> Callable[[], None]:
        """What runs the step until it halts or has run `terms.most` times, at least once, in one submission on the
        current stream. Made at the first call, for those terms, and released with the recording. Torch's generators do
        not go on within it.

        Raises:
            CaptureError: the recording or the device cannot; says why.
        """

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


class Mark(Protocol):
    """A place in the order of the device's work. Made once, and set again and again."""

    def set(self) -> None:
        """Here: behind all that was submitted to the current stream."""

    def wait(self) -> None:
        """Until the device has come to where it was set last."""


class Platform(Protocol):
    """A device that steps run on.

    One contract for all: what `record` returns replays without the step's Python, on frozen addresses;
    a host read of a device value inside a recorded step raises CaptureError and names the Python line.
    """

    name: str
    device: torch.device

    def new_pool(self) -> Any:
        """A memory pool that recordings may share; they must then not replay at the same time."""

    def pool_bytes(self, pool: Any) -> int:
        """What a pool has taken for its recordings, in bytes."""

    def memory(self) -> DeviceMemory | None:
        """The device's memory now, without waiting for it. None where the device has no figures of its own."""

    def cached_bytes(self) -> int:
        """What torch's allocator holds in no tensor and in no graph's pool. Walks all that it holds: some ms."""

    def give_back(self) -> None:
        """Return memory that nothing uses any more to the device. Waits for the device."""

    def warm_up(self, step: Callable[[], T]) -> T:
        """Run the step eagerly where it will be recorded, so that kernels compile and workspaces grow first."""

    def record(self, step: Callable[[], T], pool: Any) -> tuple[Recording, T]:
        """Record one call of `step`; also returns what it returned, whose storages every replay overwrites.

        Raises:
            CaptureError: the step did what a recording cannot hold.
            torch.OutOfMemoryError: no room.

        After a CaptureError the pool takes no further recordings; out of memory, it does as long as it holds one.
        Those that it holds still replay. A function marked with `graph_break` is called and recorded like any other.
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

    def shared(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeroed memory that steps write on the device and the host reads without a copy: as a tensor of the device,
        and as one of the host. What a step has written is there once a mark behind it was waited for."""

    def mark(self, *, asleep: bool = False) -> Mark:
        """A place in the order of work, to be set. asleep: who waits for it sleeps, and is later by the time that
        waking takes."""

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the host on the device, in the order of the current stream. The host waits for nothing."""

    def synchronize(self) -> None:
        """Wait until the device has finished everything submitted."""
