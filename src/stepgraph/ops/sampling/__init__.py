"""Sampling inside the graph, from a counter generator instead of a stateful one."""

from stepgraph.ops.sampling.sample_op import sample

__all__ = ["sample"]
