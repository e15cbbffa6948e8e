"""What `stepgraph plan ladder` found: the list, its score beside other ladders, its proof, flags, and the picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepgraph.measure.ladder_fit.fit import Fitted
from stepgraph.measure.ladder_fit.server import Score
from stepgraph.measure.picture import new_picture, save_picture
from stepgraph.measure.result import Figure, Result, Rows
from stepgraph.runtime.ladder import Ladder

COLUMNS = ["ladder", "sizes", "used", "ms a step", "% over vLLM", "ms a token", "padded %", "rows p50", "rows p99"]
DEFINITIONS = {
    "sizes, used": "captured sizes, and those that any step took",
    "ms a step": "the mean over all decode steps; batch sizes follow from step times, so each ladder is simulated anew",
    "% over vLLM": "of the ms a step; below 0 the ladder is faster",
    "ms a token": "the mean over all decoded tokens of the time of their step",
    "padded %": "rows computed for no request over rows computed for one",
    "rows": "requests that a step decodes: the median, and what 99 % of the steps do not exceed",
}


@dataclass(frozen=True)
class Plan:
    """scores: of the same traffic, by name; `fitted` and `vLLM` are among them. traffic, curve: in words.

    by_sizes: ms a step of fitted ladders by their number of sizes, where that was asked for.
    """

    fitted: Fitted
    most: int
    scores: Mapping[str, Score]
    traffic: str
    curve: str
    by_sizes: Mapping[int, float]

    @property
    def ratio(self) -> float:
        """ms a step over vLLM's."""
        return self.scores["fitted"].served.ms_a_step / self.scores["vLLM"].served.ms_a_step


def flags(ladder: Ladder) -> dict[str, str]:
    """By engine, what its command line takes."""
    spaced, commas = (mark.join(map(str, ladder.sizes)) for mark in (" ", ","))
    return {
        "vLLM": f"--cudagraph-capture-sizes {spaced}",
        "SGLang": f"--cuda-graph-bs-decode {spaced}",
        "stepgraph": f"--ladder {commas}",
    }


def plan_result(plan: Plan) -> Result:
    proof, fitted = plan.fitted.proof, plan.scores["fitted"].served
    ladder = plan.fitted.ladder
    tables = [
        Rows("ladders", COLUMNS, [_row(*named, plan.scores["vLLM"]) for named in plan.scores.items()], DEFINITIONS)
    ]
    if plan.by_sizes:
        counted = [list(item) for item in plan.by_sizes.items()]
        meaning = {"sizes": "at most so many, fitted and simulated on their own"}
        tables.append(Rows("fitted, by the number of sizes", ["sizes", "ms a step"], counted, meaning))
    return Result(
        name="ladder_fit",
        definition=f"At most {plan.most} sizes fitted to {plan.traffic}. Step times: {plan.curve}.",
        figures=[
            Figure.of("fitted: a step", fitted.ms_a_step, "ms", DEFINITIONS["ms a step"]),
            Figure.of("fitted / vLLM", plan.ratio, "ratio", "of their ms a step; below 1 the fitted ladder is faster"),
        ],
        tables=tables,
        notes=[
            f"Proof: no ladder of at most {plan.most} sizes up to {ladder.max_size} costs less than "
            f"{proof.bound / 1e6:.6f} ms a step on the histogram it was fitted to, by {proof.arcs:,} inequalities that "
            f"were checked; this one costs {proof.cost / 1e6:.6f} ms.",
        ],
        more={
            "sizes": list(ladder.sizes),
            "flags": flags(ladder),
            "by_sizes": {str(size): ms for size, ms in plan.by_sizes.items()},
            "proof": {
                "bound_ns": proof.bound,
                "cost_ns": proof.cost,
                "arcs": proof.arcs,
                "steps": {str(size): int(steps) for size, steps in enumerate(proof.steps) if steps},
            },
        },
    )


def draw_plan(plan: Plan, path: Path) -> None:
    """Cost over the number of sizes, other ladders as points; beside it, steps by rows with the fitted sizes.

    Raises:
        ConfigError: the file cannot be written.
    """
    picture = new_picture(13, 5)
    left, right = picture.subplots(1, 2)
    exact = plan.scores["every size"].served.ms_a_step
    over = {name: (score.served.ms_a_step / exact - 1) * 100 for name, score in plan.scores.items()}
    by_sizes = [(ms / exact - 1) * 100 for ms in plan.by_sizes.values()]
    left.plot(list(plan.by_sizes), by_sizes, "o-", markersize=4, label="fitted, by the number of sizes")
    for name, score in plan.scores.items():
        mark, size = ("*", 14) if name == "fitted" else ("s", 6)
        left.plot([len(score.ladder)], [over[name]], mark, markersize=size, label=name)
    top = max(*over.values(), 0.01) * 2  # ladders of one or two sizes lie far above
    left.set(xscale="log", xlabel="number of sizes", ylabel="% over capturing every size", ylim=(-top / 20, top))
    left.set_title("a step's time, each ladder simulated anew")
    left.legend(fontsize=8)
    steps = plan.scores["fitted"].served.steps
    most = int(steps.nonzero()[0].max())
    right.bar(range(1, most + 1), steps[1 : most + 1], width=1.0, label="steps")
    for size in plan.fitted.ladder.sizes:
        if size <= most:
            right.axvline(size, color="tab:red", linewidth=0.8)
    right.set(xlabel="rows", ylabel="decode steps", title="steps by rows; lines are the fitted sizes")
    picture.suptitle(plan.traffic, fontsize=9)
    save_picture(picture, path)


def _row(name: str, score: Score, vllm: Score) -> list[Any]:
    served = score.served
    over = (served.ms_a_step / vllm.served.ms_a_step - 1) * 100
    times = [served.ms_a_step, over, served.ms_a_token]
    padded = score.padded_share * 100
    return [name, len(score.ladder), score.used, *times, padded, served.rows(0.5), served.rows(0.99)]
