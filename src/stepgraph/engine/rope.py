"""Rotary settings as they stand in configurations, and the frequencies that follow from them.

Two spellings are read: "rope_theta" and "rope_scaling" at the top level, and "rope_parameters", which holds both, of
transformers 5. The formulas are those of its `modeling_rope_utils`, in float32 like there.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.engine.errors import ModelError
from stepgraph.engine.fields import flag, integer, positive
from stepgraph.ops.layer import inverse_frequencies

_AT_TOP_LEVEL = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
_MOST_POSITIONS = 2**31 - 1


@dataclass(frozen=True)
class Rope:
    """Rotary embeddings of one model.

    frequencies: radians a position, one for each pair of a head's elements; None: theta's own, unscaled.
    scale: cosines and sines are multiplied by it.
    max_positions: how many positions the model is meant for, scaling included.
    """

    theta: float
    frequencies: tuple[float, ...] | None
    scale: float
    max_positions: int


def read_rope(fields: Mapping[str, Any], head_dim: int, max_positions: int, where: str) -> Rope:
    """The rotary settings among a configuration's `fields`.

    max_positions: the configuration's "max_position_embeddings". Raises ModelError for a kind of scaling that is not
    supported, a value that cannot be, and two spellings that contradict each other.
    """
    settings = _settings(fields, where)
    rotated = settings.get("partial_rotary_factor", 1)
    if rotated != 1:
        raise ModelError(f"{where}: partial_rotary_factor {rotated!r} is not supported; only whole heads are rotated")
    theta = positive(settings, "rope_theta", where, default=10000.0)
    kind = settings.get("rope_type", "default")
    if kind == "default":
        return Rope(theta, None, 1.0, max_positions)
    factor = _factor(settings, max_positions, where)
    if kind == "dynamic":
        # Its frequencies stay theta's own up to `max_positions` and then change with the length of each sequence, so
        # that cached keys no longer fit. It is supported as far as it is static.
        return Rope(theta, None, 1.0, max_positions)
    if not isinstance(kind, str) or kind not in _SCALINGS:
        known = ", ".join(("default", "dynamic", *_SCALINGS))
        raise ModelError(f"{where}: rope_type {kind!r} is not supported; known: {known}")
    settings["head_dim"], settings["factor"] = head_dim, factor
    frequencies, scale, reach = _SCALINGS[kind](settings, inverse_frequencies(head_dim, theta), max_positions, where)
    if reach > _MOST_POSITIONS:
        raise ModelError(f"{where}: rope scaling by a factor of {factor:g} gives more than {_MOST_POSITIONS} positions")
    return Rope(theta, tuple(frequencies.tolist()), scale, int(reach))


def _settings(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Both spellings as one. They may say the same thing twice, but not two things."""
    settings: dict[str, Any] = {}
    sources = [fields.get("rope_parameters"), fields.get("rope_scaling"), {k: fields.get(k) for k in _AT_TOP_LEVEL}]
    for source in sources:
        if source is None:
            continue
        if not isinstance(source, dict):
            raise ModelError(f"{where}: rope_scaling and rope_parameters must be objects, got {source!r:.80}")
        for key, value in source.items():
            key = "rope_type" if key == "type" else key
            if isinstance(value, dict):
                raise ModelError(f"{where}: rope_parameters for {key!r} alone are not supported; all layers must share")
            if value is not None and settings.setdefault(key, value) != value:
                raise ModelError(
                    f"{where}: {key} is given as {settings[key]!r:.80} and as {value!r:.80} "
                    "(rope_parameters, rope_scaling, top level); leave one"
                )
    return settings


def _factor(settings: Mapping[str, Any], max_positions: int, where: str) -> float:
    default = None
    if settings.get("rope_type") == "yarn":
        default = max_positions / integer(settings, "original_max_position_embeddings", where, default=max_positions)
    factor = positive(settings, "factor", where, default=default)
    if factor < 1:
        raise ModelError(f"{where}: rope scaling's factor must be at least 1, got {factor:g}")
    return factor


_Scaled = tuple[torch.Tensor, float, float]
"""Frequencies, the scale of cosines and sines, and the positions that they reach."""


def _linear(settings: Mapping[str, Any], plain: torch.Tensor, max_positions: int, where: str) -> _Scaled:
    """Positions are divided. By its convention "max_position_embeddings" is the length before scaling."""
    factor: float = settings["factor"]
    return plain / factor, 1.0, max_positions * factor


def _llama3(settings: Mapping[str, Any], plain: torch.Tensor, max_positions: int, where: str) -> _Scaled:
    """Llama 3.1: long wavelengths are stretched, short ones kept, and those between blended."""
    factor: float = settings["factor"]
    low, high = (positive(settings, key, where) for key in ("low_freq_factor", "high_freq_factor"))
    if not low < high:
        raise ModelError(f"{where}: low_freq_factor {low:g} must be below high_freq_factor {high:g}")
    original = integer(settings, "original_max_position_embeddings", where, default=max_positions)
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > original / low, plain / factor, plain)
    keep = (original / wavelength - low) / (high - low)
    blended = (1 - keep) * stretched / factor + keep * stretched
    between = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(between, blended, stretched), 1.0, max_positions


def _yarn(settings: Mapping[str, Any], plain: torch.Tensor, max_positions: int, where: str) -> _Scaled:
    """YaRN (arXiv:2309.00071): a ramp from kept to stretched frequencies, and attention made sharper."""
    factor, head_dim = settings["factor"], settings["head_dim"]
    original = integer(settings, "original_max_position_embeddings", where, default=max_positions)
    fast = positive(settings, "beta_fast", where, default=32)
    slow = positive(settings, "beta_slow", where, default=1)
    theta = positive(settings, "rope_theta", where, default=10000.0)
    if theta == 1:
        raise ModelError(f"{where}: rope_theta 1 rotates all pairs alike; yarn needs another")

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(fast), dimension(slow)
    if flag(settings, "truncate", where, default=True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    stretch = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    keep = 1 - stretch
    wavelength = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    frequencies = 1.0 / (factor * wavelength) * (1 - keep) + plain * keep
    return frequencies, _yarn_scale(settings, factor, where), max(max_positions, original * factor)


def _yarn_scale(settings: Mapping[str, Any], factor: float, where: str) -> float:
    def scale(strength: float) -> float:
        return 0.1 * strength * math.log(factor) + 1.0

    if settings.get("attention_factor") is not None:
        return positive(settings, "attention_factor", where)
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return scale(positive(settings, "mscale", where)) / scale(positive(settings, "mscale_all_dim", where))
    return scale(1.0)


_SCALINGS: Mapping[str, Callable[[Mapping[str, Any], torch.Tensor, int, str], _Scaled]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
