"""Outputs in debug mode: kept tensors and views of them are refused once a step has really overwritten them."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from runtime.sums import MAX_REQUESTS, MAX_TOKENS, SLOTS, Sums, sums_runner

from stepgraph.runtime import GraphConfig, GraphRunner, Ladder, Mode, ReplayError, StaticBuffers
from stepgraph.runtime.leases import LentTensor
from stepgraph.runtime.pool import GraphPool

DEBUG = ["checks", "eager-through-graph", "break-every-op"]


def config(debug: str = "checks") -> GraphConfig:
    return GraphConfig.preset("FULL_DECODE_ONLY", ladder=Ladder.explicit([2, 4]), debug=debug)


def step(runner: GraphRunner, rows: int = 2):
    return runner(ids=[8] * rows, num_requests=rows)


def refused(by: str = "step 2"):
    return pytest.raises(ReplayError, match=rf"step 1 made it and {by} has overwritten it; clone\(\)")


def save(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


USES: dict[str, Callable[[torch.Tensor], object]] = {
    "tolist": lambda t: t.tolist(),
    "item": lambda t: t[0].item(),
    "numpy": lambda t: t.cpu().numpy(),
    "array": lambda t: t.cpu().__array__(),
    "float": lambda t: float(t[0]),
    "iteration": list,
    "repr": repr,
    "data_ptr": lambda t: t.data_ptr(),
    "arithmetic": lambda t: t + 1,
    "right hand side": lambda t: 1 + torch.ones(2, device=t.device) * t,
    "in a list": lambda t: torch.stack([torch.ones(2, device=t.device), t]),
    "out": lambda t: torch.add(torch.ones(2, device=t.device), 1, out=t),
    "in place": lambda t: t.mul_(1),
    "copied from": lambda t: torch.zeros(2, device=t.device).copy_(t),
    "assigned": lambda t: torch.zeros(2, device=t.device).__setitem__(slice(None), t),
    "operator": lambda t: torch.ops.aten.neg.default(t),
    "view": lambda t: t.view(1, 2),
    "detach": lambda t: t.detach(),
    "clone": lambda t: t.clone(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "save": save,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_of_a_kept_tensor_is_refused(device, use) -> None:
    runner = sums_runner(config(), device)
    kept = step(runner).sums
    use(kept)
    step(runner)
    with refused():
        use(kept)


@pytest.mark.parametrize("debug", DEBUG)
def test_a_view_is_as_good_as_its_tensor(device, debug: str) -> None:
    runner = sums_runner(config(debug), device)
    kept = step(runner, 3).sums
    views = [kept[1:], kept.unsqueeze(0).T, kept.data, *kept.unbind(), kept.detach().view(-1), kept.add_(0)]
    assert views[0].tolist() == [2, 2]
    step(runner, 4)
    for view in views:
        with refused():
            view.sum()


@pytest.mark.parametrize("debug", DEBUG)
def test_running_again_ends_leases_too(device, debug: str) -> None:
    runner = sums_runner(config(debug), device)
    first, second, third = step(runner).sums, runner.again().sums, runner.again().sums
    with refused():
        first.tolist()
    with pytest.raises(ReplayError, match="step 2 made it and step 3 has overwritten it"):
        second.tolist()
    assert third.shape == (2,)


def test_copies_are_plain_and_stay() -> None:
    runner = sums_runner(config())
    out = step(runner)
    copies = [out.sums.clone(), out.sums + 0, out.clone().sums, copy.copy(out.sums), copy.deepcopy(out.sums)]
    copies.append(save(out.sums))
    step(runner)
    for kept in copies:
        assert type(kept) is torch.Tensor and kept.tolist() == [2, 2]
    with refused():
        out.clone()


def test_what_is_no_tensor_is_passed_through() -> None:
    sums = step(sums_runner(config())).sums
    assert type(sums.shape) is torch.Size and sums.dtype is torch.float32 and len(sums) == 2 and sums.is_contiguous()
    assert isinstance(sums.sort(), torch.return_types.sort)


def test_an_eager_step_overwrites_the_slab_alone(device) -> None:
    runner = sums_runner(config(), device)
    first = step(runner)
    assert first.mode is Mode.FULL
    total, sums = first.total, first.sums
    eager = step(runner, 5)  # above the ladder
    assert eager.mode is Mode.EAGER and type(eager.sums) is torch.Tensor
    assert sums.tolist() == [2, 2]
    with refused():
        total.tolist()
    step(runner)
    assert eager.sums.tolist() == [4, 4, 2, 2, 2]
    with refused("step 3"):
        sums.tolist()
    with pytest.raises(ReplayError, match="step 2 made it and step 3"):
        eager.total.tolist()


def test_another_runner_of_the_pool_overwrites_nothing(device) -> None:
    first, second = (
        StaticBuffers(max_requests=MAX_REQUESTS, max_tokens=MAX_TOKENS, slots=SLOTS, device=device) for _ in range(2)
    )
    pool = GraphPool(first.platform)
    runners = [GraphRunner(Sums(device), buffers, config(), pool=pool) for buffers in (first, second)]
    for runner in runners:
        runner.capture()
    kept = step(runners[0])
    for rows in (2, 4, 1):
        step(runners[1], rows)
    assert kept.sums.tolist() == [2, 2] and kept.total.tolist() == [1, 1]
    step(runners[0])
    with refused():
        kept.sums.tolist()


def test_a_refused_step_overwrites_nothing(device) -> None:
    runner = sums_runner(config(), device)
    kept = step(runner).sums
    with pytest.raises(Exception, match="expected"):
        runner(ids=[1, 2, 3], num_requests=2)
    assert kept.tolist() == [2, 2]


def test_verify_overwrites_outputs_but_not_the_slab(device) -> None:
    runner = sums_runner(config(), device)
    out = step(runner)
    runner.verify()
    assert out.total.tolist() == [1, 1]
    with refused(r"verify\(\)"):
        out.sums.tolist()


def test_an_output_may_be_the_next_input(device) -> None:
    runner = sums_runner(config(), device)
    ids = [8, 8]
    for _ in range(3):
        ids = runner(num_requests=2, ids=ids).total.long()
    kept = runner(num_requests=2, ids=[1, 1]).total
    step(runner)
    with pytest.raises(ReplayError, match="read too late"):
        runner(num_requests=2, total=kept)


def test_inference_mode(device) -> None:
    runner = sums_runner(config(), device)
    with torch.inference_mode():
        kept = step(runner).sums
    view = kept[:1]
    with torch.inference_mode():
        step(runner)
    with refused():
        view.tolist()


def test_without_debug_outputs_are_plain(device) -> None:
    out = step(sums_runner(config("off"), device))
    assert {type(value) for value in out.tensors.values()} == {torch.Tensor}
    assert not isinstance(out.sums[1:], LentTensor)
