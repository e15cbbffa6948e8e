"""Draws the steps of a trace, one after the other, beside the kernels that take most of them."""

from __future__ import annotations

from pathlib import Path

from stepgraph.measure.picture import new_picture, save_picture
from stepgraph.measure.trace.loop import TraceAccount
from stepgraph.measure.trace.result import PARTS, short
from stepgraph.measure.trace.shares import kernel_shares

BARS = 12


def draw(path: Path, account: TraceAccount) -> None:
    """As PNG. Raises ConfigError where the file cannot be written."""
    figure = new_picture(12, 4.5)
    steps, kernels = figure.subplots(1, 2, width_ratios=(3, 2))
    order = ("busy", "gaps_device", "gaps_host", "before_first")
    below = [0.0] * len(account.waterfalls)
    for part in order:
        above = [low + getattr(step, part) for low, step in zip(below, account.waterfalls, strict=True)]
        edges = range(len(above) + 1)
        steps.stairs(above, edges, baseline=below, fill=True, label=PARTS[part][0])
        below = above
    steps.set(xlabel="step", ylabel="µs", title="where each step's time goes", ylim=(0, None))
    figure.legend(ncols=4, fontsize=8, loc="outside lower left")
    shares = kernel_shares(account)[:BARS][::-1]
    kernels.barh([short(share.name, 36) for share in shares], [share.us_a_step for share in shares])
    kernels.tick_params(axis="y", labelsize=7)
    kernels.set(xlabel="µs a step", title="kernels")
    save_picture(figure, path)
