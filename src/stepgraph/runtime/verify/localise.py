"""Where two runs of a batch part: the first operator, its inputs, both results, and the Python line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stepgraph.runtime.breakable import BreakableRecording
from stepgraph.runtime.errors import CaptureError, ReplayError
from stepgraph.runtime.platforms import Recording
from stepgraph.runtime.platforms.tape.platform import TapeRecording
from stepgraph.runtime.verify.bench import Bench, Results
from stepgraph.runtime.verify.compare import Padded, Parting, Tolerance, bits_differ, first_parting, within
from stepgraph.runtime.verify.observe import Operation

_UNSEEN = ("no operator that torch's dispatcher sees differs; look at kernels that it does not see",)

Differences = Callable[[Results, Results], list[str]]


def where_recording_parts(bench: Bench, tolerance: Tolerance, differences: Differences) -> tuple[str, ...]:
    """Between eager and the replay. A tape is replayed call by call; another recording is made again, operator by
    operator, and if that agrees with eager, it is the recording's memory or Python that has changed since."""
    moved = _moved(bench)
    recording = bench.subject.graphs.by_key[bench.key].recording
    if _is_tape(recording):
        return (*(_beside_eager(bench, recording, tolerance) or _UNSEEN), *moved)
    try:
        fresh, outputs = bench.recorded_op_by_op()
    except CaptureError as error:
        return (f"not looked into, since it cannot be recorded operator by operator: {error}", *moved)
    try:
        expected = {name: value.clone() for name, value in bench.padded().items()}
        if not differences(bench.replayed_fresh(fresh, outputs), expected):
            return (
                "recorded again, operator by operator, it agrees with eager: what the recording reads has moved or "
                "changed since the capture, or it goes wrong only without breaks (a kernel on a stream of its own); "
                "what is watched is named once it moves: runner.watch()",
                *moved,
            )
        return (*(_beside_eager(bench, fresh, tolerance) or _UNSEEN), *moved)
    finally:
        fresh.release()


def where_inside_parts(bench: Bench, tolerance: Tolerance) -> tuple[str, ...]:
    """Between eager and a replay that end alike: on the way there. Only a tape can be looked into so far."""
    recording = bench.subject.graphs.by_key[bench.key].recording
    return _beside_eager(bench, recording, tolerance, same_path=False) if _is_tape(recording) else ()


def where_padding_parts(bench: Bench) -> tuple[str, ...] | None:
    """Between the real rows of an eager padded step and the step without padding. None: nowhere, beyond what kernels
    for other sizes may differ."""
    live, padded = bench.observe_live(), bench.observe_padded(keep=True)
    parting = first_parting(live, padded, Padded(), same_path=False)
    if parting is None:
        return None
    live = bench.observe_live(detail_at=parting.ours)
    padded = bench.observe_padded(keep=True, detail_at=parting.theirs, tails=True)
    return _explain(parting, live, padded, "without padding", "padded")


def where_random_parts(bench: Bench, seeds: Sequence[int]) -> tuple[str, ...]:
    """Between two eager runs, of other random numbers unless both seeds are the same."""
    first, second = (bench.observe_padded(keep=False, seed=seed) for seed in seeds)
    parting = first_parting(first, second, bits_differ)
    if parting is None:
        return ()
    first = bench.observe_padded(keep=False, detail_at=parting.ours, seed=seeds[0])
    second = bench.observe_padded(keep=False, detail_at=parting.theirs, seed=seeds[1])
    return _explain(parting, first, second, "one eager run", "another")


def _beside_eager(
    bench: Bench, recording: Recording, tolerance: Tolerance, *, same_path: bool = True
) -> tuple[str, ...]:
    keep = not tolerance.exact
    eager, replay = bench.observe_padded(keep=keep), bench.observe_replayed(recording, keep=keep)
    parting = first_parting(eager, replay, within(tolerance) if keep else bits_differ, same_path=same_path)
    if parting is None:
        return ()
    eager = bench.observe_padded(keep=keep, detail_at=parting.ours)
    replay = bench.observe_replayed(recording, keep=keep, detail_at=parting.theirs)
    return _explain(parting, eager, replay, "eager", "replay")


def _explain(
    parting: Parting, ours: Sequence[Operation], theirs: Sequence[Operation], us: str, them: str
) -> tuple[str, ...]:
    if not theirs or not ours:
        return (f"{us}: {len(ours)} operators; {them}: {len(theirs)}",)
    one, other = ours[parting.ours], theirs[parting.theirs]
    place = f" in {one.region}" if one.region else ""
    if not parting.same_operator:
        return (
            f"they take different paths: {us} calls {one.name}{place} at {one.line}, where {them} has {other.name}",
        )
    lines = [f"first operator that differs: {one.name}{place}, called at {one.line}"]
    inputs = list(zip(one.inputs, other.inputs, strict=False))
    for number, (mine, yours) in enumerate(inputs):
        if mine == yours:
            lines.append(f"input {number}: {mine.text}")
        elif mine.digest is not None and mine.digest == yours.digest:
            lines.append(f"input {number}: {yours.text}")
        else:
            lines.append(f"input {number} differs already: {us} {mine.text}; {them} {yours.text}")
    for mine, yours in zip(one.results, other.results, strict=False):
        lines.append(f"result: {us} {mine.text}; {them} {yours.text}")
    return tuple(lines)


def _is_tape(recording: Recording) -> bool:
    parts = recording._parts if isinstance(recording, BreakableRecording) else [recording]
    return any(isinstance(part, TapeRecording) for part in parts)


def _moved(bench: Bench) -> tuple[str, ...]:
    try:
        bench.subject.check_addresses()
    except ReplayError as error:
        return (f"watched: {error}",)
    return ()
