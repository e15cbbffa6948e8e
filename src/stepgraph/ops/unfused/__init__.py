"""The `unfused` operation set: a decoder layer in ten launches."""

from stepgraph.ops.unfused.operation_set import TEN, UnfusedOperations

__all__ = ["TEN", "UnfusedOperations"]
