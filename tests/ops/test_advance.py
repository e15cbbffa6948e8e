"""The end of a step: tokens told, rows moved on, ended rows on the null block. On both devices, and in a graph."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.advance_cases import BLOCK_SIZE, draw_case, expected
from ops.interpreter import check_interpreted

from stepgraph.ops.advance import advance
from stepgraph.runtime.platforms import platform_for


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def check(case: dict[str, torch.Tensor], device: torch.device) -> None:
    want = expected(case)
    held = {name: value.to(device) for name, value in case.items()}
    advance(*held.values(), BLOCK_SIZE)
    for name, value in held.items():
        assert torch.equal(value.cpu(), want[name]), name


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 9), st.integers(1, 8))
def test_every_row_by_itself(seed: int, rows: int, blocks: int, ids: int) -> None:
    check(draw_case(random.Random(seed), rows, blocks, ids), torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 13, 128, 129, 600])
def test_every_row_by_itself_on_a_gpu(rows: int) -> None:
    for seed in range(10):
        check(draw_case(random.Random(seed), rows, blocks=33, ids=8), torch.device("cuda"))


def test_the_kernel_agrees_under_the_interpreter() -> None:
    check_interpreted("interpreted_advance.py")


def test_a_recording_tells_the_host_without_a_copy(device: torch.device) -> None:
    """Also views of the first rows of larger slots, as a step has them."""
    platform = platform_for(device)
    told, host = platform.shared((8, 4), torch.int64)
    state = {name: value.to(device) for name, value in draw_case(random.Random(1), 8).items()}
    state["told"] = told
    state["limits"].zero_(), state["stops"].fill_(-1)
    state["mailboxes"].copy_(torch.tensor([0, 1, 6, 3, 4, 5, 2, 7]))
    rows = {name: value[:3] if len(value) == 8 and name != "told" else value for name, value in state.items()}

    def step() -> None:
        advance(*rows.values(), BLOCK_SIZE)

    platform.warm_up(step)
    recording, _ = platform.record(step, platform.new_pool())
    mark = platform.mark()
    for position in range(20, 27):
        host.zero_()
        rows["tokens"].copy_(torch.tensor([5, 6, 7]))
        rows["seq_lens"].copy_(torch.tensor([position, 0, position + 1]))
        rows["positions"].copy_(torch.tensor([position - 1, 0, position]))
        recording.replay()
        mark.set()
        mark.wait()
        want = torch.zeros(8, 4, dtype=torch.int64)
        want[0, position % 4], want[6, (position + 1) % 4] = 5, 7
        assert torch.equal(host, want)
