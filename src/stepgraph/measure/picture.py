"""Pictures as PNG files, where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepgraph.runtime.errors import ConfigError


def require_picture(path: Path) -> None:
    """Before anything is measured. Raises ConfigError: no PNG is asked for, or matplotlib is missing."""
    if path.suffix.lower() != ".png":
        raise ConfigError(f"picture: {path} must end in .png")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "picture: matplotlib is not installed; pip install 'stepgraph[plot]', or leave it out"
        ) from None


def new_picture(width: float, height: float) -> Any:
    """An empty matplotlib figure, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_picture(figure: Any, path: Path) -> None:
    """Write the figure, whole or not at all. Raises ConfigError where the file cannot be written."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        figure.savefig(unfinished, format="png", dpi=120)
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"picture: {path} cannot be written: {error.strerror or error}") from None
