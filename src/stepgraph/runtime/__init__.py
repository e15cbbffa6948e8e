"""Capture and replay of any step function; knows nothing of language models."""

from .batch import BatchDescriptor
from .buffers import PaddingPolicy, Slot, StaticBuffers
from .capture import CaptureReport
from .config import Backend, GraphConfig
from .dispatch import Decision, Dispatcher, Mode, Reason
from .errors import CaptureError, ConfigError, InputError, ReplayError, StepgraphError
from .ladder import Ladder, sglang_default_ceiling, vllm_default_ceiling
from .outputs import StepOutput
from .platforms.tape import opaque
from .runner import GraphRunner
from .stats import Stats

__all__ = [
    "Backend",
    "BatchDescriptor",
    "CaptureError",
    "CaptureReport",
    "ConfigError",
    "Decision",
    "Dispatcher",
    "GraphConfig",
    "GraphRunner",
    "InputError",
    "Ladder",
    "Mode",
    "PaddingPolicy",
    "Reason",
    "ReplayError",
    "Slot",
    "StaticBuffers",
    "Stats",
    "StepOutput",
    "StepgraphError",
    "opaque",
    "sglang_default_ceiling",
    "vllm_default_ceiling",
]
