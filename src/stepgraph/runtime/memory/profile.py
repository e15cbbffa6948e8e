"""A device's profile: what graphs and the driver took there, as fits, so that a capture can be planned without it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.memory.estimate import Features, Fit
from stepgraph.runtime.whole_file import write_whole

KINDS = ("prefill", "decode")
POOL_FEATURES = ("one", "logits", "activations", "graphs")
DRIVER_FEATURES = ("one", "graphs", "nodes")
NODE_FEATURES = ("one", "layers")
MOST = 1e18
"""No amount of a profile is as large."""


@dataclass(frozen=True)
class DeviceProfile:
    """Measured on one kind of device, with one choice of kernels.

    device: its name. total_bytes: of its memory. measured_with: versions and kernels, for the reader.
    driver_before: bytes outside torch once a model is loaded and nothing is captured (context, kernels, libraries).
    loaded: bytes that the driver takes during warm-ups. workspaces: bytes that libraries keep of torch's.
    num_sms: its multiprocessors.
    pool: by kind of step, bytes of a ladder's pool: features are those of its largest step, and `graphs`, the others.
    driver: bytes of executables, from `graphs` and their `nodes` altogether.
    nodes: by kind of step, those of one graph, from the features of a model.
    """

    device: str
    total_bytes: int
    measured_with: Mapping[str, str]
    driver_before: int
    loaded: int
    workspaces: int
    num_sms: int
    pool: Mapping[str, Fit]
    driver: Fit
    nodes: Mapping[str, Fit]

    def pool_bytes(self, largest: Mapping[str, Features], graphs: Mapping[str, int]) -> int:
        """Of one pool for all kinds: they never run at the same time, so that the largest of them counts, and what
        each further graph adds. largest: by kind, of its largest step. graphs: by kind, how many."""
        alone = {kind: self.pool[kind]({**largest[kind], "graphs": 0}) for kind in largest}
        further = sum(self.pool[k]({**largest[k], "graphs": graphs[k] - 1}) - alone[k] for k in largest)
        return round(max(alone.values(), default=0) + further)

    def driver_bytes(self, model: Features, graphs: Mapping[str, int], more_nodes: int = 0) -> int:
        """Of all executables. graphs: by kind, how many. more_nodes: of all together, beside those of the model."""
        nodes = more_nodes + sum(self.nodes[kind](model) * number for kind, number in graphs.items())
        return round(self.driver({"one": 1, "graphs": sum(graphs.values()), "nodes": nodes})) if graphs else 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> DeviceProfile:
        """Raises KeyError, TypeError, ValueError: fields that are missing, of another type, or no amounts."""
        return cls(
            device=_text(fields["device"]),
            total_bytes=int(_amount(fields["total_bytes"])),
            measured_with={_text(name): _text(value) for name, value in fields["measured_with"].items()},
            driver_before=int(_amount(fields["driver_before"])),
            loaded=int(_amount(fields["loaded"])),
            workspaces=int(_amount(fields["workspaces"])),
            num_sms=int(_amount(fields["num_sms"])),
            pool={kind: _fit(fields["pool"][kind], POOL_FEATURES) for kind in KINDS},
            driver=_fit(fields["driver"], DRIVER_FEATURES),
            nodes={kind: _fit(fields["nodes"][kind], NODE_FEATURES) for kind in KINDS},
        )


def load_profile(path: Path | None = None) -> DeviceProfile:
    """A profile from a file; by default the H200's, which comes with the package.

    Raises:
        ConfigError: it cannot be read, or holds no measurements.
    """
    source = files("stepgraph.runtime.memory").joinpath("profiles/nvidia_h200.json") if path is None else path
    try:
        fields = json.loads(source.read_text(encoding="utf-8"))
        if not isinstance(fields, dict):
            raise ValueError("it holds no JSON object")
        if fields["measured_with"] is None:
            raise ConfigError(
                f"profile: that of {fields['device']} holds no measurements yet; run benchmarks/h200_memory.py on one, "
                f"or name a profile with --profile"
            )
        return DeviceProfile.from_dict(fields)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"profile: {source} cannot be read: {why}") from None


def save_profile(profile: DeviceProfile, path: Path) -> None:
    """Whole or not at all. Raises OSError where it cannot be written."""
    write_whole(path, json.dumps(profile.as_dict(), indent=1) + "\n")


def _fit(fields: Mapping[str, Any], features: Sequence[str]) -> Fit:
    coefficients = {name: _amount(value) for name, value in fields["coefficients"].items()}
    for name in coefficients:
        if name not in features:
            raise ValueError(f"feature {name!r} is none of {', '.join(features)}")
    return Fit(coefficients, _amount(fields["miss"]))


def _amount(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MOST:
        raise ValueError(f"{value!r} is no amount")
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
