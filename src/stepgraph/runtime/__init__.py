"""Capture and replay of any step function; knows nothing of language models."""

from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.breaks import graph_break
from stepgraph.runtime.buffers import StaticBuffers
from stepgraph.runtime.capture import CaptureReport
from stepgraph.runtime.config import Backend, Debug, DecodePhase, GraphConfig, PrefillPhase
from stepgraph.runtime.dispatch import Decision, Dispatcher, Mode, Reason
from stepgraph.runtime.errors import CaptureError, ConfigError, InputError, ReplayError, StepgraphError
from stepgraph.runtime.ladder import Ladder, sglang_default_ceiling, vllm_default_ceiling
from stepgraph.runtime.nodes import GraphNode
from stepgraph.runtime.outputs import StepOutput
from stepgraph.runtime.platforms.tape import opaque
from stepgraph.runtime.regions import region
from stepgraph.runtime.runner import GraphRunner
from stepgraph.runtime.slots import PaddingPolicy, Slot
from stepgraph.runtime.stats import Stats

__all__ = [
    "Backend",
    "BatchDescriptor",
    "CaptureError",
    "CaptureReport",
    "ConfigError",
    "Debug",
    "Decision",
    "DecodePhase",
    "Dispatcher",
    "GraphConfig",
    "GraphNode",
    "GraphRunner",
    "InputError",
    "Ladder",
    "Mode",
    "PaddingPolicy",
    "PrefillPhase",
    "Reason",
    "ReplayError",
    "Slot",
    "StaticBuffers",
    "Stats",
    "StepOutput",
    "StepgraphError",
    "graph_break",
    "opaque",
    "region",
    "sglang_default_ceiling",
    "vllm_default_ceiling",
]
