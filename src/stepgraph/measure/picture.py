"""Pictures as PNG files, where matplotlib is installed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.whole_file import beside


def require_picture(path: Path) -> None:
    """Before anything is measured. Raises ConfigError: no PNG is asked for, it cannot be written there, or
    matplotlib is missing."""
    if path.suffix.lower() != ".png":
        raise ConfigError(f"picture: {path} must end in .png")
    if path.is_dir():
        raise ConfigError(f"picture: {path} cannot be written: it is a folder")
    if not path.parent.is_dir():
        raise ConfigError(f"picture: {path} cannot be written: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"picture: {path} cannot be written: no permission to write into {path.parent}")
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
    try:
        with beside(path) as unfinished:
            figure.savefig(unfinished, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(f"picture: {path} cannot be written: {error.strerror or error}") from None
