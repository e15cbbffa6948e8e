"""Which attention backend runs: by name, or the best for a device and a shape."""

from importlib.util import find_spec

import torch

from stepgraph.ops import nvrtc
from stepgraph.ops.attention import cuda_decode
from stepgraph.ops.attention.contract import AttentionBackend, AttentionShape
from stepgraph.ops.attention.decode_plan import TRITON, SplitPlan
from stepgraph.ops.attention.reference import ReferenceAttention
from stepgraph.runtime.errors import ConfigError

# The preferred one first.
_DEVICE_TYPES = {"cuda": ("cuda",), "triton": ("cuda",), "reference": ReferenceAttention.device_types}

BACKENDS = tuple(_DEVICE_TYPES)
"""All names that there are."""


def available_backends(device: torch.device | str) -> tuple[str, ...]:
    """Names of the backends that work on a device with what is installed, the preferred one first."""
    kind = torch.device(device).type
    return tuple(name for name, kinds in _DEVICE_TYPES.items() if kind in kinds and _missing(name) is None)


def get_backend(
    name: str | None, device: torch.device | str, shape: AttentionShape, *, max_rows: int = 256, max_len: int = 8192
) -> AttentionBackend:
    """Make the backend `name` (None: the preferred one) for a device.

    max_rows, max_len: rows of the largest decode and tokens of the longest row, for which a backend allocates.

    Raises ConfigError where it cannot work.
    """
    device = torch.device(device)
    here = available_backends(device)
    usable = f"available on {device.type}: {', '.join(here) or 'none'}"
    if name is None:
        fitting = [each for each in here if each != "cuda" or cuda_decode.supports(shape)]
        if not fitting:
            raise ConfigError(f"attention: no backend runs on device '{device.type}'; use cpu or cuda")
        name = fitting[0]
    if name not in _DEVICE_TYPES:
        raise ConfigError(f"attention: unknown backend '{name}'; {usable}")
    if device.type not in _DEVICE_TYPES[name]:
        raise ConfigError(
            f"attention: backend '{name}' runs on {', '.join(_DEVICE_TYPES[name])}, not on {device.type}; {usable}"
        )
    if (missing := _missing(name)) is not None:
        raise ConfigError(f"attention: backend '{name}' needs the {missing} package, which is not installed; {usable}")
    if name == "reference":
        return ReferenceAttention(shape, device)
    if name == "cuda":
        if not cuda_decode.supports(shape):
            raise ConfigError(
                f"attention: backend 'cuda' takes heads of 64 or 128 in groups of up to 8, not {shape}; use 'triton'"
            )
        from stepgraph.ops.attention.cuda_backend import CudaAttention

        return CudaAttention(shape, device, max_rows=max_rows, max_len=max_len)
    from stepgraph.ops.attention.triton_backend import TritonAttention  # imports triton, which a CPU machine may lack

    return TritonAttention(shape, device, max_rows=max_rows, max_len=max_len)


def planned_workspace(shape: AttentionShape, num_sms: int, max_rows: int, max_len: int) -> int:
    """Bytes that a GPU's default backend allocates, from shapes alone. The `cuda` one has Triton's workspace too."""
    nbytes = SplitPlan(shape, TRITON, num_sms, max_rows, max_len).workspace_bytes()
    if cuda_decode.supports(shape):
        nbytes += cuda_decode.workspace_bytes(shape, num_sms, max_rows, max_len)
    return nbytes


def _missing(name: str) -> str | None:
    """The package that a backend lacks here."""
    if name in ("cuda", "triton") and find_spec("triton") is None:
        return "triton"
    if name == "cuda" and not nvrtc.available():
        return "cuda-bindings"
    return None
