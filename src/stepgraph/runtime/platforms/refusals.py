"""What a CUDA capture would refuse, refused on the tape too, by the line that did it.

Operators are refused where the dispatcher sees them. What never reaches the dispatcher (`tolist`, `numpy`,
`data_ptr`, tensors built from host data) is refused by a function mode, as far as that sees it: a C++ extension
that reads memory on its own is seen by neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from stepgraph.runtime.errors import CaptureError
from stepgraph.runtime.platforms.source_line import calling_line

_READS_VALUE = "reads a device value on the host, which a replay cannot repeat; keep it on the device"
_BUILDS_FROM_HOST = (
    "copies from pageable host memory, which synchronises; build it on the device (torch.full, torch.arange) "
    "or keep it in a slot"
)
_HANDS_OUT_ADDRESS = "hands out an address or memory that the recording cannot follow; wrap the caller in opaque()"

_FUNCTIONS: dict[Callable[..., Any], str] = {
    torch.Tensor.tolist: _READS_VALUE,
    torch.Tensor.numpy: _READS_VALUE,
    torch.Tensor.__array__: _READS_VALUE,
    torch.Tensor.cpu: _READS_VALUE,
    torch.Tensor.item: _READS_VALUE,
    torch.Tensor.data_ptr: _HANDS_OUT_ADDRESS,
    torch.tensor: _BUILDS_FROM_HOST,
    torch.as_tensor: _BUILDS_FROM_HOST,
    torch.asarray: _BUILDS_FROM_HOST,
    torch.Tensor.new_tensor: _BUILDS_FROM_HOST,
}

_SIZE_DEPENDS_ON_DATA = "has an output whose size depends on data; use a fixed size and a mask"

# Tagged as having an output of dynamic shape only because one of their forms does.
_INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default)


class HostReadGuard(TorchFunctionMode):
    """Refuses host reads and host-built tensors that do not reach the dispatcher.

    paused: whether it lets everything pass, inside a break.
    """

    def __init__(self, paused: Callable[[], bool]) -> None:
        super().__init__()
        self._paused = paused

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        why = _FUNCTIONS.get(func)
        if why is not None and not self._paused() and not _converts_a_tensor(func, args):
            owner = "torch" if func in (torch.tensor, torch.as_tensor, torch.asarray) else "Tensor"
            raise refusal(f"{owner}.{func.__name__}()", why)
        return func(*args, **(kwargs or {}))


def refuse_operator(func: torch._ops.OpOverload, args: Sequence[Any]) -> None:
    """Raise CaptureError if a recorded stream could not hold this operator."""
    if func in _INDEXED:
        indices = args[1]
        if any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices):
            raise refusal("indexing with a mask", _SIZE_DEPENDS_ON_DATA)
    elif torch.Tag.data_dependent_output in func.tags:
        raise refusal(str(func), _READS_VALUE)
    elif torch.Tag.dynamic_output_shape in func.tags:
        raise refusal(str(func), _SIZE_DEPENDS_ON_DATA)


def refusal(what: str, why: str) -> CaptureError:
    return CaptureError(f"capture refused: {what} {why} (at {calling_line()})")


def _converts_a_tensor(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """`torch.as_tensor(t)` of something already on the device copies nothing from the host."""
    return func in (torch.as_tensor, torch.asarray) and bool(args) and isinstance(args[0], torch.Tensor)
