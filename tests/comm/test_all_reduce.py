"""All-reduce as it chooses, on the tape, with kernels that only note what they are asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stepgraph.comm.all_reduce import AllReduce
from stepgraph.comm.choice import Algorithm, Choice, Facts, Source
from stepgraph.comm.errors import CommError
from stepgraph.comm.gather import Gather
from stepgraph.comm.thresholds import Table, Thresholds
from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.breaks import graph_break
from stepgraph.runtime.platforms.tape import TapePlatform

KEY = BatchDescriptor.decode(4)
TABLE = Table("a device", 2, Thresholds(64, 128, 4096), Thresholds(256, 256, 1024), "a test")
ROOMY = Facts(capturing=False, push_bytes=1 << 20, stage_bytes=1 << 20, no_multicast="off")


class Group:
    """Two ranks that always have the same."""

    device, world = torch.device("cpu"), 2

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        tensor.mul_(2)

    def gather_into(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        out.copy_(tensor.expand_as(out))

    def agree(self, what: str, value: Any) -> None:
        pass

    def exchange(self, value: Any, doing: str = "") -> list[Any]:
        return [value, value]

    def check(self) -> None:
        pass


class Noting:
    facts = ROOMY

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.exchanges = 0
        self.late = False

    def unfit(self, x: torch.Tensor) -> str | None:
        return None if x.dtype is torch.float32 else "no float32"

    def run(self, choice: Choice, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        self.asked.append((choice.algorithm.value, choice.source.value))
        x.mul_(2)
        return x if residual is None else x.add_(residual)

    def gathers(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() <= 4

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack((tensor, tensor + 1))

    def exchange(self) -> None:
        self.exchanges += 1

    def check(self) -> None:
        if self.late:
            raise CommError("rank 1 is late")

    def close(self) -> None:
        pass


def make(**facts: Any) -> tuple[AllReduce, Noting]:
    kernels = Noting()
    kernels.facts = replace(ROOMY, **facts)
    return AllReduce(Group(), kernels, TABLE), kernels  # type: ignore[arg-type]


def test_rows_are_taken_in_the_capture_and_not_in_the_warm_up() -> None:
    all_reduce, kernels = make()
    x, platform = torch.ones(50), TapePlatform()  # 200 bytes

    def step() -> torch.Tensor:
        return all_reduce(x * 1, torch.ones(50))

    platform.warm_up(step)
    assert kernels.asked == [("one_shot_push", "pushed")]
    all_reduce.begin(KEY)
    recording, out = platform.record(step, None)
    assert kernels.asked[1:] == [("two_shot_pull", "pointer row")]
    x.fill_(5.0)
    recording.replay()
    assert out[0] == 11.0
    assert len(kernels.asked) == 2  # a replay chooses nothing
    (frozen,) = all_reduce.log.by_key[KEY]
    assert (frozen.nbytes, frozen.choice.algorithm, frozen.choice.source) == (200, Algorithm.TWO_SHOT, Source.ROW)
    assert frozen.choice.reason == "captured: at most 4096 bytes"
    all_reduce.exchange()
    assert kernels.exchanges == 1


def test_a_break_of_a_recording_is_eager() -> None:
    all_reduce, kernels = make()
    x = torch.ones(50)
    in_break = graph_break(lambda: all_reduce(x.clone(), None), name="sum")
    TapePlatform().record_breakable(in_break, None)
    assert kernels.asked == [("one_shot_push", "pushed")]
    assert not all_reduce.log.by_key


def test_a_recording_whose_parts_run_at_once_takes_no_rows() -> None:
    all_reduce, kernels = make()
    all_reduce.begin(KEY, "it runs at once")
    TapePlatform().record(lambda: all_reduce(torch.ones(50)), None)
    all_reduce.begin(KEY)
    TapePlatform().record(lambda: all_reduce(torch.ones(50)), None)
    assert kernels.asked == [("one_shot_push", "pushed"), ("two_shot_pull", "pointer row")]


@pytest.mark.parametrize("why", ["the group spans nodes", "a piecewise graph"])
def test_where_no_row_can_be_a_captured_sum_goes_as_an_eager_one(why: str) -> None:
    all_reduce, kernels = make(no_rows=why)
    all_reduce.begin(KEY)
    TapePlatform().record(lambda: all_reduce(torch.ones(200)), None)  # 800 bytes
    assert kernels.asked == [("two_shot_pull", "staged")]
    assert why in all_reduce.log.by_key[KEY][0].choice.reason


def test_what_the_kernels_cannot_do_the_library_does() -> None:
    all_reduce, kernels = make()
    out = all_reduce(torch.ones(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64))
    assert out.tolist() == [3.0] * 4 and not kernels.asked
    assert all_reduce.choose(torch.ones(4, dtype=torch.float64), capturing=False).reason == "no float32"
    assert all_reduce.choose(torch.ones(2000), capturing=False).algorithm is Algorithm.LIBRARY


@pytest.mark.parametrize(
    ("algorithm", "source", "message"),
    [
        (Algorithm.TWO_SHOT, Source.ROW, "only while the stream captures"),
        (Algorithm.MULTICAST, Source.STAGED, "off"),
        (Algorithm.PUSH, Source.PUSHED, "more than the 64 there are"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(algorithm: Algorithm, source: Source, message: str) -> None:
    all_reduce, kernels = make(push_bytes=64)
    with pytest.raises(CommError, match=message):
        all_reduce(torch.ones(50), choice=Choice(algorithm, source, "asked for"))
    assert not kernels.asked


@pytest.mark.parametrize("shape", [(4, 8), (2000,), (4, 0)])  # by kernels, by the library, and by nobody
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_a_residual_of_another_shape_or_dtype_is_refused(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    all_reduce, kernels = make()
    x = torch.ones(shape, dtype=dtype)
    others = [torch.ones(8, dtype=dtype), torch.ones(shape, dtype=torch.float64)]
    for residual in others:
        with pytest.raises(CommError) as caught:
            all_reduce(x, residual)
        for one in (x, residual):
            assert f"{list(one.shape)} of {one.dtype}" in str(caught.value)
    assert bool((x == 1).all()) and not kernels.asked
    all_reduce(x, torch.ones_like(x))


def test_few_numbers_are_pushed_and_more_are_the_librarys() -> None:
    all_reduce, _ = make()
    gather = Gather(Group(), all_reduce)  # type: ignore[arg-type]
    all_reduce.begin(KEY)
    _, (few, many) = TapePlatform().record(lambda: (gather(torch.ones(4)), gather(torch.ones(5))), None)
    assert few.tolist() == [[1.0] * 4, [2.0] * 4] and many.tolist() == [[1.0] * 5] * 2
    assert [one.choice.algorithm for one in all_reduce.log.by_key[KEY]] == [Algorithm.PUSH, Algorithm.LIBRARY]


def test_an_empty_tensor_is_nobodys_business() -> None:
    all_reduce, kernels = make()
    assert all_reduce(torch.ones(0, 8)).shape == (0, 8) and not kernels.asked


def test_a_kernel_that_waited_too_long_is_told() -> None:
    all_reduce, kernels = make()
    all_reduce.check()
    kernels.late = True
    with pytest.raises(CommError, match="rank 1 is late"):
        all_reduce.check()


def test_an_operation_that_fails_is_not_in_flight_any_more() -> None:
    all_reduce, kernels = make()
    kernels.run = lambda *_: (_ for _ in ()).throw(CommError("no"))  # type: ignore[method-assign,assignment]
    for _ in range(2):
        with pytest.raises(CommError, match="^no$"):
            all_reduce(torch.ones(4))


def test_kernels_and_table_come_together() -> None:
    with pytest.raises(CommError, match="come together"):
        AllReduce(Group(), None, TABLE)  # type: ignore[arg-type]
