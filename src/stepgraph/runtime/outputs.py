"""What a step returns: one shared buffer for all captured keys, lent to the caller until the next step."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import torch

from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.dispatch import Decision, Mode, Reason
from stepgraph.runtime.errors import CaptureError, InputError


def named_outputs(result: Any) -> dict[str, torch.Tensor]:
    """A step's result by name: a mapping, a named tuple, or one tensor, which is called `output`.

    Raises:
        InputError: anything else, since an output without a name cannot be found again.
    """
    if isinstance(result, torch.Tensor):
        return {"output": result}
    if isinstance(result, tuple) and hasattr(result, "_asdict"):
        result = result._asdict()
    if isinstance(result, Mapping) and all(isinstance(value, torch.Tensor) for value in result.values()):
        return dict(result)
    raise InputError(f"a step returns a tensor, a mapping or a named tuple of tensors, not {type(result).__name__}")


class Unit(StrEnum):
    """What the first dimension of an output counts."""

    TOKEN = "token"
    REQUEST = "request"
    NEITHER = "neither"


class SharedOutputs:
    """Output storage at the largest captured key. Each other graph writes its leading rows.

    A result that already lies in the step's own persistent buffers is left there: it costs no copy.

    What an output's rows count is learned from the keys: at a key where tokens and request rows are the same number
    both fit, and the next key that tells them apart decides. So it is with a fixed size that happens to be a count.

    persistent: the slab. max_tokens, max_requests: rows at the largest keys.
    """

    def __init__(self, persistent: torch.Tensor, max_tokens: int, max_requests: int) -> None:
        self._persistent = persistent.untyped_storage()._cdata
        self._rows = {Unit.TOKEN: max_tokens, Unit.REQUEST: max_requests}
        self._shared: dict[str, torch.Tensor] = {}
        self._units: dict[str, list[Unit]] = {}  # all that still fit
        self._fixed: dict[str, int] = {}

    @property
    def units(self) -> dict[str, Unit]:
        """What the rows of each output count."""
        return {name: units[0] for name, units in self._units.items()}

    @property
    def nbytes(self) -> int:
        """Of the shared storage, all outputs together."""
        return sum(shared.nbytes for shared in self._shared.values())

    @property
    def undecided(self) -> bool:
        """Whether some output may count tokens as well as requests."""
        return any(Unit.TOKEN in units and Unit.REQUEST in units for units in self._units.values())

    @property
    def maybe_fixed(self) -> bool:
        """Whether some output may have a fixed size as well as rows. Of a single row nothing can be cut."""
        return any(
            len(units) > 1 and Unit.NEITHER in units and self._fixed[name] > 1 for name, units in self._units.items()
        )

    def learn(self, result: Any, tokens: int, requests: int) -> dict[str, torch.Tensor]:
        """Take down what the rows of a result count, at a size of so many tokens and request rows.

        Raises:
            CaptureError: an output whose rows fit no reading that fitted before, or outputs of other names.
        """
        named = named_outputs(result)
        if self._units and named.keys() != self._units.keys():
            raise CaptureError(
                f"outputs {', '.join(named)} at {tokens} tokens and {requests} request rows, and "
                f"{', '.join(self._units)} before; a step returns the same names at every size"
            )
        for name, value in named.items():
            rows = value.shape[0] if value.dim() else None
            counts = {Unit.TOKEN: tokens, Unit.REQUEST: requests, Unit.NEITHER: self._fixed.get(name, rows)}
            fit = [unit for unit in self._units.get(name, list(Unit)) if counts[unit] == rows]
            if not fit:
                raise CaptureError(
                    f"output {name}: {rows} rows at {tokens} tokens and {requests} request rows; its first dimension "
                    f"must count one of them, or be the same at every size"
                )
            self._units[name] = fit
            if rows is not None:
                self._fixed.setdefault(name, rows)
        return named

    def collect(self, result: Any, tokens: int, requests: int) -> dict[str, torch.Tensor]:
        """Copy a result into the shared storage (inside the recorded step), and return where it lies now.

        tokens, requests: rows of this key.

        Raises:
            CaptureError: outputs whose names, dtypes or row shapes differ between sizes.
        """
        lent: dict[str, torch.Tensor] = {}
        for name, value in self.learn(result, tokens, requests).items():
            if value.untyped_storage()._cdata == self._persistent:
                lent[name] = value
                continue
            shared = self._shared.get(name)
            if shared is None:
                shape = list(value.shape)
                if shape:
                    shape[0] = self._rows.get(self._units[name][0], shape[0])
                shared = self._shared[name] = torch.empty(shape, dtype=value.dtype, device=value.device)
            if shared.shape[1:] != value.shape[1:] or shared.dim() != value.dim() or shared.dtype != value.dtype:
                raise CaptureError(
                    f"output {name}: {tuple(value.shape)} {value.dtype} at {tokens} tokens does not fit the shared "
                    f"{tuple(shared.shape)} {shared.dtype}; rows must keep their shape at every size"
                )
            lent[name] = shared[: value.shape[0]] if value.dim() else shared
            lent[name].copy_(value)
        return lent


def real_rows(
    outputs: Mapping[str, torch.Tensor], units: Mapping[str, Unit], batch: BatchDescriptor
) -> dict[str, torch.Tensor]:
    """The outputs without their padded rows."""
    real = {Unit.TOKEN: batch.num_tokens, Unit.REQUEST: batch.num_reqs}
    return {name: value[: real[units[name]]] if units[name] in real else value for name, value in outputs.items()}


class StepOutput:
    """One step's outputs, by name as attributes, and how the step ran.

    The tensors are borrowed: they hold this step's values until the runner's next step. `clone()` keeps them. In debug
    mode a tensor, or a view of it, that is used after a later step overwrote it raises ReplayError.
    """

    __slots__ = ("decision", "tensors")

    def __init__(self, tensors: Mapping[str, torch.Tensor], decision: Decision) -> None:
        self.tensors = tensors
        self.decision = decision

    @property
    def mode(self) -> Mode:
        return self.decision.mode

    @property
    def real(self) -> int:
        return self.decision.real

    @property
    def padded(self) -> int:
        return self.decision.padded

    @property
    def reason(self) -> Reason:
        return self.decision.reason

    def __getattr__(self, name: str) -> torch.Tensor:
        if name.startswith("__") or name in StepOutput.__slots__:  # a copy in the making asks before there is any
            raise AttributeError(name)
        tensors = self.tensors
        if name in tensors:
            return tensors[name]
        raise AttributeError(f"this step returned {', '.join(tensors)}; there is no {name!r}")

    def clone(self) -> StepOutput:
        """A copy that later steps do not touch."""
        return StepOutput({name: value.clone() for name, value in self.tensors.items()}, self.decision)
