"""Capture and replay of any step function; knows nothing of language models."""

from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.break_cost import BreakCost
from stepgraph.runtime.breaks import graph_break
from stepgraph.runtime.buffers import StaticBuffers
from stepgraph.runtime.capture import CaptureReport
from stepgraph.runtime.capture_guard import no_captures
from stepgraph.runtime.compiler.steps import CompileTotal
from stepgraph.runtime.config import Backend, Compile, Debug, DecodePhase, GraphConfig, PrefillPhase
from stepgraph.runtime.dispatch import Decision, Dispatcher, Mode, Reason
from stepgraph.runtime.errors import CaptureError, ConfigError, InputError, ReplayError, StepgraphError
from stepgraph.runtime.ladder import Ladder, sglang_default_ceiling, vllm_default_ceiling
from stepgraph.runtime.nodes import GraphNode
from stepgraph.runtime.outputs import StepOutput
from stepgraph.runtime.platforms.tape import opaque
from stepgraph.runtime.pool import GraphPool
from stepgraph.runtime.regions import region
from stepgraph.runtime.resolve import AttentionGroup, Change, Resolution, Severity, resolve
from stepgraph.runtime.runner import GraphRunner
from stepgraph.runtime.slots import PaddingPolicy, Slot
from stepgraph.runtime.stats import Stats
from stepgraph.runtime.support import AttentionCGSupport
from stepgraph.runtime.workspace import Workspace

__all__ = [
    "AttentionCGSupport",
    "AttentionGroup",
    "Backend",
    "BatchDescriptor",
    "BreakCost",
    "CaptureError",
    "CaptureReport",
    "Change",
    "Compile",
    "CompileTotal",
    "ConfigError",
    "Debug",
    "Decision",
    "DecodePhase",
    "Dispatcher",
    "GraphConfig",
    "GraphNode",
    "GraphPool",
    "GraphRunner",
    "InputError",
    "Ladder",
    "Mode",
    "PaddingPolicy",
    "PrefillPhase",
    "Reason",
    "ReplayError",
    "Resolution",
    "Severity",
    "Slot",
    "StaticBuffers",
    "Stats",
    "StepOutput",
    "StepgraphError",
    "Workspace",
    "graph_break",
    "no_captures",
    "opaque",
    "region",
    "resolve",
    "sglang_default_ceiling",
    "vllm_default_ceiling",
]
