"""What recording one key took: bytes of the pool, bytes of the driver, time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter

from stepgraph.runtime.platforms import DeviceMemory, Recording
from stepgraph.runtime.pool import GraphPool


@dataclass(frozen=True)
class Left:
    """What eager work has left on the device, in bytes.

    loaded_bytes: outside torch: kernels that the driver loaded, and memory that it sets up once.
    kept_bytes: in tensors that live on, as the workspaces of libraries do.
    """

    loaded_bytes: int = 0
    kept_bytes: int = 0

    @classmethod
    def between(cls, before: DeviceMemory | None, after: DeviceMemory | None) -> Left:
        if before is None or after is None:
            return cls()
        return cls(_taken(before, after), after.allocated - before.allocated)

    def __add__(self, other: Left) -> Left:
        return Left(self.loaded_bytes + other.loaded_bytes, self.kept_bytes + other.kept_bytes)


@dataclass(frozen=True)
class CaptureCost:
    """What one key took.

    pool_bytes: the shared pool grew by this; a key that fits into what larger ones left takes none.
    driver_bytes: free memory that went while the key was recorded, instantiated and uploaded, less what torch's
        allocator took of it: the driver's own, for the executable graph. The driver takes memory in pieces of 2 MiB
        and more, so that one key may pay for several: read sums. 0 where there is no driver.
    loaded_bytes, kept_bytes: what the warm-ups left, see `Left`; shared outputs are made there too.
    nodes: recorded operations by type.
    warmup_seconds, capture_seconds, instantiate_seconds: of the host. Instantiation is not part of capture_seconds.
    compile_seconds: of torch's compiler, with its trace; not part of warmup_seconds, although the first warm-up has it.
    """

    pool_bytes: int
    driver_bytes: int
    loaded_bytes: int
    kept_bytes: int
    nodes: Mapping[str, int]
    warmup_seconds: float
    capture_seconds: float
    instantiate_seconds: float
    compile_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compile_seconds + self.warmup_seconds + self.capture_seconds + self.instantiate_seconds


class CostMeter:
    """Reads the figures around the recording of one key. It waits for nothing, so that it may always be on.

    compiled: the seconds that compiling has taken so far.
    """

    def __init__(self, pool: GraphPool, compiled: Callable[[], float] = lambda: 0.0) -> None:
        self._pool, self._compiled = pool, compiled
        self._compiled_before = compiled()
        self._begun = self._warm = perf_counter()
        self._at_start = self._at_warm = pool.platform.memory()
        self._pool_before: int | None = None

    def warmed_up(self) -> None:
        """The warm-ups are done; what follows is the recording."""
        self._at_warm = self._pool.platform.memory()
        self._pool_before = self._pool.nbytes()
        self._warm = perf_counter()

    def pool_growth(self) -> int:
        """Bytes that the pool has grown by since the warm-ups; 0 before."""
        before = self._pool_before
        return 0 if before is None else self._pool.nbytes() - before

    def cost(self, recording: Recording) -> CaptureCost:
        """The key is recorded."""
        recorded = perf_counter() - self._warm
        left = Left.between(self._at_start, self._at_warm)
        compiling = self._compiled() - self._compiled_before
        return CaptureCost(
            pool_bytes=self.pool_growth(),
            driver_bytes=_taken(self._at_warm, self._pool.platform.memory()),
            loaded_bytes=left.loaded_bytes,
            kept_bytes=left.kept_bytes,
            nodes=dict(recording.node_types),
            warmup_seconds=self._warm - self._begun - compiling,
            capture_seconds=recorded - recording.instantiate_seconds,
            instantiate_seconds=recording.instantiate_seconds,
            compile_seconds=compiling,
        )


def _taken(before: DeviceMemory | None, after: DeviceMemory | None) -> int:
    return 0 if before is None or after is None else after.outside - before.outside
