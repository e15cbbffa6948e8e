"""Memory and start-up of the 8B shape on an H200: capture, ledger, prediction, failure, release; writes the profile.

python benchmarks/h200_memory.py [--out FOLDER] [--work FOLDER] [--cases cold,decode,…]

Each case runs in a process of its own and leaves CASE.json in the work folder, which also holds the kernel caches. With
fewer cases, those that lie there already are taken, so that a run may be split: the result is written once none is
missing. The device's profile is left there too; it belongs into
src/stepgraph/runtime/memory/profiles.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, ROOT, commit, machine, versions, write_result
from memory_table import MIB, make_rows

from stepgraph.runtime.memory.estimate import Fit, fit
from stepgraph.runtime.memory.profile import KINDS, DeviceProfile, save_profile

MAXIMA = ("max512", "max256", "max128", "max64")
ORDER = ("cold", "decode", "variants", "8b", "1b", "scored", "startups", *MAXIMA)
"""All but the first find the kernels that it has compiled."""


def run_cases(folder: Path, names: list[str]) -> dict[str, Any]:
    """Run some cases and read all that are there. The folder has the kernel caches; `cold` begins with empty ones."""
    folder.mkdir(parents=True, exist_ok=True)
    cache = folder / "cache"
    if "cold" in names:
        shutil.rmtree(cache, ignore_errors=True)
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "XDG_CACHE_HOME": str(cache / "xdg"),
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT / "src"), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        ),
    }
    for name in names:
        path = folder / f"{name}.json"
        command = [sys.executable, str(Path(__file__).parent / "memory_cases.py"), name, str(path)]
        subprocess.run(command, check=True, env=environment)
        print(f"{name}: {json.loads(path.read_text(encoding='utf-8'))['process_seconds']:.0f} s", flush=True)
    paths = {name: folder / f"{name}.json" for name in ORDER}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.is_file()}


def make_profile(cases: Mapping[str, Any]) -> DeviceProfile:
    """From the 1B and 8B shapes, vLLM's ladder alone."""
    firsts = [cases[name]["first"] for name in ("decode", "8b", "1b")]  # of a process: the driver had nothing yet
    pools = [session["kinds"] for name in ("8b", "1b") for session in cases[name]["pools"]]
    first = cases["8b"]["first"]
    prefill_first = [cases[name]["first"]["kinds"] for name in ("8b", "1b")]  # their pools had nothing else yet
    return DeviceProfile(
        device=torch.cuda.get_device_name(),
        total_bytes=first["total"],
        measured_with={
            **versions("torch", "triton"),
            "commit": commit(),
            "dtype": "bfloat16",
            "attention": first["attention"],
            "operations": first["operations"],
        },
        driver_before=first["outside_before"],
        loaded=sum(graph["loaded_bytes"] for graph in first["ledger"]["graphs"]),
        workspaces=sum(row["bytes"] for row in first["ledger"]["rows"] if row["name"] == "workspaces of libraries"),
        num_sms=torch.cuda.get_device_properties().multi_processor_count,
        pool={
            "prefill": fit(_pool_samples([*pools, *prefill_first], "prefill")),
            "decode": fit(_pool_samples(pools, "decode")),
        },
        driver=fit([sample for session in firsts for sample in _driver_samples(session)]),
        nodes={kind: _nodes(firsts, kind) for kind in KINDS},
    )


def _pool_samples(pools: list[dict[str, Any]], kind: str) -> list[tuple[dict[str, float], float]]:
    """The pool after each graph of ladders that begin at different sizes."""
    samples = []
    for session in pools:
        total = 0
        for number, (pool, _) in enumerate(session.get(kind, {"taken": []})["taken"]):
            total += pool
            samples.append(({**session[kind]["features"], "graphs": float(number)}, float(total)))
    return samples


def _driver_samples(session: Mapping[str, Any]) -> list[tuple[dict[str, float], float]]:
    samples, graphs, nodes, taken = [], 0, 0, 0
    for one in session["ledger"]["graphs"]:
        graphs, nodes, taken = graphs + 1, nodes + sum(one["nodes"].values()), taken + one["driver_bytes"]
        samples.append(({"one": 1.0, "graphs": float(graphs), "nodes": float(nodes)}, float(taken)))
    return samples


def _nodes(firsts: list[dict[str, Any]], kind: str) -> Fit:
    samples = [(s["model"], float(nodes)) for s in firsts if kind in s["kinds"] for nodes in s["kinds"][kind]["nodes"]]
    return fit(samples)


def score(profile: DeviceProfile, session: Mapping[str, Any]) -> dict[str, float]:
    """What was observed, and what the profile and the two-sample rule predict, in MiB."""
    kinds = session["kinds"]
    graphs = {kind: len(one["taken"]) for kind, one in kinds.items()}
    pool = profile.pool_bytes({kind: one["features"] for kind, one in kinds.items()}, graphs)
    driver = profile.driver_bytes(session["model"], graphs)
    taken = [sum(each) for each in zip(*(t for one in kinds.values() for t in one["taken"]), strict=True)]
    values = {"pool": taken[0], "driver": taken[1], "predicted pool": pool, "predicted driver": driver}
    values |= {"observed": sum(taken), "predicted": pool + driver, "two-sample rule": session["two_samples"]}
    return {name: value / MIB for name, value in values.items()}


def draw(path: Path, maxima: list[dict[str, Any]]) -> None:
    """Seconds, bytes and KV blocks gained against where the ladder ends."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    most = [one["max"] for one in maxima]
    panels = {
        "capture, s": {"": [one["seconds"] for one in maxima]},
        "bytes, MiB": {name: [one[name] / MIB for one in maxima] for name in ("pool", "driver")},
        "KV blocks gained": {"": [one["kv_blocks"] - maxima[0]["kv_blocks"] for one in maxima]},
    }
    for axes, (title, lines) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for name, values in lines.items():
            axes.plot(most, values, "o-", label=name)
        axes.set(title=title, xlabel="largest captured size, requests", xticks=most, ylim=(0, None))
        if len(lines) > 1:
            axes.legend()
    figure.savefig(path, format="png", dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "memory")
    parser.add_argument("--cases", default=",".join(ORDER))
    options = parser.parse_args()
    cases = run_cases(options.work, [name for name in options.cases.split(",") if name])
    missing = [name for name in ORDER if name not in cases]
    if missing:
        print(f"no result yet: {', '.join(missing)} are missing")
        return 0
    profile = make_profile(cases)
    save_profile(profile, options.work / "nvidia_h200.json")
    scored = score(profile, cases["scored"]["first"])
    rows = make_rows(cases, scored)
    for row in rows:
        print(row, flush=True)
    for one in cases["decode"]["failures"]:
        print(one["text"])
    result = {
        "name": "h200_memory",
        "definition": "Llama-3-8B's shape in bfloat16 with 512 rows and contexts of 4,096 tokens, penalties on; vLLM's "
        "ladder. Prediction: fitted on the 1B and 8B shapes, scored on an 8B shape with 16 KV heads and SGLang's "
        "ladder to 384. The growth, misses and what is left are differences of the device's own free memory.",
        "unit": "as given",
        "machine": machine(),
        "versions": versions("torch", "triton"),
        "commit": commit(),
        "columns": ["what", "value", "unit", "bar", "holds"],
        "rows": rows,
        "scored": scored,
        "profile": profile.as_dict(),
        "samples": cases,
    }
    write_result(result, options.out)
    try:
        draw(options.out / "h200_memory.png", [cases[name] for name in MAXIMA])
    except ImportError:
        print("no picture: matplotlib is not installed")
    return 0 if all(holds is not False for *_, holds in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
