"""The picture of `stepgraph launch`: launches by path, and graphs by their number of nodes."""

from __future__ import annotations

from pathlib import Path

from stepgraph.measure.picture import new_picture, save_picture
from stepgraph.measure.result import Result


def draw_launch(result: Result, path: Path) -> None:
    """Single launches as medians with p10 and p90; graphs as lines over their number of nodes, both axes logarithmic.

    Raises:
        ConfigError: the file cannot be written.
    """
    singles = [figure for figure in result.figures if not figure.name.endswith((" node", " nodes"))]
    picture = new_picture(13, 5)
    left, right = picture.subplots(1, 2)
    for place, figure in enumerate(reversed(singles)):
        low, high = figure.spread or (figure.median, figure.median)
        error = [[figure.median - low], [high - figure.median]]
        left.errorbar([figure.median], [place], xerr=error, fmt="o", capsize=3)
    left.set(yticks=range(len(singles)), yticklabels=[figure.name for figure in reversed(singles)])
    left.set(xlabel="µs: median, p10 to p90", title="one launch", xlim=(0, None))
    nodes = result.tables[0]
    counts = [row[0] for row in nodes.rows]
    for place, column in enumerate(nodes.columns[1:], start=1):
        right.plot(counts, [row[place] for row in nodes.rows], "o-", markersize=4, label=column)
    right.set(xscale="log", yscale="log", xlabel="nodes of the graph", ylabel="µs", title="one graph")
    right.legend(fontsize=8)
    picture.suptitle(result.machine, fontsize=9)
    save_picture(picture, path)
