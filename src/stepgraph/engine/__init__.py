"""A small LLM engine on the runtime: models, weights, paged KV, scheduler, sampler."""

from stepgraph.engine.llm import LLM
from stepgraph.engine.lora import LoraConfig
from stepgraph.engine.outputs import CompletionOutput, RequestOutput, TextDelta
from stepgraph.engine.params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "LoraConfig", "RequestOutput", "SamplingParams", "TextDelta"]
