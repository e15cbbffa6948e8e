"""Capture and replay of any step function; knows nothing of language models."""

from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.buffers import PaddingPolicy, Slot, StaticBuffers
from stepgraph.runtime.capture import CaptureReport
from stepgraph.runtime.config import Backend, GraphConfig
from stepgraph.runtime.dispatch import Decision, Dispatcher, Mode, Reason
from stepgraph.runtime.errors import CaptureError, ConfigError, InputError, ReplayError, StepgraphError
from stepgraph.runtime.ladder import Ladder, sglang_default_ceiling, vllm_default_ceiling
from stepgraph.runtime.nodes import GraphNode
from stepgraph.runtime.outputs import StepOutput
from stepgraph.runtime.platforms.tape import opaque
from stepgraph.runtime.regions import region
from stepgraph.runtime.runner import GraphRunner
from stepgraph.runtime.stats import Stats

__all__ = [
    "Backend",
    "BatchDescriptor",
    "CaptureError",
    "CaptureReport",
    "ConfigError",
    "Decision",
    "Dispatcher",
    "GraphConfig",
    "GraphNode",
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
    "region",
    "sglang_default_ceiling",
    "vllm_default_ceiling",
]
