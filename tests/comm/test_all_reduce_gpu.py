"""Our all-reduces on two GPUs. What needs no processes of its own runs in one pair of them, one part after another."""

from __future__ import annotations

import os
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from comm.ranks_in_processes import results, run_ranks

from stepgraph.comm.choice import Algorithm, Choice, Source
from stepgraph.comm.communicator import make_all_reduce
from stepgraph.comm.errors import CommError
from stepgraph.comm.gather import Gather
from stepgraph.comm.group import Group
from stepgraph.comm.thresholds import Table, Thresholds
from stepgraph.measure.all_reduce.late_writer import late_writer
from stepgraph.measure.all_reduce.stress import Stress, stress
from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.platforms import platform_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

KIB = 1024
SMALL = Table("any", 2, Thresholds(8 * KIB, 32 * KIB, 1024 * KIB), Thresholds(64 * KIB, 128 * KIB, 512 * KIB), "a test")
WIDE = Table("any", 2, *(Thresholds(16 << 20, 16 << 20, 64 << 20),) * 2, "a test")
Found = dict[str, list[Any]]
"""By part, what the two ranks have found."""
WAYS = [
    (Algorithm.PUSH, Source.PUSHED),
    (Algorithm.PULL, Source.STAGED),
    (Algorithm.TWO_SHOT, Source.STAGED),
    (Algorithm.PULL, Source.ROW),
    (Algorithm.TWO_SHOT, Source.ROW),
]


def every_way(group: Group) -> dict[str, Any]:
    """Each algorithm, dtype and size, eager and captured, with and without a residual: how far from the sum."""
    all_reduce = make_all_reduce(group, table=WIDE)
    group.before_close(all_reduce.close)
    platform, found = platform_for(group.device), {}
    generator = torch.Generator().manual_seed(group.rank)
    for algorithm, source in WAYS:
        choice = Choice(algorithm, source, "a test")
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for nbytes in (16, 8 * KIB, 1000 * KIB + 16, 8192 * KIB):
                values = torch.randn(nbytes // dtype.itemsize, generator=generator)
                values[::7] = 0.0
                x = values.to(group.device, dtype)
                expected = sum(part.to(group.device).float() for part in group.exchange(x.cpu()))
                residual = torch.ones_like(x)
                captured = source is Source.ROW

                def once(x: torch.Tensor = x, choice: Choice = choice, residual: torch.Tensor = residual) -> Any:
                    return all_reduce(x * 1, choice=choice), all_reduce(x * 1, residual, choice=choice)

                if captured:
                    all_reduce.begin(BatchDescriptor.decode(1))
                    recording, outputs = platform.record(once, platform.new_pool())
                    all_reduce.exchange()
                    recording.replay()
                    recording.replay()
                else:
                    outputs = once()
                torch.cuda.synchronize()
                bits = group.exchange([output.cpu() for output in outputs])
                same = all(torch.equal(a, b) for a, b in zip(bits[0], bits[1], strict=True))
                wanted = zip(outputs, (expected, expected + 1), strict=True)
                errors = [float((output.float() - sum_).abs().max()) for output, sum_ in wanted]
                found[f"{algorithm} {source} {dtype} {nbytes}"] = (max(errors), same, torch.finfo(dtype).eps)
                if captured:
                    recording.release()
    all_reduce.check()
    return found


def test_every_way_sums(found_by_part: Found) -> None:
    for found in found_by_part["every_way"]:
        for name, (error, same, eps) in found.items():
            assert error <= 8 * eps, f"{name}: {error}"
            assert same, f"{name}: the ranks have other bits"


def contract(group: Group) -> dict[str, Any]:
    all_reduce = make_all_reduce(group, table=SMALL)
    group.before_close(all_reduce.close)
    x = torch.ones(24 * KIB, dtype=torch.bfloat16, device=group.device)  # 48 KiB: another algorithm captured than eager
    platform, key = platform_for(group.device), BatchDescriptor.decode(1)
    eager = all_reduce.choose(x, capturing=False)
    kernels = all_reduce.kernels
    platform.warm_up(lambda: all_reduce(x.clone()))
    in_warm_up = len(kernels._rows._pending)  # type: ignore[union-attr]
    all_reduce.begin(key)
    recording, out = platform.record(lambda: all_reduce(x * 1), platform.new_pool())
    in_capture = len(kernels._rows._pending)  # type: ignore[union-attr]
    all_reduce.exchange()
    recording.replay()
    torch.cuda.synchronize()
    refused = []
    for choice in (
        Choice(Algorithm.TWO_SHOT, Source.ROW, "eager"),
        Choice(Algorithm.MULTICAST, Source.STAGED, "asked for"),
    ):
        with pytest.raises(CommError) as caught:
            all_reduce(x.clone(), choice=choice)
        refused.append(str(caught.value))
    frozen = all_reduce.log.by_key[key][0].as_dict()
    recording.release()
    return {
        "eager": eager.algorithm.value,
        "frozen": frozen,
        "in_warm_up": in_warm_up,
        "in_capture": in_capture,
        "value": float(out[0]),
        "refused": refused,
    }


def test_the_contract_of_a_captured_sum(found_by_part: Found) -> None:
    for found in found_by_part["contract"]:
        assert found["eager"] == "one_shot_push"
        assert (found["frozen"]["algorithm"], found["frozen"]["source"]) == ("two_shot_pull", "pointer row")
        assert (found["in_warm_up"], found["in_capture"]) == (0, 1)
        assert found["value"] == 2.0
        assert "only while the stream captures" in found["refused"][0]
        assert "multicast off" in found["refused"][1]


def two_streams(group: Group) -> str:
    all_reduce = make_all_reduce(group, table=SMALL)
    group.before_close(all_reduce.close)
    x = torch.ones(64, dtype=torch.bfloat16, device=group.device)
    side = torch.cuda.Stream()

    def step() -> None:
        all_reduce(x.clone())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            all_reduce(x.clone())
        torch.cuda.current_stream().wait_stream(side)

    step()  # eagerly the second waits for the first
    torch.cuda.synchronize()
    try:
        platform_for(group.device).record(step, platform_for(group.device).new_pool())
    except CommError as error:
        return str(error)
    return "nothing"


def test_two_in_flight_in_a_capture_are_refused(found_by_part: Found) -> None:
    for said in found_by_part["two_streams"]:
        assert "two streams of a capture" in said


def gathered(group: Group) -> list[bool]:
    all_reduce = make_all_reduce(group, table=SMALL)
    group.before_close(all_reduce.close)
    gather, platform, right = Gather(group, all_reduce), platform_for(group.device), []
    x = torch.zeros(300, 2, dtype=torch.int32, device=group.device)
    all_reduce.begin(BatchDescriptor.decode(1))
    recording, out = platform.record(lambda: gather(x), platform.new_pool())
    all_reduce.exchange()
    for turn in range(500):
        x.fill_(1000 * turn + group.rank)
        recording.replay()
        eager = gather(x[: 1 + turn % 300].contiguous())
        for found in (out, eager):
            right.append(all(bool((found[rank] == 1000 * turn + rank).all()) for rank in range(2)))
    all_reduce.check()
    recording.release()
    return right


def test_small_gathers(found_by_part: Found) -> None:
    for right in found_by_part["gathered"]:
        assert len(right) == 1000 and all(right)


def stressed(group: Group) -> Stress:
    all_reduce = make_all_reduce(group, table=SMALL)
    group.before_close(all_reduce.close)
    return stress(group, all_reduce, captured=4000, write_late=late_writer(group.device))


def test_thousands_of_sums_of_random_sizes(found_by_part: Found) -> None:
    for found in found_by_part["stressed"]:
        assert found.wrong == 0 and not found.faults, "\n".join([str(found.wrong), *found.faults])
        assert found.captured == 4000
        captured = [name.split(", ") for name in found.algorithms if ", captured, " in name]
        assert {name[0] for name in captured} == {"one_shot_push", "one_shot_pull", "two_shot_pull", "library"}
        assert {name[-1] for name in captured} >= {"behind torch's", "behind a sum"}
        if torch.cuda.get_device_capability() >= (9, 0):
            assert "behind a late writer" in {name[-1] for name in captured}


def waits_in_vain(group: Group) -> str:
    all_reduce = make_all_reduce(group, table=SMALL, limit_s=0.2)
    x = torch.ones(64, dtype=torch.bfloat16, device=group.device)
    all_reduce(x)
    torch.cuda.synchronize()
    group.exchange(None)
    said = ""
    if group.rank == 0:
        started = time.monotonic()
        all_reduce(x)
        torch.cuda.synchronize()
        said = f"{time.monotonic() - started:.1f} s; "
        try:
            all_reduce.check()
        except CommError as error:
            said += str(error)
    group.exchange(None)
    return said


PARTS = (every_way, contract, two_streams, gathered, stressed, waits_in_vain)


def part_by_part(group: Group) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in PARTS:
        started = time.monotonic()
        try:
            found[part.__name__] = part(group)
        except Exception as error:
            traceback.print_exc()
            found[part.__name__] = f"{type(error).__name__}: {error}"
        print(f"rank {group.rank}, {part.__name__}: {time.monotonic() - started:.1f} s", flush=True)
    return found


@pytest.fixture(scope="module")
def found_by_part(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each part has found on the two ranks; of one that failed its error, which no test takes for a result."""
    both = results(run_ranks(2, tmp_path_factory.mktemp("ranks"), part_by_part, device="cuda"))
    return {part.__name__: [found[part.__name__] for found in both] for part in PARTS}


def test_a_wait_ends(found_by_part: Found) -> None:
    said, _ = found_by_part["waits_in_vain"]
    assert "waited too long for rank 1" in said, said


def killed(group: Group, folder: Path) -> None:
    all_reduce = make_all_reduce(group, table=SMALL)
    x = torch.ones(24 * KIB, dtype=torch.bfloat16, device=group.device)
    for call in range(100_000):
        if group.rank == 1 and call == 2000:
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        all_reduce(x.clone())
        if call % 50 == 0:
            torch.cuda.synchronize()
            all_reduce.check()


def test_a_killed_rank_ends_the_other_within_15_seconds(tmp_path: Path) -> None:
    first, second = run_ranks(2, tmp_path, killed, tmp_path, device="cuda")
    assert second.code == -signal.SIGKILL
    assert first.error is not None and "rank 1" in first.error
    written = [(tmp_path / name).stat().st_mtime for name in ("died", "rank0.pkl")]
    assert 0 <= written[1] - written[0] < 15


def test_nothing_is_left_on_the_gpus(tmp_path: Path) -> None:
    """After a rank was killed, both GPUs work."""
    for found in results(run_ranks(2, tmp_path, stressed, device="cuda")):
        assert found.wrong == 0 and not found.faults, "\n".join([str(found.wrong), *found.faults])
