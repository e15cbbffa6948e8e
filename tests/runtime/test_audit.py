"""What is watched: a replay is refused, by name, once a tensor or a workspace has left the memory that graphs use."""

import gc
import re
import statistics
import timeit
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from stepgraph.runtime import (
    ConfigError,
    GraphConfig,
    GraphRunner,
    Ladder,
    Mode,
    PaddingPolicy,
    ReplayError,
    Slot,
    StaticBuffers,
)
from stepgraph.runtime.audit import AddressAudit, module_of
from stepgraph.runtime.workspace import Workspace


class Net(nn.Module):
    def __init__(self, device: torch.device | str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3, device=device), nn.Linear(3, 3, bias=False, device=device))
        self.scale = nn.Parameter(torch.ones(3, device=device))
        self.register_buffer("offset", torch.ones(3, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.scale + self.offset


NAMES = ["scale", "offset", "layers.0.weight", "layers.0.bias", "layers.1.weight"]


def make(device, *, watch="before", step_of=lambda net: net, **config) -> tuple[GraphRunner, Net]:
    """step_of: the net itself is watched by itself, a function that calls it is not."""
    net = Net(device)
    slots = [Slot("x", torch.float32, "request", PaddingPolicy.ZERO, (3,))]
    buffers = StaticBuffers(max_requests=4, device=device, slots=slots)
    runner = GraphRunner(
        step_of(net), buffers, GraphConfig.preset("FULL_DECODE_ONLY", ladder=Ladder.explicit([2]), **config)
    )
    if watch == "before":
        runner.watch(net)  # known already, since the step is a module
    runner.capture()
    if watch == "after":
        runner.watch(net)
    return runner, net


def step(runner: GraphRunner, times: int = 1) -> torch.Tensor:
    for _ in range(times):
        out = runner(x=torch.ones(2, 3))
    return out.output.clone()


def fresh(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def rebind(net: Net) -> None:
    net.layers[0].weight = nn.Parameter(fresh(net.layers[0].weight))


def swap_data(net: Net) -> None:
    net.layers[0].weight.data = fresh(net.layers[0].weight)


def assign_state(net: Net) -> None:
    net.load_state_dict({name: fresh(value) for name, value in net.state_dict().items()}, assign=True)


def change_dtype(net: Net) -> None:
    net.layers.to(torch.float64)


def change_device(net: Net) -> None:
    net.layers.to("meta")


def replace_module(net: Net) -> None:
    net.layers[0] = nn.Linear(3, 3, device=net.scale.device)


def delete(net: Net) -> None:
    del net.layers[0].weight


@pytest.mark.parametrize(
    "move",
    [rebind, swap_data, assign_state, change_dtype, change_device, replace_module, delete],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("watch", ["before", "after"])
def test_a_moved_tensor_is_refused_by_name(device, watch, move) -> None:
    runner, net = make(device, watch=watch, step_of=lambda net: lambda x: net(x))
    before = f"{runner.buffers.device} {net.layers[0].weight.data_ptr():#x}"
    step(runner, 20)
    runner.check_addresses()
    held = net.layers[0].weight.data  # its memory goes to nobody else meanwhile
    move(net)
    expected = rf"layers\.0\.weight from {re.escape(before)} to .*copy_\(\).*release\(\) and capture\(\)"
    with pytest.raises(ReplayError, match=expected):
        runner.check_addresses()
    with pytest.raises(ReplayError, match=expected):
        step(runner, 10)
    assert held is not None


@pytest.mark.parametrize(
    "step_of",
    [lambda net: net, lambda net: net.forward, lambda net: partial(partial(net)), lambda net: partial(net.forward)],
    ids=["module", "method", "partial", "partial of a method"],
)
@pytest.mark.parametrize("debug", ["off", "checks"])
def test_the_steps_own_module_is_watched_by_itself(device, step_of, debug: str) -> None:
    runner, net = make(device, watch="", step_of=step_of, debug=debug)
    step(runner, 10)
    rebind(net)
    with pytest.raises(ReplayError, match=r"capture: layers\.0\.weight from"):
        step(runner, 10)


def test_other_steps_have_no_module() -> None:
    assert module_of(len) is None and module_of([].append) is None and module_of(partial(max, 1)) is None


def test_the_message_says_where_to(device) -> None:
    runner, net = make(device)
    net.offset = fresh(net.offset)
    with pytest.raises(ReplayError, match=f" to {runner.buffers.device} {net.offset.data_ptr():#x}"):
        runner.check_addresses()
    change_device(net)
    with pytest.raises(ReplayError, match="to meta 0x0.* and 1 more"):
        runner.check_addresses()


@pytest.mark.parametrize("name", NAMES)
def test_whichever_moves_is_found_in_one_turn(device, name: str) -> None:
    runner, net = make(device)
    places = len(NAMES) + 3  # the submodules
    owner = net.get_submodule(name.rpartition(".")[0])
    moved = fresh(getattr(owner, name.rpartition(".")[2]))
    setattr(owner, name.rpartition(".")[2], moved if name == "offset" else nn.Parameter(moved))
    with pytest.raises(ReplayError, match=f"capture: {re.escape(name)} from"):
        step(runner, -(-places // 3))


def test_debug_looks_at_all_before_each_replay(device) -> None:
    runner, net = make(device, debug="checks")
    step(runner)
    net.offset = fresh(net.offset)
    with pytest.raises(ReplayError, match="offset from"):
        step(runner)


def test_what_counts_is_the_capture(device) -> None:
    runner, net = make(device)
    assign_state(net)
    runner.release()
    runner.check_addresses()  # no graph reads anything
    assign_state(net)
    runner.capture()
    step(runner, 10)
    rebind(net)
    with pytest.raises(ReplayError, match="layers.0.weight from"):
        step(runner, 10)


def test_new_values_in_the_old_memory_are_no_move(device) -> None:
    runner, net = make(device)
    before = step(runner)
    net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})
    assert not torch.equal(step(runner, 10), before)


def test_another_object_over_the_same_memory_is_no_move(device) -> None:
    runner, net = make(device)
    net.scale = nn.Parameter(net.scale.data)
    net.layers = nn.Sequential(*net.layers)
    step(runner, 20)
    net.layers[0].bias.data = fresh(net.layers[0].bias)  # reached through the new objects
    with pytest.raises(ReplayError, match="layers.0.bias from"):
        step(runner, 10)


def test_a_refused_step_changes_nothing(device) -> None:
    runner, net = make(device, debug="checks")
    runner(x=torch.zeros(2, 3))
    net.offset = fresh(net.offset)
    with pytest.raises(ReplayError):
        runner(x=torch.ones(2, 3))
    assert runner.buffers["x"].eq(0).all() and runner.stats.steps == 1


def test_an_eager_step_reads_names_and_is_not_refused(device) -> None:
    runner, net = make(device)
    rebind(net)
    net.offset = fresh(net.offset) + 5
    out = runner(x=torch.ones(4, 3))  # above the ladder
    assert out.mode is Mode.EAGER and torch.equal(out.output, net(torch.ones(4, 3, device=device)).detach())


def test_a_rebound_tensor_lives_as_long_as_its_graph(device) -> None:
    runner, net = make(device)
    old = weakref.ref(net.layers[0].weight)
    rebind(net)
    gc.collect()
    assert old() is not None
    runner.release()
    gc.collect()
    assert old() is None


def test_several_modules_have_names_of_their_own(device) -> None:
    runner, net = make(device)
    draft = nn.Linear(2, 2, device=device)
    runner.watch(net, "again")  # known already
    with pytest.raises(ConfigError, match="another module or mapping is watched as ''"):
        runner.watch(draft)
    runner.watch(draft, "draft")
    draft.bias = nn.Parameter(fresh(draft.bias))
    with pytest.raises(ReplayError, match="capture: draft.bias from"):
        step(runner, 10)


def test_tied_tensors_are_named_by_both_names() -> None:
    net = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
    net["head"].weight = net["embed"].weight
    audit = AddressAudit()
    audit.watch(net, "model", captured=True)
    net["head"].weight.data = fresh(net["head"].weight)
    with pytest.raises(ReplayError, match="model.embed.weight from .* model.head.weight from"):
        audit.glance()


def test_parameters_without_memory_are_passed_over() -> None:
    audit = AddressAudit()
    audit.watch(nn.ModuleList([nn.LazyLinear(2), nn.Linear(2, 2, bias=False), nn.ReLU()]), "", captured=True)
    for _ in range(5):
        audit.glance()
    audit.sweep()


def audit_of(*targets, captured: bool = True) -> AddressAudit:
    audit = AddressAudit()
    for number, target in enumerate(targets):
        audit.watch(target, f"t{number}", captured=captured)
    if not captured:
        audit.remember()
    return audit


class Cache:
    """Holds its tensors as plain attributes."""

    def __init__(self, device) -> None:
        self.keys, self.values, self.blocks = torch.zeros(4, device=device), torch.zeros(4, device=device), 7


@pytest.mark.parametrize("captured", [True, False])
def test_a_rebound_plain_tensor_is_refused_by_name(device, captured: bool) -> None:
    cache = Cache(device)
    audit = audit_of(vars(cache), captured=captured)
    cache.keys.add_(1)
    cache.blocks = 8  # no tensor, no matter
    audit.glance()
    was = f"{cache.keys.device} {cache.keys.data_ptr():#x}"
    cache.keys = torch.zeros(4, device=device)
    for look in (audit.sweep, audit.glance):
        with pytest.raises(ReplayError, match=rf"capture: t0\.keys from {was} to .* {cache.keys.data_ptr():#x};"):
            look()
    audit.forget()
    audit.sweep()


@pytest.mark.parametrize("move", [dict.clear, lambda d: d.update(k=None), lambda d: d.update(k=fresh(d["k"]))])
def test_a_mapping_that_loses_its_tensor(device, move) -> None:
    state = {"k": torch.zeros(2, device=device)}
    audit, held = audit_of(state), state["k"]
    state["other"] = torch.zeros(2, device=device)  # later ones are none of the graphs'
    audit.glance()
    move(state)
    with pytest.raises(ReplayError, match=r"capture: t0\.k from "):
        audit.glance()
    state["k"] = held
    audit.glance()


@pytest.mark.parametrize("target", [None, torch.ones(2), [torch.ones(2)]])
def test_what_cannot_be_watched(target) -> None:
    with pytest.raises(ConfigError, match=f"watch: .* is watched, not {type(target).__name__}"):
        audit_of(target)


@pytest.mark.parametrize(
    ("state", "says"),
    [({"a": [1]}, "state a: a tensor is needed, not list"), (torch.ones(2), "state: a mapping .*, not Tensor")],
)
def test_a_state_is_made_of_tensors(state, says: str) -> None:
    buffers = StaticBuffers(max_requests=1, slots=[Slot("x", torch.float32, "request", PaddingPolicy.ZERO)])
    with pytest.raises(ConfigError, match=says):
        GraphRunner(lambda x: x, buffers, GraphConfig(), state=state)


def test_a_mapping_and_a_module_share_no_name() -> None:
    audit = audit_of({})
    with pytest.raises(ConfigError, match="another module or mapping is watched as 't0'"):
        audit.watch(nn.Linear(1, 1), "t0", captured=False)


@pytest.mark.parametrize("captured", [True, False])
def test_a_watched_workspace_is_locked_while_there_are_graphs(device, captured: bool) -> None:
    workspace = Workspace(device)
    workspace.get("partials", (4,), torch.float32)
    audit = audit_of(workspace, workspace, captured=captured)
    with pytest.raises(ReplayError, match="partials wants 32 bytes"):
        workspace.get("partials", (8,), torch.float32)
    audit.glance()
    audit.sweep()
    audit.forget()
    audit.forget()
    workspace.get("partials", (8,), torch.float32)
    audit.remember()
    audit.glance()
    assert workspace.locked


def test_a_workspace_of_two_runners_stays_locked_until_both_have_released() -> None:
    workspace = Workspace("cpu")
    first, second = audit_of(workspace), audit_of(workspace)
    first.forget()
    assert workspace.locked
    second.forget()
    assert not workspace.locked


def test_a_workspace_that_moved_all_the_same_is_refused_by_name(device) -> None:
    workspace, rest = Workspace(device), nn.ModuleList(nn.Linear(1, 1, device=device) for _ in range(9))
    workspace.get("partials", (4,), torch.float32)
    audit = audit_of(rest, workspace)
    workspace.unlock()
    workspace.get("partials", (8,), torch.float32)
    for look in (audit.glance, audit.sweep):  # at once, however many tensors there are
        with pytest.raises(ReplayError, match="capture: workspace t1 from generation 0 to 1"):
            look()


@pytest.mark.gpu
def test_a_glance_is_cheap() -> None:
    """At most 1 µs a replay, for as many tensors as an 8B model has, a cache and two workspaces."""
    audit = AddressAudit()
    net = nn.ModuleList(nn.ModuleDict({f"w{i}": nn.Linear(8, 8, device="cuda") for i in range(5)}) for _ in range(32))
    audit.watch(net, "", captured=True)
    audit.watch({f"layer{i}": torch.zeros(2, device="cuda") for i in range(32)}, "cache", captured=True)
    for name in ("attention", "gemm"):
        audit.watch(Workspace("cuda"), name, captured=True)
    runs = timeit.repeat(audit.glance, number=10_000, repeat=7)
    assert statistics.median(runs) / 10_000 < 1e-6
