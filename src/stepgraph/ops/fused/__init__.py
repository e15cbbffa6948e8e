"""The `fused` operation set: a decoder layer in five launches, for small batches."""

from stepgraph.ops.fused.operation_set import FIVE, NINE, SIX, FusedOperations

__all__ = ["FIVE", "NINE", "SIX", "FusedOperations"]
