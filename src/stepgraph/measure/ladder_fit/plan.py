"""From traffic and a latency curve to a plan: fitted, and scored beside other ladders."""

from __future__ import annotations

from stepgraph.measure.ladder_fit.fit import LOADS, by_sizes, fit_ladder
from stepgraph.measure.ladder_fit.histogram import Histogram
from stepgraph.measure.ladder_fit.peers import peers
from stepgraph.measure.ladder_fit.report import Plan
from stepgraph.measure.ladder_fit.requests import Requests
from stepgraph.measure.ladder_fit.server import Server, score
from stepgraph.runtime.errors import ConfigError

PICTURED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of sizes that the picture shows."""


def plan_ladder(
    server: Server,
    given: Requests | Histogram,
    most: int,
    *,
    rate: float = 1.0,
    holdout: bool = False,
    pictured: bool = False,
) -> Plan:
    """Fit at most `most` sizes and score them. rate: times that of the requests. holdout: fit to those of the first
    half of the time, and score the others. pictured: fit other numbers of sizes too.

    Raises:
        ConfigError: a rate or a half of a histogram, a half without requests, steps of more rows than the curve has.
    """
    fitted_to = scored = given
    if isinstance(given, Requests):
        fitted_to = scored = given.faster(rate)
        if holdout:
            fitted_to, scored = fitted_to.halves()
        if not (fitted_to.decodes and scored.decodes):
            raise ConfigError("traffic: no request decodes a token, in the trace or in one half of it")
    elif rate != 1 or holdout:
        raise ConfigError("traffic: a histogram has no arrivals: neither a rate nor halves")
    traffic = server.traffic(scored)
    fitted = fit_ladder(server, fitted_to, most)
    ladders = {"fitted": fitted.ladder, **peers(server.times.largest)}
    return Plan(
        fitted=fitted,
        most=most,
        scores={name: score(server, traffic, ladder) for name, ladder in ladders.items()},
        traffic=_words(given, rate, holdout),
        curve=_curve(server),
        by_sizes=by_sizes(server, fitted_to, traffic, PICTURED) if pictured else {},
    )


def _words(given: Requests | Histogram, rate: float, holdout: bool) -> str:
    if isinstance(given, Histogram):
        left_out = f", {given.left_out:,} others left out" if given.left_out else ""
        return f"{given.what}: {sum(given.steps.values()):,} steps of decoding{left_out}; batch sizes stay as they were"
    halves = (
        "fitted to the first half of the time, scored on the second" if holdout else "fitted to it and scored on it"
    )
    loads = ", ".join(f"{load:g}" for load in LOADS)
    return f"a trace of {len(given):,} requests at {rate:g} times its rate (fitted at {loads} times that), {halves}"


def _curve(server: Server) -> str:
    times, prefill = server.times, server.prefill
    words = f"{times.what}; {len(times.measured)} sizes up to {times.largest} measured, straight lines between them"
    if server.row_ns:
        words += f"; {server.row_ns / 1e3:g} µs more for each real row's context"
    if prefill is None:
        return f"{words}; prompts are computed elsewhere"
    return f"{words}; up to {prefill.chunk} tokens of prompts beside each step, {prefill.ns_a_token / 1e3:g} µs each"
