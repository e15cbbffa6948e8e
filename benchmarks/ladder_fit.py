"""Ladders fitted to the first half of request traces, scored on the second, beside those of vLLM and SGLang.

    python benchmarks/ladder_fit.py TRACE ... [--curve FILE] [--sizes 12]

TRACE: Azure's CSV files of 2023 (github.com/Azure/AzurePublicDataset, data/AzureLLMInferenceTrace_{conv,code}.csv).
--curve: what `stepgraph plan ladder` takes; by default the H200's that comes with the package.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common import commit, machine, versions, write_result

from stepgraph.measure.ladder_fit.plan import plan_ladder
from stepgraph.measure.ladder_fit.report import Plan
from stepgraph.measure.ladder_fit.requests import Requests
from stepgraph.measure.ladder_fit.server import Server
from stepgraph.measure.ladder_fit.step_times import load_step_times
from stepgraph.measure.ladder_fit.traffic import load_traffic

RATES, BAR, MOST = (1, 4, 10, 20), 1.002, 51
COLUMNS = ["trace", "rate", "rows p50", "rows p99", "ms a step", "/ vLLM's 51", "/ SGLang's", "/ every size"]
COLUMNS += ["sizes for 1.002 of vLLM's"]


def enough(server: Server, trace: Requests, rate: float, found: Plan) -> int | None:
    """The smallest number of sizes, from those of `found` on, that stays below the bar; None if vLLM's does not do."""
    most = found.most
    while found.ratio > BAR and most < MOST:
        most += 1
        found = plan_ladder(server, trace, most, rate=rate, holdout=True)
    return most if found.ratio <= BAR else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--curve", type=Path)
    parser.add_argument("--sizes", type=int, default=12)
    options = parser.parse_args()
    times = load_step_times(options.curve)
    rows, more = [], {}
    for path in options.traces:
        trace = load_traffic(path)
        if not isinstance(trace, Requests):
            raise SystemExit(f"{path} is no trace of requests")
        server = Server(times, row_ns=round(times.token_ns * trace.mean_context))
        for rate in RATES:
            plan = plan_ladder(server, trace, options.sizes, rate=rate, holdout=True)
            served = {name: score.served for name, score in plan.scores.items()}
            ms = {name: one.ms_a_step for name, one in served.items()}
            ratios = [ms["fitted"] / ms[name] for name in ("vLLM", "SGLang", "every size")]
            percentiles = served["fitted"].rows(0.5), served["fitted"].rows(0.99)
            sizes = enough(server, trace, rate, plan)
            rows.append([path.stem, rate, *percentiles, ms["fitted"], *(f"{ratio:.4f}" for ratio in ratios), sizes])
            more[f"{path.stem} x{rate}"] = {
                "ladder": list(plan.fitted.ladder.sizes),
                "ms": ms,
                "row_ns": server.row_ns,
                "proof": [plan.fitted.proof.bound, plan.fitted.proof.cost],
            }
            print(*rows[-1], flush=True)
    write_result(
        {
            "name": "ladder_fit",
            "definition": f"Mean time of a decode step on the second half of a trace, with at most {options.sizes} "
            f"sizes up to {times.largest} fitted to its first half; every ladder simulated anew, prompts computed "
            f"elsewhere. SGLang's 36 sizes up to 256, and its others to {times.largest}. Step times: {times.what}; "
            f"{times.token_ns:.3g} ns a token of a real row's context.",
            "unit": "ms; ratios of times",
            "machine": machine(),
            "versions": versions("numpy", "stepgraph"),
            "commit": commit(),
            "columns": COLUMNS,
            "rows": rows,
            "fits": more,
            "samples": {},
        }
    )


if __name__ == "__main__":
    main()
