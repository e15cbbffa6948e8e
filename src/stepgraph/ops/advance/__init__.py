"""The end of a decode step, on the device: rows move on by the token that was chosen, or end, and the host is told."""

from stepgraph.ops.advance.advance_op import advance

__all__ = ["advance"]
