"""One contract, two platforms: every case here is the same on both. What only one can show is elsewhere: the tape's own
in test_tape.py, and GPU only, marked `gpu`, in test_buffers.py, test_threads.py and test_cuda_walk.py."""

import numpy as np
import pytest
import torch

from stepgraph.runtime import CaptureError, graph_break
from stepgraph.runtime.platforms import Platform, platform_for
from stepgraph.runtime.platforms.base import LoopTerms


@pytest.fixture
def platform(device: torch.device) -> Platform:
    return platform_for(device)


def record(platform: Platform, step):
    with torch.no_grad():
        platform.warm_up(step)
        return platform.record(step, platform.new_pool())


def test_the_chapters_alias_check(platform: Platform) -> None:
    persistent_input = torch.zeros(3, device=platform.device)
    captured_reference = persistent_input
    replay, persistent_output = record(platform, lambda: persistent_input * 2)

    persistent_input.copy_(torch.tensor([1.0, 2.0, 3.0]))
    replay.replay()
    borrowed, saved = persistent_output, persistent_output.clone()
    persistent_input = torch.tensor([7.0, 8.0, 9.0], device=platform.device)  # rebind, not an update
    replay.replay()
    np.testing.assert_array_equal(persistent_output.cpu(), [2.0, 4.0, 6.0])
    captured_reference.copy_(persistent_input)
    replay.replay()
    np.testing.assert_array_equal(persistent_output.cpu(), [14.0, 16.0, 18.0])
    np.testing.assert_array_equal(borrowed.cpu(), [14.0, 16.0, 18.0])
    np.testing.assert_array_equal(saved.cpu(), [2.0, 4.0, 6.0])


def test_replay_runs_no_python_of_the_step(platform: Platform) -> None:
    x, calls = torch.ones(2, device=platform.device), []
    replay, _ = record(platform, lambda: calls.append(1) or x + 1)
    before = len(calls)
    replay.replay()
    assert len(calls) == before


def test_a_rebound_parameter_is_not_seen(platform: Platform) -> None:
    layer = torch.nn.Linear(2, 2, bias=False, device=platform.device)
    x = torch.ones(1, 2, device=platform.device)
    replay, out = record(platform, lambda: layer(x))
    replay.replay()
    expected = out.clone()
    held = layer.weight.data  # a CUDA graph reads this address: it has to stay alive
    layer.weight.data = torch.zeros(2, 2, device=platform.device)
    layer.weight = torch.nn.Parameter(torch.zeros(2, 2, device=platform.device))
    replay.replay()
    assert torch.equal(out, expected) and held is not None


def test_views_in_place_and_views_of_views(platform: Platform) -> None:
    state = torch.zeros(4, 6, device=platform.device)

    def step() -> torch.Tensor:
        state[1:3].view(2, 2, 3).transpose(0, 1).add_(1)
        state.t()[0].mul_(2)
        return state.sum(dim=1)

    replay, out = record(platform, step)
    state.zero_()
    replay.replay()
    replay.replay()
    # after two replays, rows 1 and 2: column 0 is ((0+1)*2+1)*2 = 6, the other five columns 2
    assert out.tolist() == [0, 16, 16, 0]


def test_in_place_view_operators_replay_the_same_shape(platform: Platform) -> None:
    x = torch.arange(6.0, device=platform.device).view(2, 3)

    def step() -> torch.Tensor:
        y = x * 1
        y.t_()
        y.unsqueeze_(0)
        return y + 1

    replay, out = record(platform, step)
    for _ in range(3):
        x.add_(1)
        replay.replay()
    assert torch.equal(out, (x.t() + 1).unsqueeze(0))


def test_an_output_is_overwritten_by_the_next_replay(platform: Platform) -> None:
    x = torch.ones(3, device=platform.device)
    replay, out = record(platform, lambda: x * 3)
    replay.replay()
    first = out
    x.fill_(2)
    replay.replay()
    assert first.tolist() == [6, 6, 6]


def test_random_numbers_advance_and_a_seed_repeats_them(platform: Platform) -> None:
    replay, out = record(platform, lambda: torch.rand(64, device=platform.device))
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        draws = []
        for _ in range(3):
            replay.replay()
            draws.append(out.clone())
        assert not torch.equal(draws[0], draws[1])
        runs.append(torch.stack(draws))
    assert torch.equal(*runs)


def test_tensors_of_a_step_may_die_before_the_replay(platform: Platform) -> None:
    x = torch.ones(1000, device=platform.device)

    def step() -> torch.Tensor:
        a = x + 1
        b = a * 2
        del a
        return b.sum()

    replay, out = record(platform, step)
    churn = [torch.full((1000,), 9.0, device=platform.device) for _ in range(20)]
    x.fill_(2)
    replay.replay()
    assert out.item() == 6000 and len(churn) == 20


def test_multiple_and_nested_outputs(platform: Platform) -> None:
    x = torch.tensor([3.0, 1.0, 2.0], device=platform.device)
    replay, (ordered, where) = record(platform, lambda: torch.sort(x))
    x.copy_(torch.tensor([0.0, 5.0, 1.0]))
    replay.replay()
    assert ordered.tolist() == [0, 1, 5] and where.tolist() == [0, 2, 1]


def test_inference_mode_recordings_replay_outside_it(platform: Platform) -> None:
    layer, x = torch.nn.Linear(4, 4, device=platform.device), torch.randn(2, 4, device=platform.device)
    with torch.inference_mode():
        platform.warm_up(lambda: layer(x).add_(1))
        replay, out = platform.record(lambda: layer(x).add_(1), platform.new_pool())
    x.normal_()
    replay.replay()
    with torch.no_grad():
        torch.testing.assert_close(out, layer(x) + 1)


def test_a_custom_operator_is_replayed(platform: Platform) -> None:
    x, out = torch.ones(4, device=platform.device), torch.empty(4, device=platform.device)
    replay, _ = record(platform, lambda: double_into(x, out))
    x.fill_(4)
    replay.replay()
    assert out.tolist() == [8] * 4


@torch.library.custom_op("stepgraph_tests::double_into", mutates_args={"out"})
def double_into(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x).mul_(2)


def read_item(x: torch.Tensor) -> float:
    return x.sum().item()


def read_list(x: torch.Tensor) -> list[float]:
    return x.tolist()


def branch(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.sum() > 0 else x


def size_from_data(x: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(x)


def mask_select(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


def host_copy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor([1.0, 2.0, 3.0], device=x.device)


def to_host(x: torch.Tensor) -> torch.Tensor:
    return x.cpu()


@pytest.mark.parametrize(
    "refused", [read_item, read_list, branch, size_from_data, mask_select, host_copy, to_host], ids=lambda f: f.__name__
)
def test_what_a_capture_refuses_names_its_line(platform: Platform, refused) -> None:
    x = torch.ones(3, device=platform.device)
    with pytest.raises(CaptureError, match=rf"test_platform_contract.py:\d+ in {refused.__name__}"):
        platform.record(lambda: refused(x), platform.new_pool())


def test_a_refused_capture_leaves_the_platform_usable(platform: Platform) -> None:
    x, pool = torch.ones(3, device=platform.device), platform.new_pool()
    earlier, kept = platform.record(lambda: x + 5, pool)
    for _ in range(3):
        with pytest.raises(CaptureError):
            platform.record(lambda: (x * 2).sum().item(), pool)
        pool = platform.new_pool()
        replay, out = platform.record(lambda: x + 1, pool)
        x.add_(1)
        replay.replay()
        earlier.replay()
        assert torch.equal(out, x + 1) and torch.equal(kept, x + 5)


def test_a_steps_own_error_passes_through(platform: Platform) -> None:
    def step() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        platform.record(step, platform.new_pool())


@pytest.mark.gpu
def test_the_collector_frees_no_graph_during_a_capture() -> None:
    """A freed graph breaks a capture that is under way, so nothing is collected until it has ended."""
    platform = platform_for("cuda")
    x = torch.ones(4, device="cuda")
    for _ in range(5):
        recording, _ = platform.record(lambda: x + 1, platform.new_pool())
        cycle = [recording]
        cycle.append(cycle)
    del recording, cycle

    def step() -> torch.Tensor:
        piles = [[[] for _ in range(100)] for _ in range(1000)]  # enough for a collection
        return x * len(piles)

    recording, out = platform.record(step, platform.new_pool())
    recording.replay()
    assert out.tolist() == [1000.0] * 4


def test_memory_that_steps_write_and_the_host_reads(platform: Platform) -> None:
    on_device, host = platform.shared((3, 2), torch.int64)
    assert on_device.device == platform.device and host.device.type == "cpu" and not host.any()
    x, mark = torch.zeros(2, dtype=torch.int64, device=platform.device), platform.mark()
    replay, _ = record(platform, lambda: torch.add(x.add_(1), 0, out=on_device[1]))
    before = x.clone()
    for step in range(1, 4):
        replay.replay()
        mark.set()
        mark.wait()
        assert host.tolist() == [[0, 0], (before + step).tolist(), [0, 0]]


def test_values_are_uploaded_in_order(platform: Platform) -> None:
    values = torch.arange(5)
    uploaded = platform.upload(values)
    assert uploaded.device == platform.device and torch.equal(uploaded.cpu(), torch.arange(5))


@pytest.mark.parametrize(("halts_at", "most", "runs"), [(5, 8, 5), (5, 3, 3), (1, 8, 1)])
def test_a_loop_runs_until_it_halts(platform: Platform, halts_at: int, most: int, runs: int) -> None:
    terms, mark = LoopTerms.on(platform, most), platform.mark(asleep=True)
    x, seen = (torch.zeros(n, dtype=torch.int64, device=platform.device) for n in (1, 16))

    def step() -> None:
        x.add_(1)
        seen.index_add_(0, x, x)
        terms.halt.copy_(x == halts_at)

    recording, _ = record(platform, step)
    replay = recording.loop(terms)
    assert recording.loop(terms) == replay
    for _ in range(2):  # the counters begin anew
        x.zero_(), seen.zero_()
        replay()
        mark.set()
        mark.wait()
        assert int(terms.told) == runs and int(x) == runs
        assert seen[: runs + 1].tolist() == list(range(runs + 1)) and not seen[runs + 1 :].any()
    recording.replay()  # one step by itself, after a loop
    assert int(x) == runs + 1


def test_a_loop_of_a_released_recording_is_refused(platform: Platform) -> None:
    x = torch.zeros(1, device=platform.device)
    recording, _ = record(platform, lambda: x.add_(1))
    recording.loop(LoopTerms.on(platform, 2))
    platform.synchronize()
    recording.release()
    with pytest.raises(CaptureError, match="released"):
        recording.loop(LoopTerms.on(platform, 2))


def test_a_step_with_breaks_is_no_loop(platform: Platform) -> None:
    x = torch.zeros(1, device=platform.device)
    recording, _ = platform.record_breakable(lambda: graph_break(x.add_)(1), platform.new_pool())
    with pytest.raises(CaptureError, match="one by one"):
        recording.loop(LoopTerms.on(platform, 2))
