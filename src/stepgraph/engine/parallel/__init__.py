"""Tensor parallel: what a rank has of a model, and how ranks keep in step."""

from stepgraph.engine.parallel.shard import Shard
from stepgraph.engine.parallel.tensor_parallel import TensorParallel, require_plain

__all__ = ["Shard", "TensorParallel", "require_plain"]
