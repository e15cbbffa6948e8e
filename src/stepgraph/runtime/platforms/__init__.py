"""Platforms: `cuda` records CUDA graphs, `tape` records operators on a CPU under the same contract."""

from __future__ import annotations

import torch

from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.platforms.base import DeviceMemory, HostMirror, Platform, Recording

__all__ = ["DeviceMemory", "HostMirror", "Platform", "Recording", "platform_for"]


def platform_for(device: torch.device | str) -> Platform:
    """The platform of a device.

    Raises:
        ConfigError: a device type that has none, or CUDA where it does not work.
    """
    try:
        device = torch.device(device)
    except RuntimeError:
        raise ConfigError(
            f"device {device!r} is none that torch knows; graphs run on cuda, or as a tape on cpu"
        ) from None
    if device.type == "cpu":
        from stepgraph.runtime.platforms.tape import TapePlatform

        return TapePlatform()
    if device.type == "cuda":
        from stepgraph.runtime.platforms.cuda import cuda_platform

        return cuda_platform(device)
    raise ConfigError(f"device {device}: graphs run on cuda, or as a tape on cpu")
