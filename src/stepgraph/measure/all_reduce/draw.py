"""A picture of what each way takes, captured beside eager, with the thresholds between them."""

from __future__ import annotations

import statistics
from pathlib import Path

from stepgraph.comm.thresholds import Table
from stepgraph.measure.all_reduce.timing import Times
from stepgraph.measure.picture import new_picture, save_picture


def draw(times: dict[int, Times], table: Table, path: Path) -> None:
    """times: by bytes. Raises ConfigError where the file cannot be written."""
    picture = new_picture(11, 4.5)
    panels = picture.subplots(1, 2, sharey=True)
    names = sorted({name for took in times.values() for name, _ in took})
    for panel, captured, limits in zip(panels, (True, False), (table.captured, table.eager), strict=True):
        for name in names:
            points = [(size / 1024, statistics.median(took[name, captured])) for size, took in sorted(times.items())
                      if (name, captured) in took]  # fmt: skip
            if points:
                panel.plot(*zip(*points, strict=True), marker=".", label=name)
        for limit in {limits.push, limits.pull, limits.two_shot} - {0}:
            panel.axvline(limit / 1024, color="grey", linewidth=0.8, linestyle=":")
        panel.set(xscale="log", yscale="log", xlabel="KiB", title="captured" if captured else "eager")
    panels[0].set_ylabel("µs of device time")
    panels[1].legend(fontsize=8)
    picture.suptitle(f"All-reduce on {table.world} x {table.device}; dotted: thresholds")
    save_picture(picture, path)
