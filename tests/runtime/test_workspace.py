"""Workspace: grows until it is locked, and then names who wants more."""

import inspect
import re
from functools import partial

import pytest
import torch

from stepgraph.runtime import Backend, GraphConfig, GraphRunner, Ladder, Mode, PaddingPolicy, Slot, StaticBuffers
from stepgraph.runtime.breaks import graph_break
from stepgraph.runtime.config import DecodePhase
from stepgraph.runtime.errors import CaptureError, InputError, ReplayError
from stepgraph.runtime.platforms import platform_for
from stepgraph.runtime.workspace import Workspace


def test_a_name_keeps_its_memory_at_every_shape_that_fits(device) -> None:
    workspace = Workspace(device)
    large = workspace.get("partials", (4, 8), torch.float32)
    assert large.shape == (4, 8) and large.is_contiguous() and large.device.type == device.type
    assert large.eq(0).all()
    large.fill_(3)
    small = workspace.get("partials", [2, 3], torch.int64)
    assert small.data_ptr() == large.data_ptr() and small.dtype == torch.int64 and small.ne(0).all()
    other = workspace.get("counters", (4,), torch.int32)
    assert other.eq(0).all() and large.eq(3).all()
    assert workspace.nbytes == 128 + 16 and workspace.generation == 0


def test_growth_moves_it_and_counts(device) -> None:
    workspace = Workspace(device)
    before = workspace.get("partials", (4,), torch.float32)
    after = workspace.get("partials", (5,), torch.float32)
    assert after.data_ptr() != before.data_ptr() and workspace.generation == 1
    workspace.get("counters", (1,), torch.int32)  # new: nothing that was handed out moves
    assert workspace.generation == 1


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_odd_shapes(device, shape: tuple[int, ...]) -> None:
    assert Workspace(device).get("x", shape, torch.bfloat16).shape == shape


@pytest.mark.parametrize("shape", [(-1,), (-1, -1), 4, None])
def test_what_is_no_shape(shape) -> None:
    workspace = Workspace("cpu")
    with pytest.raises(
        InputError, match=r"x wants .*, which is no shape \(at test_workspace.py:\d+ in test_what_is_no"
    ):
        workspace.get("x", shape, torch.float32)
    assert workspace.nbytes == 0


def test_a_locked_one_names_who_wants_more(device) -> None:
    workspace = Workspace(device)
    partials = workspace.get("partials", (4, 8), torch.float32)
    workspace.lock()
    assert workspace.locked
    assert workspace.get("partials", (2, 8), torch.float32).data_ptr() == partials.data_ptr()
    line = inspect.currentframe().f_lineno + 2
    with pytest.raises(ReplayError) as caught:
        workspace.get("partials", (5, 8), torch.float32)
    assert re.search(
        rf"workspace is locked.*partials wants 160 bytes for \(5, 8\) torch.float32, there are 128 "
        rf"\(at test_workspace.py:{line} in test_a_locked.*before the capture",
        str(caught.value),
    )
    with pytest.raises(ReplayError, match="counters wants 4 bytes .* there are 0"):
        workspace.get("counters", (1,), torch.int32)
    assert workspace.generation == 0
    workspace.unlock()
    workspace.get("partials", (5, 8), torch.float32)
    assert workspace.generation == 1


def test_locks_count() -> None:
    workspace = Workspace("cpu")
    workspace.unlock()  # nothing to take back
    workspace.lock()
    workspace.lock()
    workspace.unlock()
    with pytest.raises(ReplayError):
        workspace.get("x", (1,), torch.int32)
    workspace.unlock()
    workspace.get("x", (1,), torch.int32)


def test_what_was_made_in_inference_mode_is_written_outside_it() -> None:
    workspace = Workspace("cpu")
    with torch.inference_mode():
        workspace.get("x", (2,), torch.float32)
    assert workspace.get("x", (2,), torch.float32).add_(1).eq(1).all()


def twice_and_one(workspace: Workspace, x: torch.Tensor) -> torch.Tensor:
    scratch = workspace.get("scratch", x.shape, x.dtype)
    torch.mul(x, 2, out=scratch)
    return scratch + 1


def test_it_grows_in_the_warm_up_and_replays(device) -> None:
    platform, workspace = platform_for(device), Workspace(device)
    x = torch.ones(3, device=device)

    step = partial(twice_and_one, workspace, x)
    platform.warm_up(step)
    recording, out = platform.record(step, platform.new_pool())
    workspace.lock()
    x.fill_(5)
    recording.replay()
    assert out.eq(11).all()


def test_growth_after_a_recording_leaves_it_its_memory(device) -> None:
    """Without a lock: between two recordings of one session, say."""
    platform, workspace = platform_for(device), Workspace(device)
    x = torch.ones(1024, device=device)

    step = partial(twice_and_one, workspace, x)
    platform.warm_up(step)
    recording, out = platform.record(step, platform.new_pool())
    workspace.get("scratch", (2048,), torch.float32)
    others = [torch.zeros(1024, device=device) for _ in range(50)]
    recording.replay()
    assert out.eq(3).all() and all(other.eq(0).all() for other in others)


def test_one_that_grows_at_a_replayed_shape_is_found_by_name(device) -> None:
    """In a break, whose scratch follows a length that the shapes do not tell."""
    workspace, longest = Workspace(device), [4]

    @graph_break
    def attention(x: torch.Tensor) -> torch.Tensor:
        partials = workspace.get("partials", (len(x), longest[0]), x.dtype)
        return partials.copy_(x[:, None].expand(-1, longest[0])).sum(1)

    slots = [Slot("x", torch.float32, "request", PaddingPolicy.ZERO)]
    buffers = StaticBuffers(max_requests=4, device=device, slots=slots)
    config = GraphConfig(decode=DecodePhase(Backend.BREAKABLE, Ladder.explicit([2, 4])))
    runner = GraphRunner(lambda x: attention(x * 2) + 1, buffers, config)
    runner.watch(workspace)
    runner.capture()
    out = runner(x=torch.ones(2))
    assert out.mode is Mode.BREAKABLE and out.output.eq(9).all()
    longest[0] = 8
    assert runner(x=torch.ones(2)).output.eq(17).all()  # as much as four requests had
    with pytest.raises(
        ReplayError, match=r"partials wants 128 bytes for \(4, 8\) .* there are 64 \(at test_workspace.*"
    ):
        runner(x=torch.ones(4))
    runner.release()
    assert runner(x=torch.ones(4)).output.eq(17).all() and not workspace.locked


@pytest.mark.gpu
def test_growth_inside_a_capture_is_refused() -> None:
    """Its memory would come from the graphs' pool."""
    platform, workspace = platform_for("cuda"), Workspace("cuda")
    with pytest.raises(CaptureError, match=r"cannot grow inside a capture: x wants 4 bytes .*test_workspace\.py"):
        platform.record(lambda: workspace.get("x", (1,), torch.float32), platform.new_pool())
