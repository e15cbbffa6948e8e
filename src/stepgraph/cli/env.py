"""`stepgraph env`: what works on this machine and what does not, and why. Every answer comes from trying it."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module, metadata

from stepgraph import __version__


class DoesNotWork(Exception):
    """Why a check failed, as one line."""


@dataclass(frozen=True)
class Check:
    """One line of the table. `detail` is a version where it works, and the reason where it does not."""

    name: str
    works: bool
    required: bool
    detail: str
    used_for: str


def env(*, as_json: bool) -> bool:
    """Print the table, or JSON; False where something that stepgraph cannot do without does not work."""
    checks = run_checks()
    if as_json:
        print(json.dumps({"stepgraph": __version__, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        from stepgraph.cli.console import print_checks

        print_checks(checks)
    return all(check.works for check in checks if check.required)


def run_checks() -> list[Check]:
    """Try everything once. Never raises for something that does not work."""
    plan: list[tuple[str, bool, str, Callable[[], str]]] = [
        ("python", True, "everything", _python),
        ("torch", True, "steps, tensors", _torch),
        ("graphs on the CPU", True, "replay without a GPU", lambda: _graphs("cpu")),
        ("safetensors", True, "weights", lambda: _package("safetensors")),
        ("tokenizers", True, "text", lambda: _package("tokenizers")),
        ("gguf", True, "GGUF models", lambda: _package("gguf")),
        ("huggingface_hub", False, "models by hub id", lambda: _package("huggingface_hub")),
        ("demo model", False, "run without --model", _demo_model),
        ("CUDA device", False, "GPU", _cuda_device),
        ("CUDA driver", False, "GPU", _cuda_driver),
        ("graphs on CUDA", False, "replay on a GPU", lambda: _graphs("cuda")),
        ("cuda.bindings", False, "graph inspection", _cuda_bindings),
        ("triton", False, "GPU kernels", _triton),
        ("C compiler", False, "Triton, torch.compile", lambda: _compiler("gcc", "cc")),
        ("C++ compiler", False, "torch.compile", lambda: _compiler("g++", "c++")),
    ]
    return [_try(name, required, used_for, probe) for name, required, used_for, probe in plan]


def _try(name: str, required: bool, used_for: str, probe: Callable[[], str]) -> Check:
    try:
        return Check(name, True, required, probe(), used_for)
    except DoesNotWork as reason:
        return Check(name, False, required, str(reason), used_for)
    except Exception as error:  # whatever a broken installation raises is the answer
        return Check(name, False, required, f"{type(error).__name__}: {_first_line(error)}", used_for)


def _python() -> str:
    return f"{platform.python_version()} on {platform.system()} {platform.machine()}"


def _torch() -> str:
    import torch

    return f"{torch.__version__}, {torch.get_num_threads()} CPU threads"


def _graphs(device: str) -> str:
    """Record one small step, replay it, and look at what it did."""
    import torch

    from stepgraph.runtime.platforms import platform_for

    if device == "cuda":
        _require_cuda()
    platform_ = platform_for(device)
    x, one = torch.zeros(2, device=device), torch.ones(2, device=device)
    platform_.warm_up(lambda: x.add_(one))
    recording, _ = platform_.record(lambda: x.add_(one), platform_.new_pool())
    platform_.synchronize()
    before = x.tolist()
    recording.replay()
    platform_.synchronize()
    if x.tolist() != [value + 1 for value in before]:
        raise DoesNotWork(f"a replay of x + 1 turned {before} into {x.tolist()}")
    return f"platform {platform_.name}: recorded and replayed"


def _package(name: str) -> str:
    import_module(name)
    return metadata.version(name)


def _demo_model() -> str:
    from stepgraph.engine.demo import demo_model_path
    from stepgraph.engine.errors import ModelError

    try:
        return str(demo_model_path())
    except ModelError as error:
        raise DoesNotWork(str(error)) from None


def _cuda_device() -> str:
    import torch

    _require_cuda()
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return ", ".join(f"{d.name} ({d.major}.{d.minor}, {d.total_memory / 2**30:.0f} GiB)" for d in devices)


def _cuda_driver() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise DoesNotWork("nvidia-smi is not on the path")
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    if done.returncode or not done.stdout.strip():
        raise DoesNotWork(_first_line(done.stderr or done.stdout or f"nvidia-smi exits with {done.returncode}"))
    return _first_line(done.stdout)


def _cuda_bindings() -> str:
    try:
        import_module("cuda.bindings.driver")
    except ImportError:
        raise DoesNotWork("not installed: pip install cuda-bindings") from None
    return metadata.version("cuda-bindings")


def _triton() -> str:
    try:
        triton = import_module("triton")
    except ImportError:
        raise DoesNotWork("not installed: pip install triton") from None
    _require_cuda(f"{triton.__version__} is installed, but ")
    return str(triton.__version__)


def _compiler(*names: str) -> str:
    for name in names:
        path = shutil.which(name)
        if path:
            done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
            return _first_line(done.stdout)
    raise DoesNotWork(f"none of {', '.join(names)} is on the path")


def _require_cuda(prefix: str = "") -> None:
    from stepgraph.runtime.platforms.cuda import why_unavailable

    reason = why_unavailable()
    if reason is not None:
        raise DoesNotWork(prefix + reason)


def _first_line(text: object) -> str:
    return next((line.strip() for line in str(text).splitlines() if line.strip()), "no message")
