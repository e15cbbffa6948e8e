"""The tape: a CUDA graph's contract on a CPU, so that every rule can be tested without a GPU."""

from stepgraph.runtime.platforms.tape.opaque import opaque
from stepgraph.runtime.platforms.tape.platform import TapePlatform

__all__ = ["TapePlatform", "opaque"]
