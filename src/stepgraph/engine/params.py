"""How to choose the next token and when to stop: the parameters of one request, under vLLM's names."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from stepgraph.engine.errors import RequestError

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request; every field is checked when the object is made.

    temperature: 0 picks the most likely token; above 0 divides the logits.
    top_p: keep the smallest set of tokens whose probabilities sum to at least this, in (0, 1]; 1 is off.
    top_k: keep this many tokens; 0 or -1 is off.
    max_tokens: the most tokens to generate, at least 1.
    stop: strings that end the text and are not part of it; a single string is accepted.
    stop_token_ids: token ids that end the text, besides the model's own.
    seed: makes sampling repeatable, whatever the batch around the request; a signed 64-bit integer.
    ignore_eos: go on after the model's own end token (for measurements).
    min_p: keep tokens at least this share as likely as the likeliest, in [0, 1]; 0 is off.
    repetition_penalty: above 0; divides the positive logits of tokens in prompt or output, multiplies the others;
        1 is off.
    presence_penalty: in [-2, 2]; taken off the logits of tokens in the output; 0 is off.
    frequency_penalty: in [-2, 2]; the same, as often as the token is there; 0 is off.

    Penalties hold for temperature 0 too. They come first, then temperature, min_p, top_k and top_p.

    Raises RequestError, naming the field, the value and the range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def penalises(self) -> bool:
        """Whether any penalty is on."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def __post_init__(self) -> None:
        if not isinstance(self.ignore_eos, bool):
            raise _refuse("ignore_eos", self.ignore_eos, "True or False")
        checked: dict[str, Any] = {
            "temperature": _real("temperature", self.temperature, "a finite number of at least 0", lambda t: t >= 0),
            "top_p": _real("top_p", self.top_p, "a number above 0 and at most 1", lambda p: 0 < p <= 1),
            "top_k": _integer("top_k", self.top_k, -1, _INT64_MAX),
            "max_tokens": _integer("max_tokens", self.max_tokens, 1, _INT64_MAX),
            "stop": _strings(self.stop),
            "stop_token_ids": _token_ids(self.stop_token_ids),
            "seed": None if self.seed is None else _integer("seed", self.seed, _INT64_MIN, _INT64_MAX),
            "min_p": _real("min_p", self.min_p, "a number from 0 to 1", lambda p: 0 <= p <= 1),
            "repetition_penalty": _real(
                "repetition_penalty", self.repetition_penalty, "a finite number above 0", lambda r: r > 0
            ),
        }
        for name in ("presence_penalty", "frequency_penalty"):
            checked[name] = _real(name, getattr(self, name), "a number from -2 to 2", lambda p: -2 <= p <= 2)
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def _refuse(field: str, value: object, wanted: str) -> RequestError:
    text = repr(value)
    if len(text) > 80:  # a user's value may be of any length; the error stays one readable line
        text = text[:77] + "..."
    return RequestError(f"{field} must be {wanted}, got {text}")


def _real(field: str, value: object, wanted: str, allowed: Callable[[float], bool]) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _refuse(field, value, wanted)
    try:
        number = float(value)
    except OverflowError:
        raise _refuse(field, value, wanted) from None
    if not math.isfinite(number) or not allowed(number):
        raise _refuse(field, value, wanted)
    return number


def _integer(field: str, value: object, low: int, high: int) -> int:
    wanted = f"an integer from {low} to {high}" if high < _INT64_MAX or low < -1 else f"an integer of at least {low}"
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise _refuse(field, value, wanted)
    return int(value)


def _strings(value: object) -> tuple[str, ...]:
    wanted = "a non-empty string or a sequence of non-empty strings"
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, (tuple, list)) or not all(isinstance(item, str) and item for item in value):
        raise _refuse("stop", value, wanted)
    return tuple(value)


def _token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)):
        raise _refuse("stop_token_ids", value, "a sequence of token ids")
    return tuple(_integer("stop_token_ids", item, 0, _INT64_MAX) for item in value)
