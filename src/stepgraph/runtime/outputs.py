"""What a step returns: one shared buffer for all captured sizes, lent to the caller until the next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.dispatch import Decision, Mode, Reason
from stepgraph.runtime.errors import CaptureError, InputError, ReplayError


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


class SharedOutputs:
    """Output storage at the largest captured size. Each smaller graph writes its leading rows.

    A result that already lies in the step's own persistent buffers is left there: it costs no copy.
    """

    def __init__(self, persistent: torch.Tensor) -> None:
        self._persistent = persistent.untyped_storage()._cdata
        self._shared: dict[str, torch.Tensor] = {}

    def collect(self, result: Any, batch: BatchDescriptor, largest: BatchDescriptor) -> dict[str, torch.Tensor]:
        """Copy a result into the shared storage (inside the recorded step), and return where it lies now.

        Raises:
            CaptureError: an output whose dtype or row shape differs between sizes.
        """
        lent: dict[str, torch.Tensor] = {}
        for name, value in named_outputs(result).items():
            if value.untyped_storage()._cdata == self._persistent:
                lent[name] = value
                continue
            shape = _scaled(tuple(value.shape), batch, largest)
            shared = self._shared.get(name)
            if shared is None:
                shared = self._shared[name] = torch.empty(shape, dtype=value.dtype, device=value.device)
            if tuple(shared.shape) != shape or shared.dtype != value.dtype:
                raise CaptureError(
                    f"output {name}: {tuple(value.shape)} {value.dtype} at {batch.num_tokens} tokens does not fit the "
                    f"shared {tuple(shared.shape)} {shared.dtype}; rows must keep their shape at every size"
                )
            lent[name] = shared[: value.shape[0]] if value.dim() else shared
            lent[name].copy_(value)
        return lent


def _scaled(shape: tuple[int, ...], batch: BatchDescriptor, largest: BatchDescriptor) -> tuple[int, ...]:
    """The output's shape at the largest size: its first dimension grows if it counts tokens or requests."""
    if shape and shape[0] == batch.num_tokens:
        return (largest.num_tokens, *shape[1:])
    if shape and shape[0] == batch.num_reqs and largest.num_reqs is not None:
        return (largest.num_reqs, *shape[1:])
    return shape


def real_rows(outputs: Mapping[str, torch.Tensor], decision: Decision) -> dict[str, torch.Tensor]:
    """The outputs without their padded rows."""
    real, padded = decision.batch, decision.key
    cut: dict[str, torch.Tensor] = {}
    for name, value in outputs.items():
        if value.dim() and value.shape[0] == padded.num_tokens:
            cut[name] = value[: real.num_tokens]
        elif value.dim() and value.shape[0] == padded.num_reqs:
            cut[name] = value[: real.num_reqs]
        else:
            cut[name] = value
    return cut


class StepOutput:
    """One step's outputs, by name as attributes, and how the step ran.

    The tensors are borrowed: they hold this step's values until the runner's next step. `clone()` keeps them.

    Raises:
        ReplayError: in debug mode, when a tensor is asked for after a later step overwrote it.
    """

    __slots__ = ("_expired", "_tensors", "decision")

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], decision: Decision, expired: Callable[[], str | None] | None = None
    ) -> None:
        self._tensors = tensors
        self.decision = decision
        self._expired = expired

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

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        if self._expired is not None and (overwritten := self._expired()) is not None:
            raise ReplayError(f"output read too late: {overwritten}; clone() it before the next step")
        return self._tensors

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
