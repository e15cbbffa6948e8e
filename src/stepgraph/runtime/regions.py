"""Named regions of a step: while it is recorded they note which nodes each of them adds.

A range cannot be put around part of a replay, so the names are taken down at capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType


class RegionLog:
    """The region of every node of one recording.

    new_nodes: gives the nodes recorded since it was last called, as whatever identifies them on the platform.
    """

    def __init__(self, new_nodes: Callable[[], Iterable[int]]) -> None:
        self.regions: dict[int, str] = {}
        self._new_nodes = new_nodes
        self._path: list[str] = []

    def enter(self, name: str) -> None:
        self.settle()
        self._path.append(name)

    def leave(self, *, failed: bool) -> None:
        if not failed:  # after an error the recording may be gone already
            self.settle()
        self._path.pop()

    def settle(self) -> None:
        """Give what was recorded since the last boundary to the region that is open now, "" outside all."""
        path = "/".join(self._path)
        for node in self._new_nodes():
            self.regions[node] = path


_live: ContextVar[RegionLog | None] = ContextVar("stepgraph_region_log", default=None)


class region:
    """`with region("attention"):` names the nodes that a step records inside.

    Regions nest: `attention` inside `layers.3` is `layers.3/attention`. Where nothing records, it does nothing.
    """

    __slots__ = ("_log", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._log: RegionLog | None = None

    def __enter__(self) -> None:
        log = self._log = _live.get()
        if log is not None:
            log.enter(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._log is not None:
            self._log.leave(failed=kind is not None)


@contextmanager
def logging_regions(log: RegionLog | None) -> Iterator[None]:
    """Platforms open this around the step they record; None: nothing can be noted, regions do nothing."""
    token = _live.set(log)
    try:
        yield
        if log is not None:
            log.settle()
    finally:
        _live.reset(token)
