"""Samplers by name."""

from collections.abc import Callable

from stepgraph.ops.sampling.chain import sample_chain
from stepgraph.ops.sampling.sample_op import sample
from stepgraph.runtime.errors import ConfigError

Sampler = Callable[..., None]
"""Called with `sample`'s arguments."""

_SAMPLERS: dict[str, Sampler] = {"fused": sample, "chain": sample_chain}


def get_sampler(name: str) -> Sampler:
    """`fused`: one operator, few launches. `chain`: seven launches, for comparison. Raises ConfigError otherwise."""
    if name not in _SAMPLERS:
        raise ConfigError(f"sampler: unknown name '{name}'; use {' or '.join(_SAMPLERS)}")
    return _SAMPLERS[name]
