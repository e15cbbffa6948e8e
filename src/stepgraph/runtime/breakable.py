"""Breakable recordings: segments that replay as they were recorded, and breaks that run their Python between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from stepgraph.runtime.break_cost import BreakCost, DeviceClock, measure_once, median_costs
from stepgraph.runtime.capture_guard import no_captures
from stepgraph.runtime.errors import CaptureError, ReplayError, StepgraphError
from stepgraph.runtime.nodes import Dependency, GraphNode
from stepgraph.runtime.platforms.base import LoopTerms, Recording
from stepgraph.runtime.results import Results


class Break:
    """A function that runs eagerly at every replay, on the addresses that its tensors had at the recording.

    calls, host_seconds: of its replays so far, together. inference: whether it was recorded in inference mode.

    Tensors among the arguments are frozen; other arguments are the same objects as then, and what the function reads
    by itself it reads afresh.

    args, kwargs: as recorded, with aliases that the break may keep for tensors. results: bring what a replay returns to
    where the segments read it.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], results: Results
    ) -> None:
        self.name = name
        self.calls = 0
        self.host_seconds = 0.0
        self.inference = torch.is_inference_mode_enabled()
        self._function = function
        self._args, self._kwargs, self._results = args, kwargs, results

    def __call__(self) -> None:
        """Run the function and bring its results to where the segments read them.

        Raises:
            ReplayError: a result that the recording has no place for; see Results.bring.
        """
        started = perf_counter()
        try:
            self._results.bring(self._function(*self._args, **self._kwargs))
        except Exception as error:
            name_break(error, self.name)
            raise
        self.calls += 1
        self.host_seconds += perf_counter() - started


class BreakableRecording:
    """A recorded step with breaks. A replay launches segment, function, segment, …, on the current stream.

    parts: in the order in which they run.
    clock: makes one that measures what breaks cost the device, where that is not the host.
    kept: recordings that only have to live as long.
    """

    def __init__(
        self,
        parts: Sequence[Recording | Break],
        clock: Callable[[], DeviceClock] | None = None,
        kept: Sequence[Recording] = (),
    ) -> None:
        self._parts = list(parts)
        self._clock = clock
        self._kept = kept
        self._calls: list[Callable[[], None]] | None = [
            part if isinstance(part, Break) else part.replay for part in self._parts
        ]
        self.breaks = [part for part in self._parts if isinstance(part, Break)]
        # Tensors of inference mode may be written in inference mode only.
        self._mode = torch.inference_mode if any(b.inference for b in self.breaks) else torch.no_grad

    @property
    def node_types(self) -> Mapping[str, int]:
        """How many recorded operations there are of each type, in all segments."""
        return sum((Counter(segment.node_types) for segment in self._segments()), Counter())

    @property
    def instantiate_seconds(self) -> float:
        return sum(segment.instantiate_seconds for segment in self._segments())

    @property
    def num_nodes(self) -> int | None:
        """Recorded operations in all segments, or None where the platform cannot count them."""
        total = 0
        for segment in self._segments():
            if segment.num_nodes is None:
                return None
            total += segment.num_nodes
        return total

    def replay(self) -> None:
        """Run the step. An error of a break's function names the break; the segments behind it have not run then.

        Raises:
            ReplayError: released, or a break returned what the recording has no place for.
        """
        if self._calls is None:
            raise ReplayError("this recording was released; capture again before replaying it")
        with self._mode(), no_captures():
            for call in self._calls:
                call()

    def loop(self, terms: LoopTerms) -> Callable[[], None]:
        raise CaptureError("a step with breaks runs Python between its graphs, and is launched one by one")

    def nodes(self) -> list[GraphNode]:
        """The nodes of all segments, numbered on from segment to segment. A segment waits for the one before it as a
        whole, which `after` does not repeat.

        Raises:
            CaptureError: released, or the platform cannot look into its recordings.
        """
        nodes: list[GraphNode] = []
        for segment in self._segments():
            nodes += [_shifted(node, len(nodes)) for node in segment.nodes()]
        return nodes

    def measure(self, repeats: int = 10) -> list[BreakCost]:
        """What each break costs, in the order in which they run: medians over `repeats` replays.

        The step really runs, on the inputs that lie in its buffers: twice a repeat where there is a device clock.
        Counts and times of the breaks stay as they were.

        Raises:
            ReplayError: released.
        """
        if self._calls is None:
            raise ReplayError("this recording was released; capture again before measuring it")
        counted = [(a_break.calls, a_break.host_seconds) for a_break in self.breaks]
        parts = list(zip(self._calls, self._parts, strict=True))
        steps = [(call, part if isinstance(part, Break) else None) for call, part in parts]
        clock = None if self._clock is None else self._clock()
        with self._mode():
            rounds = [measure_once(steps, clock) for _ in range(repeats)]
        for a_break, (calls, seconds) in zip(self.breaks, counted, strict=True):
            a_break.calls, a_break.host_seconds = calls, seconds
        return median_costs([a_break.name for a_break in self.breaks], rounds)

    def release(self) -> None:
        """Give back what segments and breaks hold. The recording cannot be replayed afterwards."""
        for segment in (*self._segments(), *self._kept):
            segment.release()
        self._parts = [part for part in self._parts if not isinstance(part, Break)]  # their nodes() say "released"
        self._calls, self.breaks = None, []

    def _segments(self) -> list[Recording]:
        return [part for part in self._parts if not isinstance(part, Break)]


def name_break(error: Exception, name: str) -> None:
    """Say in an error which break it comes from. Its type stays; ours are printed as one line, so they say it there."""
    if isinstance(error, StepgraphError):
        error.args = (f"break {name}: {error}", *error.args[1:])
    else:
        error.add_note(f"in the break {name} of a breakable recording")


def _shifted(node: GraphNode, by: int) -> GraphNode:
    after = tuple(Dependency(dependency.node + by, dependency.programmatic) for dependency in node.after)
    return replace(node, index=node.index + by, after=after, parent=None if node.parent is None else node.parent + by)
