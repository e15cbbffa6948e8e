"""Llama-3-8B's shape on an H200: piecewise against breakable, full and eager, compiled and not.

python benchmarks/h200_piecewise.py [--parts DIR] [--seconds N] [--cases decode-16,prefill-512]

Each step is a case with graphs and a file of its own in DIR. The same command measures what DIR lacks, so that a case
that takes too long costs no other; once all are there, it writes the result. Nothing is begun that would take longer
than N seconds in all, by what the longest case so far took.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import ROOT, commit, in_turns, machine, quantiles, ratio, versions, write_result
from piecewise_ways import CASES, CONTEXT, MAX_LEN, TOKENS, Ways

from stepgraph.engine.random_model import random_model
from stepgraph.ops.operations import choose_operations, get_operations
from stepgraph.runtime import GraphRunner

SHAPE, DEVICE, DTYPE, ROUNDS = "llama-3-8b", "cuda", torch.bfloat16, 12
PIECEWISE = "reference, breakable, compiled"  # first, so that its compile seconds are those of a cold cache
PARTS = ROOT / "benchmarks" / "parts" / "h200_piecewise"


def capture(runner: GraphRunner) -> dict[str, Any]:
    report, compiled = runner.capture(), runner.compile_total()
    found: dict[str, Any] = {"graphs": len(report.graphs), "capture seconds": report.seconds}
    found["dropped"] = [f"{key}: {why}" for key, why in report.dropped.items()]
    if compiled is not None:
        found |= {"compile seconds": compiled.seconds, "pieces": compiled.pieces, "distinct": compiled.distinct}
    return found


def measure(case: str, sides: list[Ways]) -> dict[str, Any]:
    """The case's part of the result."""
    for side in sides:
        side.begin(case)
    homes = {way: side for side in sides for way in side.runners}
    captures = {way: capture(side.runners[way]) for way, side in homes.items()}
    wrong = [f"{case}, {way}: dropped {found['dropped']}" for way, found in captures.items() if found["dropped"]]
    for side in sides:
        side.stage()
    chosen = {way: side.tokens(way) for way, side in homes.items()}
    for side in sides:
        for compiled in (True, False):
            group = [way for way in side.runners if ("compiled" in way) is compiled]
            if len({tuple(chosen[way]) for way in group}) > 1:
                wrong.append(f"{case}: ways of one arithmetic differ: {group}")
    samples = {
        way: in_turns(ROUNDS, partial(side.ms, way), partial(homes[PIECEWISE].ms, PIECEWISE))
        for way, side in homes.items()
        if way != PIECEWISE
    }
    for way, side in homes.items():
        stats = side.runners[way].stats
        modes, compiles = list(stats.by_mode()), stats.compiles
        captures[way] |= {"modes": modes, "compiled while serving": compiles, "its seconds": stats.compile_seconds}
        late = compiles and "eager" not in way
        if late or ("EAGER" in modes) != ("eager" in way):
            wrong.append(f"{case}, {way}: ran as {modes}, {compiles} sizes compiled while serving")
    for side in sides:
        side.let_go()
    return {
        "case": case,
        "captures": captures,
        "tokens": chosen,
        "samples": samples,
        "wrong": wrong,
        "machine": machine(),
        "versions": versions("torch", "triton", "cuda-bindings"),
        "commit": commit(),
    }


def row_of(part: Mapping[str, Any]) -> list[Any]:
    """Of the result's table: piecewise beside each other way."""
    pairs = list(part["samples"].values())
    row = [part["case"].replace("-", " of "), quantiles([piecewise for _, piecewise in pairs[0]])["median"]]
    for taken in pairs:
        found = ratio(taken)
        row += [quantiles([ms for ms, _ in taken])["median"], f"{found[0]:.2f} ({found[1]:.2f} to {found[2]:.2f})"]
    return row


def merge(parts: list[Mapping[str, Any]]) -> dict[str, Any]:
    """One result of all cases."""
    cold = [part["captures"][PIECEWISE] for part in parts]
    compiling, capturing = (sum(one[f"{what} seconds"] for one in cold) for what in ("compile", "capture"))
    distinct, pieces = (sum(one[what] for one in cold) for what in ("distinct", "pieces"))
    others = [column for way in parts[0]["samples"] for column in (way, "/ piecewise")]
    return {
        "name": "h200_piecewise",
        "definition": f"Llama-3-8B's shape, random bfloat16 weights: device time of a whole step, sampling "
        f"included, for decodes at context {CONTEXT} and for prompts of {TOKENS[0]} (at that context) to "
        f"{TOKENS[-1]} tokens. Piecewise is inductor on the `reference` operations, each piece in a graph of its "
        f"own, attention between them. Its {len(parts)} sizes were compiled in {compiling:.0f} s, nothing of a size "
        f"being cached ({distinct} of {pieces} pieces distinct), and captured in {capturing:.0f} s with that. Each "
        f"other way against it, paired, in turns. `eager, compiled` runs the pieces without graphs. "
        f"`{choose_operations(None, DEVICE)}` is what an engine runs by default.",
        "unit": "ms",
        "machine": "; ".join(dict.fromkeys(part["machine"] for part in parts)),
        "versions": parts[0]["versions"],
        "commit": "; ".join(dict.fromkeys(part["commit"] for part in parts)),
        "columns": ["step", "piecewise", *others],
        "rows": [row_of(part) for part in parts],
        "samples": {part["case"]: part["samples"] for part in parts},
        "parts": [{name: value for name, value in part.items() if name != "samples"} for part in parts],
    }


@torch.inference_mode()
def measure_all(cases: list[str], folder: Path, seconds: float) -> None:
    """The cases' parts into the folder, as far as the seconds go."""
    began = time.perf_counter()
    model = random_model(SHAPE, device=DEVICE, dtype=DTYPE, max_positions=MAX_LEN)
    plain = copy.copy(model)
    plain.operations = get_operations("reference", model.device, model.operations._shape)
    sides = [Ways(plain, ("inductor", "off"))]
    if model.operations.name != "reference":
        sides.append(Ways(model, ("off",)))
    longest = 0.0
    for case in cases:
        started = time.perf_counter()
        if started - began + longest > seconds:
            print(f"{started - began:.0f} s are over; {case} and what follows are left", flush=True)
            return
        part = measure(case, sides)
        longest = max(longest, time.perf_counter() - started)
        folder.mkdir(parents=True, exist_ok=True)
        write_result({"name": case, **part}, folder)
        compiling = part["captures"][PIECEWISE]["compile seconds"]
        print(f"{time.perf_counter() - started:.0f} s, {compiling:.1f} of them compiling:", row_of(part), flush=True)


def main() -> int:
    """0: the result is written and as it should be; 1: it is not; 2: cases are left."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", type=Path, default=PARTS)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES))
    options = parser.parse_args()
    if unknown := [case for case in options.cases if case not in CASES]:
        parser.error(f"no such case: {', '.join(unknown)}; there are {', '.join(CASES)}")
    files = {case: options.parts / f"{case}.json" for case in CASES}
    if missing := [case for case in options.cases if not files[case].exists()]:
        measure_all(missing, options.parts, options.seconds)
    if missing := [case for case, file in files.items() if not file.exists()]:
        print(f"left: {', '.join(missing)}; the same command measures them")
        return 2
    parts = [json.loads(file.read_text(encoding="utf-8")) for file in files.values()]
    print("written:", write_result(merge(parts)))
    wrong = [what for part in parts for what in part["wrong"]]
    print("; ".join(wrong) or "ways of one arithmetic give the same tokens")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
