"""What every benchmark writes and how it compares: one result file, medians, paired ratios with intervals."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def machine() -> str:
    """The processor that the steps ran on, and what stands beside it."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, {os.cpu_count()} host cores"
    names = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def versions(*packages: str) -> dict[str, str]:
    """Versions of python and the named packages; of CUDA where torch has it."""
    found = {"python": platform.python_version()}
    found |= {package: importlib.metadata.version(package) for package in packages}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def commit() -> str:
    """The commit that was measured, with `-dirty` where the tree held more."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        changes = ["git", "status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks/*.py"]
        dirty = subprocess.run(changes, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("STEPGRAPH_COMMIT", "unknown")
    return head.stdout.strip() + ("-dirty" if dirty.stdout.strip() else "")


def quantiles(samples: Sequence[float]) -> dict[str, float]:
    """Median with the tenth and ninetieth percentile."""
    cuts = statistics.quantiles(samples, n=10, method="inclusive")
    return {"p10": cuts[0], "median": statistics.median(samples), "p90": cuts[-1]}


def ratio(pairs: Sequence[tuple[float, float]], *, rounds: int = 2000) -> tuple[float, float, float]:
    """The median of a/b over paired samples, with a 95 % bootstrap interval over the pairs."""
    ratios = [a / b for a, b in pairs]
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(rounds))
    return statistics.median(ratios), medians[int(rounds * 0.025)], medians[int(rounds * 0.975)]


def in_turns(rounds: int, a: Callable[[], float], b: Callable[[], float]) -> list[tuple[float, float]]:
    """(a, b) per round, measured AB, BA, AB, …, so that a drift of the machine meets both alike."""
    pairs = []
    for turn in range(rounds):
        if turn % 2 == 0:
            first = a()
            pairs.append((first, b()))
        else:
            second = b()
            pairs.append((a(), second))
    return pairs


def device_ms(
    step: Callable[[], object], count: int, *, before: Callable[[], object] | None = None, warm: int = 3
) -> list[float]:
    """Milliseconds between an event before and one after each call, as the device sees them.

    The calls follow each other without a wait, so that a graph's launch is queued before the device is free. `before`
    runs in front of each, outside the interval. The first `warm` calls are left out.
    """
    spans = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(warm + count)]
    torch.cuda.synchronize()
    for start, stop in spans:
        if before is not None:
            before()
        start.record()
        step()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in spans[warm:]]


def write_result(result: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write `result` as NAME.json, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['name']}.json"
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    unfinished.replace(path)
    return path


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
