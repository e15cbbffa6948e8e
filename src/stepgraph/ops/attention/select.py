"""Which attention backend runs: by name, or the best for a device."""

from importlib.util import find_spec

import torch

from stepgraph.ops.attention.contract import AttentionBackend, AttentionShape
from stepgraph.ops.attention.reference import ReferenceAttention
from stepgraph.runtime.errors import ConfigError

_DEVICE_TYPES = {"reference": ReferenceAttention.device_types, "triton": ("cuda",)}


def available_backends(device: torch.device | str) -> tuple[str, ...]:
    """Names of the backends that work on a device with what is installed, the preferred one first."""
    kind = torch.device(device).type
    names = [name for name, kinds in _DEVICE_TYPES.items() if kind in kinds]
    if find_spec("triton") is None:
        names = [name for name in names if name != "triton"]
    return tuple(sorted(names, key=lambda name: name != "triton"))


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
        if not here:
            raise ConfigError(f"attention: no backend runs on device '{device.type}'; use cpu or cuda")
        name = here[0]
    if name not in _DEVICE_TYPES:
        raise ConfigError(f"attention: unknown backend '{name}'; {usable}")
    if device.type not in _DEVICE_TYPES[name]:
        raise ConfigError(
            f"attention: backend '{name}' runs on {', '.join(_DEVICE_TYPES[name])}, not on {device.type}; {usable}"
        )
    if name not in here:
        raise ConfigError(f"attention: backend '{name}' needs the triton package, which is not installed; {usable}")
    if name == "reference":
        return ReferenceAttention(shape, device)
    from stepgraph.ops.attention.triton_backend import TritonAttention  # imports triton, which a CPU machine may lack

    return TritonAttention(shape, device, max_rows=max_rows, max_len=max_len)
