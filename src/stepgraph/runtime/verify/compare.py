"""Whether two runs agree: their results within a tolerance, and the first operator where they part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import torch

from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.verify.observe import Look, Operation

_OF_LARGEST = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class Tolerance:
    """|a - b| <= atol + rtol * |b|, element by element; 0 and 0: the same values. NaN equals NaN.

    Raises:
        ConfigError: a bound that is negative or no number.
    """

    rtol: float = 0.0
    atol: float = 0.0

    def __post_init__(self) -> None:
        for name, bound in (("rtol", self.rtol), ("atol", self.atol)):
            if not isinstance(bound, int | float) or not bound >= 0:
                raise ConfigError(f"verify: {name} {bound!r} must be a number of at least 0")

    @property
    def exact(self) -> bool:
        return self.rtol == 0 and self.atol == 0

    def differing(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Which elements differ, as bool."""
        same = (a == b) | ((a != a) & (b != b))
        if not self.exact and a.is_floating_point():
            same |= torch.isclose(a.double(), b.double(), rtol=self.rtol, atol=self.atol, equal_nan=True)
        return ~same


def far_apart(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two results differ by more than kernels for other batch sizes may differ, and not only in whole numbers,
    which a small difference may tip over.

    Measured by the largest value; NaN and infinity must stand at the same places.
    """
    if not a.is_floating_point():
        return False
    if bool((a.isfinite() != b.isfinite()).any()):
        return True
    finite = a.isfinite()
    largest = float(torch.where(finite, a, 0).abs().max()) if a.numel() else 0.0
    difference = float(torch.where(finite, a - b, 0).abs().max()) if a.numel() else 0.0
    return difference > _OF_LARGEST.get(a.dtype, 1e-1) * largest


@dataclass(frozen=True)
class Parting:
    """Where two runs part: the operators' places in each, or, where they call different ones, the names."""

    ours: int
    theirs: int
    same_operator: bool


def first_parting(
    ours: Sequence[Operation],
    theirs: Sequence[Operation],
    differ: Callable[[Look, Look], bool],
    *,
    same_path: bool = True,
) -> Parting | None:
    """The first operator whose results differ. Copies that only one of them makes are passed over, and without
    `same_path` everything else that only one of them does."""
    names, their_names = [op.name for op in ours], [op.name for op in theirs]
    matcher = SequenceMatcher(None, names, their_names, autojunk=False)
    whole = (
        [(0, 0, len(names))] if names == their_names else [(m.a, m.b, m.size) for m in matcher.get_matching_blocks()]
    )
    at, their_at = 0, 0
    for a, b, size in whole:
        for place in range(at, a):
            if same_path and not _is_copy(names[place]):
                return Parting(place, min(their_at, len(theirs) - 1), False)
        for their_place in range(their_at, b):
            if same_path and not _is_copy(their_names[their_place]):
                return Parting(min(at, len(ours) - 1), their_place, False)
        for offset in range(size):
            looks = zip(ours[a + offset].looks, theirs[b + offset].looks, strict=False)
            if any(one.shape == other.shape and differ(one, other) for one, other in looks):
                return Parting(a + offset, b + offset, True)
        at, their_at = a + size, b + size
    return None


def bits_differ(one: Look, other: Look) -> bool:
    return bool((one.digest.cpu() != other.digest.cpu()).item())


def within(tolerance: Tolerance) -> Callable[[Look, Look], bool]:
    """Differ by more than a tolerance; where a result was too large to keep, at all."""

    def differ(one: Look, other: Look) -> bool:
        if not bits_differ(one, other) or one.value is None or other.value is None:
            return bits_differ(one, other) and (one.value is None or other.value is None)
        return bool(tolerance.differing(one.value, other.value).any())

    return differ


class Padded:
    """Differ by more than padding may cause. Whole numbers count for as long as no other result differs at all."""

    def __init__(self) -> None:
        self._all_same = True

    def __call__(self, one: Look, other: Look) -> bool:
        if not bits_differ(one, other):
            return False
        if one.value is None or other.value is None:
            return False
        if not one.value.is_floating_point():
            return self._all_same
        self._all_same = False
        return far_apart(one.value, other.value)


def _is_copy(name: str) -> bool:
    return name.startswith("aten.copy_")
