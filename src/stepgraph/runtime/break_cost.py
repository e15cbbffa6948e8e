"""What a break costs: the host's time in its function, the device's in its kernels, the device's in waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from stepgraph.runtime.breakable import Break

Part = tuple[Callable[[], None], "Break | None"]
"""What replays a part, and the break that it is, or None for a segment."""

_LAUNCH_SECONDS = 500e-6  # more than it takes to launch a segment


@dataclass(frozen=True)
class BreakCost:
    """One break's cost in a replay, in µs.

    The device is looked at from the end of the segment before the break to the end of the segment behind it.
    host_us: the host's time in the break.
    busy_us: what the device works on the break itself.
    idle_us: how much longer the device takes for that stretch than it does when the host is ahead of it, so that every
        launch finds a full queue. A break that waits for the device (a host read) empties the queue for itself; what
        the device then waits inside the break counts as busy.
    On the tape the host is the device: busy is the host's time and idle 0.
    """

    name: str
    host_us: float
    idle_us: float
    busy_us: float


class DeviceClock(Protocol):
    """Looks at the current stream."""

    def mark(self) -> Any:
        """Note when the device gets here."""

    def hold(self, seconds: float) -> None:
        """Keep the device busy for at least so long, without the host."""

    def elapsed_us(self, start: Any, stop: Any) -> float:
        """µs between two marks; waits until the device has passed both."""


Round = list[tuple[float, float, float]]
"""Each break's host, idle and busy µs."""


def measure_once(parts: Sequence[Part], clock: DeviceClock | None) -> Round:
    """Replay the parts: as they are, and where there is a clock once more with the host ahead of the device."""
    hosts: list[float] = []
    marks: list[Any] = []
    for call, a_break in parts:
        if a_break is None:
            call()
            continue
        before = a_break.host_seconds
        if clock is not None:
            marks.append(clock.mark())
        call()
        hosts.append((a_break.host_seconds - before) * 1e6)
    if clock is None:
        return [(host, 0.0, host) for host in hosts]
    marks.append(clock.mark())
    as_it_is = [clock.elapsed_us(start, stop) for start, stop in pairwise(marks)]
    ahead = _host_ahead(parts, clock, hosts)
    return [
        (host, max(0.0, stretch - full), busy)
        for host, stretch, (full, busy) in zip(hosts, as_it_is, ahead, strict=True)
    ]


def _host_ahead(parts: Sequence[Part], clock: DeviceClock, hosts: Sequence[float]) -> list[tuple[float, float]]:
    """For each break, with the host ahead: µs to the end of the segment behind it, and µs to its own end."""
    starts: list[Any] = []
    own_ends: list[Any] = []
    ends: list[Any] = []
    for call, a_break in parts:
        if a_break is None:
            call()
            continue
        if starts:
            ends.append(clock.mark())
        clock.hold(2e-6 * hosts[len(starts)] + _LAUNCH_SECONDS)
        starts.append(clock.mark())
        call()
        own_ends.append(clock.mark())
    ends.append(clock.mark())
    times = []
    for start, own_end, end in zip(starts, own_ends, ends, strict=False):  # without a break there is one end too many
        times.append((clock.elapsed_us(start, end), clock.elapsed_us(start, own_end)))
    return times


def median_costs(names: Sequence[str], rounds: Sequence[Round]) -> list[BreakCost]:
    """Each break's medians, one by one for host, idle and busy."""
    return [
        BreakCost(name, *(median(a_round[place][part] for a_round in rounds) for part in range(3)))
        for place, name in enumerate(names)
    ]
