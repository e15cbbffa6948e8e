"""Errors of the engine: what is wrong with a model's files, and what is wrong with a request."""

from stepgraph.runtime.errors import StepgraphError


class ModelError(StepgraphError):
    """Weights, a configuration or a tokenizer that is missing, damaged, contradictory or not supported."""


class RequestError(StepgraphError):
    """A prompt or a sampling parameter that cannot be served."""
