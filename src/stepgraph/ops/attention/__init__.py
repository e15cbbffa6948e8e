"""Paged attention behind one contract."""

from stepgraph.ops.attention.contract import AttentionBackend, AttentionShape
from stepgraph.ops.attention.select import available_backends, get_backend

__all__ = ["AttentionBackend", "AttentionShape", "available_backends", "get_backend"]
