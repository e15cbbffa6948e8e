"""Sampling inside the graph, from a counter generator instead of a stateful one."""

from stepgraph.ops.sampling.chain import sample_chain
from stepgraph.ops.sampling.penalties import mark_seen
from stepgraph.ops.sampling.sample_op import sample
from stepgraph.ops.sampling.select import Sampler, get_sampler

__all__ = ["Sampler", "get_sampler", "mark_seen", "sample", "sample_chain"]
