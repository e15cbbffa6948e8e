"""Takes out of traced steps what the profiler that traced them added to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stepgraph.measure.trace.waterfall import StepWaterfall


def without_profiler(steps: Sequence[StepWaterfall], added_us: float) -> list[StepWaterfall]:
    """The steps as they are without a profiler, as far as can be told.

    Under it a graph's launch takes longer with every node, and meanwhile the device waits for it. So each node of a
    step has the same share of `added_us`, and a wait for a graph's launch is cut by the shares of the nodes that the
    graph runs, to 0 at most. Nothing is cut elsewhere: launches of single kernels are each a little dearer, and which
    of them the device waits for is as it was. What the profiler adds inside a graph cannot be told from what it adds in
    front of it, and is cut there too.

    added_us: by how much a step is longer with the profiler than without, by events. Below 0 it is noise, and 0.
    """
    return [_without(step, max(added_us, 0.0) / step.activities) for step in steps]


def _without(step: StepWaterfall, node_us: float) -> StepWaterfall:
    first = min(step.before_first, step.first_nodes * node_us)
    cuts = [min(gap.us, gap.nodes * node_us) for gap in step.gaps]
    own = first + sum(cuts)
    gaps = [replace(gap, us=gap.us - cut) for gap, cut in zip(step.gaps, cuts, strict=True)]
    return replace(
        step,
        total=step.total - own,
        before_first=step.before_first - first,
        gaps=tuple(sorted(gaps, key=lambda gap: -gap.us)),
        profiler=own,
    )
