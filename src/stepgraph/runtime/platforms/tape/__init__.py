"""The tape: a CUDA graph's contract on a CPU, so that every rule can be tested without a GPU."""

from .opaque import opaque
from .platform import TapePlatform

__all__ = ["TapePlatform", "opaque"]
