"""The rows of h200_memory.py: what was measured, the bar, and whether it holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common import quantiles

MIB = 1 << 20
CAPTURE_S, DRIVER_MIB, GROWTH_MIB, RESIDUAL_MIB, FAILURE_MIB, ROUNDS_MIB = 2.0, 64, 16, 16, 4, 1


class Rows:
    """[what, value, unit, bar, whether it holds]"""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []

    def add(self, what: str, value: float, unit: str, most: float | None = None) -> None:
        self.rows.append([what, value, unit, most, None if most is None else abs(value) <= most])

    def must_be(self, what: str, value: Any, expected: Any) -> None:
        self.rows.append([what, value, "", expected, value == expected])


def make_rows(cases: Mapping[str, Any], scored: Mapping[str, float]) -> list[list[Any]]:
    """cases: by name, what each left. scored: of the prediction, in MiB."""
    rows = Rows()
    _capture(rows, cases)
    _ways(rows, cases)
    _ledgers(rows, cases)
    allowed = max(0.05 * scored["observed"], 8)
    for name in ("predicted", "two-sample rule"):
        miss = scored[name] - scored["observed"]
        rows.add(f"{name}: miss on {scored['observed']:.0f} MiB", miss, "MiB", allowed if name == "predicted" else None)
    _failures(rows, cases["decode"]["failures"])
    rows.add(
        "growth over ten rounds of release and recapture", max(cases["decode"]["rounds"]["growth"]), "MiB", ROUNDS_MIB
    )
    rows.add("growth over ten start-ups of the 1B shape", max(cases["startups"]["growth"]), "MiB", ROUNDS_MIB)
    for name in ("max512", "max256", "max128", "max64"):
        one = cases[name]
        text = f"ladder to {one['max']}: {one['graphs']} graphs, {one['seconds']:.2f} s, KV blocks"
        rows.add(text, one["kv_blocks"], "blocks")
    return rows.rows


def _capture(rows: Rows, cases: Mapping[str, Any]) -> None:
    firsts = {name: cases[name]["first"] for name in ("cold", "decode")}
    families = {name: first["ledger"]["families"]["decode"] for name, first in firsts.items()}
    for name, text, most in (("cold", "cold kernel cache", None), ("decode", "warm kernel cache", CAPTURE_S)):
        rows.add(f"51 decode sizes, {text}", firsts[name]["seconds"], "s", most)
        rows.must_be(
            f"graphs captured and dropped, {text}", [families[name]["graphs"], firsts[name]["dropped"]], [51, 0]
        )
        for part in ("warmup", "capture", "instantiate"):
            rows.add(f"of it {part}", families[name][f"{part}_seconds"], "s")
    compiling = families["cold"]["warmup_seconds"] - families["decode"]["warmup_seconds"]
    rows.add("of the cold warm-ups compiling: more than with a warm cache", compiling, "s")
    again = quantiles(cases["decode"]["rounds"]["seconds"])["median"]
    rows.add("the same, captured again in one process", again, "s")


def _ways(rows: Rows, cases: Mapping[str, Any]) -> None:
    variants = cases["variants"]
    for name, way in variants["ways"].items():
        ratio, low, high = way["ratio"]
        rows.rows.append([f"{name}, against one warm-up a size", ratio, f"x ({low:.2f} to {high:.2f})", None, None])
    rows.add("pool, descending sizes", variants["pool_as_it_is"] / MIB, "MiB")
    rows.add("pool, ascending sizes", max(variants["ways"]["ascending"]["pool"]) / MIB, "MiB")
    update = cases["decode"]["update"]
    for name, text in (("updated", "updated"), ("anew", "made anew")):
        if update[f"{name}_ms"]:
            rows.add(f"an executable {text} and uploaded, a size", quantiles(update[f"{name}_ms"])["median"], "ms")
    rows.add("updates that the driver refused", update["refused"], "of 50")


def _ledgers(rows: Rows, cases: Mapping[str, Any]) -> None:
    ledger = cases["decode"]["first"]["ledger"]
    graphs = ledger["graphs"]
    rows.add("driver's bytes of 51 sizes", sum(graph["driver_bytes"] for graph in graphs) / MIB, "MiB", DRIVER_MIB)
    growth = sum(graph["pool_bytes"] for graph in graphs[1:])
    rows.add("pool after the largest size", growth / MIB, "MiB", GROWTH_MIB)
    for row in ledger["rows"]:
        rows.add(f"ledger: {row['name']}", row["bytes"] / MIB, "MiB")
    for name, text in (("decode", "51 decode sizes"), ("8b", "prefill and decode")):
        residual = cases[name]["first"]["ledger"]["residual_bytes"] / MIB
        rows.add(f"residual of the ledger, {text}", residual, "MiB", RESIDUAL_MIB)


def _failures(rows: Rows, failures: list[dict[str, Any]]) -> None:
    for one in failures:
        where = f"out of memory at size {one['at']} of 51"
        rows.must_be(f"{where}: captured", one["captured"], 50)
        rows.must_be(f"{where}: a step runs", one["mode"], "FULL")
        named = f"capturing {one['size']} request" in one["text"] and "less (fewer blocks" in one["text"]
        rows.must_be(f"{where}: the text names the size and by how much to lower what", named, True)
        rows.add(f"{where}: more than without it", one["more_than_without"], "MiB", FAILURE_MIB)
        rows.add(f"{where}: left after release", one["left_after_release"], "MiB", FAILURE_MIB)
