"""Breakable recordings, on both platforms; what only the tape or only a GPU can show stands at the end."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stepgraph.runtime.breaks import graph_break
from stepgraph.runtime.errors import CaptureError, ReplayError
from stepgraph.runtime.platforms import Platform, platform_for
from stepgraph.runtime.regions import region


@pytest.fixture
def platform(device: torch.device) -> Platform:
    return platform_for(device)


def record(platform: Platform, step, **options):
    with torch.no_grad():
        platform.warm_up(step)
        recording, result = platform.record_breakable(step, platform.new_pool(), **options)
    platform.synchronize()
    return recording, result


@graph_break
def scale(x: torch.Tensor) -> torch.Tensor:
    """Reads the host's copy of a value, which no graph could."""
    return x * (2 if x.sum().item() > 0 else -3)


def test_parity_with_eager_once_the_inputs_have_changed(platform: Platform) -> None:
    x, weight = torch.randn(3, 4, device=platform.device), torch.randn(4, 4, device=platform.device)

    def step() -> torch.Tensor:
        return scale(scale(x @ weight).relu() + x).sin()

    recording, out = record(platform, step)
    torch.testing.assert_close(out, step(), msg="the recording itself ran the step")
    for fill in (1.0, -1.0, 0.5):
        x.fill_(fill)
        recording.replay()
        torch.testing.assert_close(out, step())
    assert [(b.name, b.calls) for b in recording.breaks] == [("scale", 3)] * 2
    assert all(b.host_seconds > 0 for b in recording.breaks)


def test_the_steps_python_runs_at_breaks_only(platform: Platform) -> None:
    x, calls = torch.ones(2, device=platform.device), []
    note = graph_break(lambda t: calls.append("break"))

    def step() -> torch.Tensor:
        calls.append("step")
        y = x + 1
        note(y)
        return y * 2

    recording, _ = record(platform, step)
    calls.clear()
    recording.replay()
    assert calls == ["break"]


def test_results_lie_at_the_same_places(platform: Platform) -> None:
    x, seen = torch.ones(4, device=platform.device), []

    @graph_break
    def several(a: torch.Tensor) -> dict:
        return {"twice": a * 2, "more": (a + 1, None, "text"), "turned": a.view(2, 2).t() * 1}

    def step() -> torch.Tensor:
        result = several(x + 0)
        seen[:] = [result["twice"], result["more"][0]]
        return result["twice"] + result["more"][0] + result["turned"].reshape(4)

    recording, out = record(platform, step)
    places = [t.data_ptr() for t in (*seen, out)]
    for value in (3.0, 5.0):
        x.fill_(value)
        recording.replay()
        assert out.tolist() == [4 * value + 1] * 4
    assert places == [t.data_ptr() for t in (*seen, out)]


def test_a_break_may_write_its_arguments_and_return_them(platform: Platform) -> None:
    x, out = torch.ones(3, device=platform.device), torch.zeros(3, device=platform.device)

    @graph_break
    def into(a: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        target.copy_(a)
        return target

    def step() -> torch.Tensor:
        same = into(x * 2, out)
        same.add_(1)
        return same

    recording, result = record(platform, step)
    assert result is out
    x.fill_(4)
    recording.replay()
    assert out.tolist() == [9] * 3


def test_what_a_break_reads_by_itself_is_read_afresh(platform: Platform) -> None:
    x, live = torch.ones(3, device=platform.device), {"factor": 2}
    scaled = graph_break(lambda t, context: t * context["factor"] * live["factor"], name="live")
    context = type("Context", (dict,), {})(factor=1)
    recording, out = record(platform, lambda: scaled(x + 0, context) + 0)
    live["factor"], context["factor"] = 5, 3
    recording.replay()
    assert out.tolist() == [15] * 3


CHANGES = {
    "shape": lambda t: t[:1],
    "dtype": lambda t: t.double(),
    "structure": lambda t: (t, t),
    "nothing": lambda t: None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_result_that_does_not_fit_is_refused(platform: Platform, change: str) -> None:
    x, after = torch.ones(3, device=platform.device), []
    moody = graph_break(lambda t: CHANGES[change](t + 1) if after else t + 1, name="moody")
    recording, _ = record(platform, lambda: moody(x) * 2)
    recording.replay()
    after.append(True)
    with pytest.raises(ReplayError, match="break moody: returned"):
        recording.replay()


def test_a_plain_value_that_changes_is_refused(platform: Platform) -> None:
    x = torch.ones(3, device=platform.device)
    count = graph_break(lambda t: (t + 1, int(t.sum().item())), name="count")

    def step() -> torch.Tensor:
        y, number = count(x)
        return y * number

    recording, _ = record(platform, step)
    recording.replay()
    x.fill_(2)
    with pytest.raises(ReplayError, match="break count: returned 6 where the recording had 3"):
        recording.replay()


def test_equal_plain_values_are_equal_at_every_replay(platform: Platform) -> None:
    x, numbers = torch.ones(3, device=platform.device), {1, 2}

    def plain(t: torch.Tensor) -> tuple:
        arrays = np.array([1.0, np.nan]), np.int64(3), np.float32(np.nan)
        return t + 1, float("nan"), 2j, -0.0, range(3), slice(1, None), set(numbers), arrays, torch.float16, None, b"x"

    recording, out = record(platform, lambda: graph_break(plain)(x)[0] * 2)
    x.fill_(2)
    recording.replay()
    assert out.tolist() == [6] * 3


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (np.int64(1), np.int64(2)),
        (np.ones(2), np.zeros(2)),
        (np.ones(2), np.ones(2, dtype=np.float32)),
        (np.ones(2), np.ones(3)),
        (1, True),
        (0.0, -0.0),
        (float("nan"), 1.0),
        (1j, 2j),
        (range(2), range(3)),
        (slice(2), slice(3)),
        ({1}, {2}),
        (None, 1),
        ("a", "b"),
        (torch.float16, torch.float32),
    ],
)
def test_a_plain_value_of_any_kind_that_changes_is_refused(platform: Platform, before, after) -> None:
    x, value = torch.ones(3, device=platform.device), [before]
    plain = graph_break(lambda t: (t + 1, value[0]), name="plain")
    recording, _ = record(platform, lambda: plain(x)[0] * 2)
    recording.replay()
    value[0] = after
    with pytest.raises(ReplayError, match="break plain: returned .* where the recording had"):
        recording.replay()


@pytest.mark.parametrize("change", [lambda a, s: a.fill(7), lambda a, s: s.add(7)])
def test_a_plain_value_that_changes_in_place_is_refused(platform: Platform, change) -> None:
    x, array, numbers = torch.ones(3, device=platform.device), np.ones(2), {1}
    plain = graph_break(lambda t: (t + 1, array, numbers), name="plain")
    recording, _ = record(platform, lambda: plain(x)[0] * 2)
    recording.replay()
    change(array, numbers)
    with pytest.raises(ReplayError, match="break plain: returned"):
        recording.replay()


def test_an_object_that_cannot_be_compared_is_refused_unless_it_is_an_argument(platform: Platform) -> None:
    x, context = torch.ones(3, device=platform.device), SimpleNamespace(factor=2)
    opaque = graph_break(lambda t, c: (t * c.factor, c), name="opaque")
    recording, out = record(platform, lambda: opaque(x, context)[0] + 1)
    x.fill_(2)
    recording.replay()
    assert out.tolist() == [5] * 3
    for result in (SimpleNamespace(), np.array([None]), slice(x, None)):
        other = graph_break(lambda t, r=result: (t + 1, r), name="other")
        with pytest.raises(CaptureError, match=r"break other: returns a \w+, which a replay could not compare"):
            platform.record_breakable(lambda f=other: f(x)[0] * 2, platform.new_pool())


ARGUMENT_OR_NOT = {
    "its argument or a new tensor": lambda a, b, other: (a.clamp(max=1) if other else a, b),
    "a new tensor or its argument": lambda a, b, other: (a if other else a.clamp(max=1), b),
    "one argument or the other": lambda a, b, other: (b, a) if other else (a, b),
    "another part of it": lambda a, b, other: (a[1:] if other else a[:-1], b),
    "one tensor or two": lambda a, b, other: (a + 1, b + 1) if other else (a + 1,) * 2,
    "two tensors or one": lambda a, b, other: (a + 1,) * 2 if other else (a + 1, b + 1),
    "other parts": lambda a, b, other: (z := a + 1, z[1:] if other else z[:-1]),
}


@pytest.mark.parametrize("change", ARGUMENT_OR_NOT)
def test_results_in_other_memory_than_recorded_are_refused(platform: Platform, change: str) -> None:
    """The step may write to one of them, or read an argument afterwards."""
    x, y = torch.ones(3, device=platform.device), torch.zeros(3, device=platform.device)
    moody = graph_break(lambda a, b: ARGUMENT_OR_NOT[change](a, b, bool((a > 1).any())), name="moody")

    def step() -> torch.Tensor:
        a, b = x * 1, y * 1
        first, second = moody(a, b)
        return torch.cat((first + 10 * a[: len(first)], second + 10 * b[: len(second)]))

    recording, out = record(platform, step)
    recording.replay()
    torch.testing.assert_close(out, step())
    x.copy_(torch.tensor([3.0, 4.0, 0.0]))
    with pytest.raises(ReplayError, match="break moody: returned .* the same at every replay"):
        recording.replay()


def test_a_copy_of_the_argument_may_take_its_place(platform: Platform) -> None:
    x = torch.ones(2, device=platform.device)
    clamp = graph_break(lambda t: t.clone() if not bool((t > 1).any()) else t.clamp(max=1))

    def step() -> torch.Tensor:
        h = x * 1
        return clamp(h) + 10 * h

    recording, out = record(platform, step)
    x.copy_(torch.tensor([3.0, 4.0]))
    recording.replay()
    assert out.tolist() == [31, 41]


def test_results_that_share_memory_go_on_sharing_it(platform: Platform) -> None:
    x = torch.ones(4, 6, device=platform.device)

    @graph_break
    def several(t: torch.Tensor) -> dict:
        z = t + 1
        q, k = z.chunk(2, dim=-1)
        return {
            **{"whole": z, "head": z[:2], "again": z, "q": q, "k": k, "last": z[-1, -1:]},
            **{"wide": z[:1].expand(4, 6), "bits": z.view(torch.int32)[1:], "none": z[:0]},
        }

    def step() -> dict:
        r = several(x)
        assert r["whole"] is r["again"]
        r["head"].add_(10)
        r["last"].zero_()
        return {name: value + 0 for name, value in r.items()}

    recording, out = record(platform, step)
    for fill in (2.0, -3.0):
        x.copy_(torch.arange(24.0).view(4, 6) + fill)
        recording.replay()
        for name, value in step().items():
            torch.testing.assert_close(out[name], value)
    whole, places = platform.record_eager(lambda: {"whole": (z := x * 2), "head": z[:2]})
    x.fill_(4)
    whole.replay()
    assert places["head"].eq(8).all() and places["head"].data_ptr() == places["whole"].data_ptr()


def test_what_shares_memory_and_is_more_than_strides_is_refused(platform: Platform) -> None:
    x = torch.ones(3, device=platform.device)
    turned = graph_break(lambda t: (z := torch.complex(t, t), z.conj()), name="turned")
    with pytest.raises(CaptureError, match="break turned: returns a Tensor that shares its memory"):
        platform.record_breakable(lambda: turned(x)[1] + 1, platform.new_pool())


def test_an_error_in_a_break_keeps_its_type_and_names_the_break(platform: Platform) -> None:
    x, failing = torch.ones(3, device=platform.device), []

    @graph_break
    def fragile(t: torch.Tensor) -> torch.Tensor:
        if failing:
            raise failing[0]
        return t + 1

    def step() -> torch.Tensor:
        return fragile(x * 2) * 2

    recording, out = record(platform, step)
    name = "test_an_error_in_a_break_keeps_its_type_and_names_the_break.<locals>.fragile"
    for attempt in (recording.replay, lambda: platform.record_breakable(step, platform.new_pool())):
        failing[:] = [KeyError("mine")]
        with pytest.raises(KeyError, match="mine") as caught:
            attempt()
        assert caught.value.__notes__ == [f"in the break {name} of a breakable recording"]
        failing[:] = [ReplayError("mine")]
        with pytest.raises(ReplayError, match=f"break {name}: mine"):
            attempt()
    failing.clear()
    x.fill_(5)
    recording.replay()
    assert out.tolist() == [22] * 3
    again, out = record(platform, step)
    again.replay()
    assert out.tolist() == [22] * 3


def test_a_break_whose_error_the_step_catches_is_refused(platform: Platform) -> None:
    x = torch.ones(3, device=platform.device)

    @graph_break
    def broken(t: torch.Tensor) -> None:
        raise KeyError

    def step() -> torch.Tensor:
        with contextlib.suppress(KeyError):
            broken(x)
        return scale(x) + 1

    with pytest.raises(CaptureError, match=r"broken failed and the step went on"):
        platform.record_breakable(step, platform.new_pool())
    recording, out = record(platform, lambda: scale(x) + 1)
    recording.replay()
    assert out.tolist() == [3] * 3


def test_a_break_that_reshapes_its_argument_is_refused(platform: Platform) -> None:
    x = torch.ones(2, 3, device=platform.device)
    turn = graph_break(lambda t: t.t_(), name="turn")
    with pytest.raises(CaptureError, match="break turn: gives an argument another shape"):
        platform.record_breakable(lambda: turn(x + 1), platform.new_pool())


def test_breaks_inside_breaks_are_part_of_the_outer_one(platform: Platform) -> None:
    x = torch.ones(3, device=platform.device)
    outer = graph_break(lambda t: scale(t + 1) + 1, name="outer")
    recording, out = record(platform, lambda: outer(x * 2) * 2)
    x.fill_(2)
    recording.replay()
    assert out.tolist() == [22] * 3 and [b.name for b in recording.breaks] == ["outer"]


def test_a_full_recording_records_breaks_too(platform: Platform) -> None:
    x, calls = torch.ones(3, device=platform.device), []
    counted = graph_break(lambda t: calls.append(1) or t * 2)
    with torch.no_grad():
        platform.warm_up(lambda: counted(x) + 1)
        recording, out = platform.record(lambda: counted(x) + 1, platform.new_pool())
    before = len(calls)
    x.fill_(4)
    recording.replay()
    assert out.tolist() == [9] * 3 and len(calls) == before


def test_a_step_that_begins_ends_and_repeats_with_breaks(platform: Platform) -> None:
    x = torch.ones(3, device=platform.device)
    for step in (lambda: scale(x), lambda: scale(scale(x)), lambda: scale(scale(x) + 1)):
        recording, out = record(platform, step)
        x.fill_(2)
        recording.replay()
        torch.testing.assert_close(out, step())
        x.fill_(1)


def test_an_undecorated_host_read_is_refused_with_its_line(platform: Platform) -> None:
    x = torch.ones(3, device=platform.device)

    def undecorated(t: torch.Tensor) -> torch.Tensor:
        return t * t.sum().item()

    with pytest.raises(CaptureError, match=r"test_breakable.py:\d+ in undecorated"):
        platform.record_breakable(lambda: undecorated(scale(x) + 1), platform.new_pool())
    recording, out = record(platform, lambda: scale(x) + 1)
    recording.replay()
    assert out.tolist() == [3] * 3


def test_recorded_in_inference_mode_and_replayed_outside(platform: Platform) -> None:
    x = torch.ones(3, device=platform.device)

    @torch.inference_mode()
    def step() -> torch.Tensor:
        return scale(x * 2).add_(1)

    recording, out = record(platform, step)
    x.fill_(3)
    recording.replay()
    assert out.tolist() == [13] * 3


def test_random_numbers_advance_in_segments_and_breaks(platform: Platform) -> None:
    noise = graph_break(lambda t: torch.rand_like(t) + t, name="noise")
    recording, out = record(platform, lambda: noise(torch.rand(64, device=platform.device)) + 0)
    draws = []
    for _ in range(3):
        recording.replay()
        draws.append(out.clone())
    assert not torch.equal(draws[0], draws[1]) and not torch.equal(draws[1], draws[2])


def test_two_recordings_of_a_pool(platform: Platform) -> None:
    x, pool = torch.ones(8, 100, device=platform.device), platform.new_pool()
    with torch.no_grad():
        made = [platform.record_breakable(lambda n=n: scale(x[:n] + 1).sum(dim=1), pool) for n in (8, 3)]
    for value in (2.0, 4.0):
        x.fill_(value)
        for recording, out in made:
            recording.replay()
            assert set(out.tolist()) == {(value + 1) * 200}


def test_every_operator_as_a_break(platform: Platform) -> None:
    x, total = torch.ones(2, 3, device=platform.device), torch.zeros((), device=platform.device)

    def step() -> torch.Tensor:
        y = x.t() @ x
        y.t_()
        y[0].add_(1)
        total.add_(y.sum())
        return scale(y).relu()

    recording, out = record(platform, step, every_op=True)
    names = [b.name for b in recording.breaks]
    assert names[0] == "aten.mm.default" and names[-2:] == ["scale", "aten.relu.default"]
    assert not recording.num_nodes
    total.zero_()
    x.fill_(2)
    recording.replay()
    assert total.item() == 75
    torch.testing.assert_close(out, step())


def test_host_reads_are_refused_where_every_operator_is_a_break(platform: Platform) -> None:
    x = torch.ones(3, device=platform.device)
    with pytest.raises(CaptureError, match=r"_local_scalar_dense|Tensor.item"):
        platform.record_breakable(lambda: x * x.sum().item(), platform.new_pool(), every_op=True)


def test_the_whole_step_as_a_break(platform: Platform) -> None:
    x, calls = torch.ones(3, device=platform.device), []

    def step() -> dict:
        calls.append(1)
        return {"doubled": x * 2, "same": x}

    with torch.no_grad():
        recording, out = platform.record_eager(step)
    places = [t.data_ptr() for t in out.values()]
    x.fill_(x.sum().item())
    recording.replay()
    assert out["doubled"].tolist() == [6] * 3 and out["same"].tolist() == [3] * 3 and len(calls) == 2
    assert places == [t.data_ptr() for t in out.values()]
    assert [b.name for b in recording.breaks] == ["step"] and recording.num_nodes == 0


def test_nodes_and_regions_go_on_from_segment_to_segment(platform: Platform) -> None:
    if platform.name == "cuda":
        pytest.importorskip("cuda.bindings.driver")
    x = torch.ones(4, device=platform.device)

    def step() -> torch.Tensor:
        y = x + 1
        with region("layer"):
            y = y * 2
            with region("attention"):
                y = scale(y * 3)
                y = y - 1
            y = y * 4
        y = scale(y)
        return y.neg()

    recording, _ = record(platform, step)
    nodes = recording.nodes()
    assert [n.region for n in nodes] == ["", "layer", "layer/attention", "layer/attention", "layer", ""]
    assert [n.index for n in nodes] == list(range(6)) and recording.num_nodes == 6
    assert all(d.node < n.index for n in nodes for d in n.after)


def test_costs_by_break(platform: Platform) -> None:
    x = torch.ones(1000, device=platform.device)
    recording, _ = record(platform, lambda: scale(graph_break(torch.sin, name="sin")(x + 1) * 2))
    recording.replay()
    costs = recording.measure(3)
    assert [c.name for c in costs] == ["sin", "scale"] and [b.calls for b in recording.breaks] == [1, 1]
    assert all(c.host_us > 0 and c.busy_us > 0 and c.idle_us >= 0 for c in costs)
    if platform.name == "tape":
        assert all(c.idle_us == 0 for c in costs)
    whole, _ = platform.record_eager(lambda: x + 1)
    assert [c.name for c in whole.measure(2)] == ["step"]
    unbroken, _ = record(platform, lambda: x + 1)
    assert unbroken.measure(2) == []


def test_a_released_recording(platform: Platform) -> None:
    x = torch.ones(3, device=platform.device)
    recording, _ = record(platform, lambda: scale(x + 1) * 2)
    recording.release()
    for refused in (recording.replay, recording.measure):
        with pytest.raises(ReplayError, match="released"):
            refused()
    with pytest.raises(CaptureError, match="released"):
        recording.nodes()
    assert recording.breaks == []


class TestHiddenTensors:
    """On the tape only: a tensor that a break makes for itself and a segment reads."""

    platform = platform_for("cpu")

    def refused(self, step, line: str) -> None:
        pattern = rf"break hide \(test_breakable.py:\d+ in .*\).* \(at test_breakable.py:\d+ in {line}"
        with pytest.raises(CaptureError, match=pattern):
            self.platform.record_breakable(step, None)

    @pytest.mark.parametrize(
        "make", [lambda t: t * 2, lambda t: torch.empty(3), lambda t: torch.tensor([1.0]), lambda t: (t + 1).view(3)]
    )
    def test_it_is_named_with_both_lines(self, make) -> None:
        x, hidden = torch.ones(3), []
        hide = graph_break(lambda t: hidden.append(make(t)), name="hide")

        def step() -> torch.Tensor:
            hide(x)
            return hidden[-1][:1] + 1

        self.refused(step, "step")

    def test_what_a_break_returned_has_another_place(self) -> None:
        x, hidden = torch.ones(3), []

        def make(t: torch.Tensor) -> torch.Tensor:
            hidden.append(t * 2)
            return hidden[-1]

        hide = graph_break(make, name="hide")
        self.refused(lambda: hide(x) + hidden[-1], "<lambda>")

    def test_as_an_argument_of_a_later_break(self) -> None:
        x, hidden = torch.ones(3), []
        hide = graph_break(lambda t: hidden.append(t * 2), name="hide")

        def step() -> torch.Tensor:
            hide(x)
            return scale(hidden[-1])

        self.refused(step, "step")

    def test_breaks_may_share_what_they_make(self) -> None:
        x, shared = torch.ones(3), []
        write = graph_break(lambda t: shared.append(t * 2), name="write")
        read = graph_break(lambda: shared.pop() + 1, name="read")

        def step() -> torch.Tensor:
            write(x)
            return read() * 2

        recording, out = record(self.platform, step)
        x.fill_(2)
        recording.replay()
        assert out.tolist() == [10] * 3


@pytest.mark.gpu
class TestOnTheDevice:
    @pytest.fixture
    def platform(self) -> Platform:
        return platform_for("cuda")

    def test_the_pool_does_not_grow_with_the_number_of_breaks(self, platform: Platform) -> None:
        x = torch.ones(1 << 20, device="cuda")

        def layers(number: int) -> torch.Tensor:
            y = x + 1
            for _ in range(number):
                y = scale(y * 2) - 1
            return y.sum()

        def pool_bytes(number: int) -> tuple[int, int]:
            platform.warm_up(lambda: layers(number))
            before, pool = torch.cuda.memory_allocated(), platform.new_pool()
            recording, _ = platform.record_breakable(lambda: layers(number), pool)
            torch.cuda.synchronize()
            assert len(recording.breaks) == number
            held = torch.cuda.memory_allocated() - before
            return sum(segment["total_size"] for segment in torch.cuda.memory_snapshot(pool)), held

        few, many = pool_bytes(3), pool_bytes(24)
        assert many[0] == few[0] and many[1] <= few[1] + (1 << 16)

    def test_memory_that_later_segments_reuse(self, platform: Platform) -> None:
        x = torch.ones(1 << 20, device="cuda")

        def step() -> torch.Tensor:
            y = x
            for _ in range(6):
                y = scale(y + 1)
                y = (y * 0.5).sin() + y * 0.25
            return y

        recording, out = record(platform, step)
        for fill in (0.25, -3.0):
            x.fill_(fill)
            for _ in range(2):
                recording.replay()
            torch.testing.assert_close(out, step())

    @pytest.mark.parametrize("how", ["full", "at a break", "at the end"])
    def test_a_side_stream_left_behind_is_named(self, platform: Platform, how: str) -> None:
        x, side = torch.ones(1000, device="cuda"), torch.cuda.Stream()
        y = torch.zeros(1000, device="cuda")

        def fork(*, join: bool) -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.add(x, 1, out=y)
            if join:
                torch.cuda.current_stream().wait_stream(side)

        def step(*, join: bool) -> torch.Tensor:
            z = x * 2
            fork(join=join or how == "at the end")
            z = scale(z) if how != "full" else z * 2
            if how == "at the end":
                fork(join=join)
            return z + 1

        way = platform.record if how == "full" else platform.record_breakable
        platform.warm_up(lambda: step(join=True))
        for _ in range(2):
            with pytest.raises(CaptureError, match=rf"cuda_stream={side.cuda_stream:#x}.*left behind"):
                way(lambda: step(join=False), platform.new_pool())
            assert not torch.cuda.is_current_stream_capturing()
            with torch.cuda.stream(side):
                assert not torch.cuda.is_current_stream_capturing()
                y.zero_()
            torch.cuda.synchronize()
            recording, out = way(lambda: step(join=True), platform.new_pool())
            recording.replay()
            torch.cuda.synchronize()
            assert y[0].item() == 2 and out[0].item() == 5

    def test_side_streams_that_rejoin_may_run_on_in_later_segments(self, platform: Platform) -> None:
        x, side = torch.ones(1000, device="cuda"), torch.cuda.Stream()

        def step() -> torch.Tensor:
            y = x * 2
            for _ in range(2):
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    z = x + 1
                w = y * 2
                torch.cuda.current_stream().wait_stream(side)
                y = scale(w + z) + 1
            return y

        recording, out = record(platform, step)
        x.fill_(3)
        recording.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out, step())

    @pytest.mark.filterwarnings("error")
    def test_empty_segments_warn_of_nothing(self, platform: Platform) -> None:
        x = torch.ones(3, device="cuda")
        recording, out = record(platform, lambda: scale(scale(x)))
        recording.replay()
        assert out.tolist() == [4] * 3 and len(recording._parts) == 2

    def test_a_replay_on_another_stream(self, platform: Platform) -> None:
        x, other = torch.ones(1000, device="cuda"), torch.cuda.Stream()
        recording, out = record(platform, lambda: scale(x + 1) * 2)
        x.fill_(2)
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            recording.replay()
        other.synchronize()
        assert out[0].item() == 12

    def test_an_idle_device_shows_in_the_costs(self, platform: Platform) -> None:
        x = torch.ones(1000, device="cuda")

        @graph_break
        def dawdle(t: torch.Tensor) -> torch.Tensor:
            for _ in range(20):
                t = t + 1
            total = sum(range(200_000))  # milliseconds of host time
            return t * (1 if total else 0)

        recording, _ = record(platform, lambda: dawdle(x + 1) * 2)
        (cost,) = recording.measure(5)
        assert cost.host_us > 1000 and cost.idle_us > 500 and cost.busy_us < 500
