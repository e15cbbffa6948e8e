"""Step buffers: what each policy leaves in the tail, who owns what, and that addresses never move."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.runtime import BatchDescriptor, ConfigError, InputError, PaddingPolicy, Slot, StaticBuffers

POISON = 77
SOME = [Slot("x", torch.int64, "request", PaddingPolicy.ZERO)]


def one_slot(policy: PaddingPolicy, device: torch.device | str = "cpu", **kwargs) -> StaticBuffers:
    return StaticBuffers(max_requests=16, device=device, slots=[Slot("x", torch.int64, "request", policy, **kwargs)])


def stage(buffers: StaticBuffers, real: int, padded: int, **inputs) -> None:
    buffers.stage(BatchDescriptor.decode(real), BatchDescriptor.decode(padded), inputs)


@pytest.mark.parametrize(
    ("policy", "kwargs", "tail"),
    [
        (PaddingPolicy.ZERO, {}, 0),
        (PaddingPolicy.FILL_SENTINEL, {"pad_value": 5}, 5),
        (PaddingPolicy.KEEP_PAD, {}, POISON),
        (PaddingPolicy.FOREACH_COPY, {}, POISON),
        (PaddingPolicy.FILL_ONCE, {"pad_value": 9}, POISON),
    ],
)
def test_tail_after_a_larger_batch(policy, kwargs, tail, device) -> None:
    buffers = one_slot(policy, device, **kwargs)
    stage(buffers, 8, 8, x=[POISON] * 8)
    stage(buffers, 3, 8, x=[1, 2, 3])
    assert buffers["x"][:8].tolist() == [1, 2, 3] + [tail] * 5


def test_fill_once_keeps_its_value_where_no_head_was_written(device) -> None:
    buffers = one_slot(PaddingPolicy.FILL_ONCE, device, pad_value=9)
    stage(buffers, 3, 8, x=[1, 2, 3])
    assert buffers["x"][:8].tolist() == [1, 2, 3, 9, 9, 9, 9, 9]


@pytest.mark.parametrize("source", ["device", "host"])
@given(steps=st.lists(st.tuples(st.integers(1, 16), st.integers(0, 8)), min_size=1, max_size=12))
@settings(deadline=None, max_examples=40)
def test_resetting_policies_leave_no_stale_row(source: str, steps: list[tuple[int, int]]) -> None:
    buffers = StaticBuffers(
        max_requests=16,
        slots=[
            Slot("zero", torch.int32, "request", PaddingPolicy.ZERO),
            Slot("sentinel", torch.int64, "request", PaddingPolicy.FILL_SENTINEL, pad_value=-1),
            Slot("owned", torch.int64, "request", PaddingPolicy.ZERO, owner="device"),
        ],
    )
    for real, extra in steps:
        padded = min(real + extra, 16)
        given_rows = torch.full((real,), POISON) if source == "device" else [POISON] * real
        stage(buffers, real, padded, zero=given_rows, sentinel=given_rows)
        assert buffers["zero"][real:padded].eq(0).all() and buffers["zero"][:real].eq(POISON).all()
        assert buffers["sentinel"][real:padded].eq(-1).all()
        assert buffers["owned"].eq(0).all()
        buffers["owned"][:real] = POISON  # the step advances its own rows; joins and leaves must not see them
        if real > 1:
            stage(buffers, real - 1, padded, zero=[1] * (real - 1), sentinel=[1] * (real - 1))
            stage(buffers, real, padded, zero=[1] * real, sentinel=[1] * real)
            assert buffers["owned"][real - 1] == 0
        buffers["owned"].zero_()


def test_a_row_that_joins_keeps_its_patch(device) -> None:
    buffers = one_slot(PaddingPolicy.ZERO, device, owner="device")
    buffers.patch([0], x=[3])
    stage(buffers, 1, 2)
    buffers.patch([1], x=[4])
    stage(buffers, 2, 2)
    assert buffers["x"][:3].tolist() == [3, 4, 0]


def test_device_slots_keep_no_stale_row_however_they_are_written() -> None:
    buffers = one_slot(PaddingPolicy.ZERO, owner="device")
    stage(buffers, 8, 8, x=range(1, 9))
    stage(buffers, 3, 4, x=[1, 2, 3])
    stage(buffers, 5, 8)
    assert buffers["x"][:8].tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    buffers.patch([7], x=[77])  # no request comes to stand there
    stage(buffers, 6, 8)
    assert buffers["x"][:8].tolist() == [1, 2, 3, 0, 0, 0, 0, 0]


def test_padded_rows_of_a_device_slot_are_the_steps(device) -> None:
    """It must leave them alone, with a mask, where another value could do harm: they are not reset again."""
    buffers = one_slot(PaddingPolicy.ZERO, device, owner="device")
    for advanced in (1, 2):
        stage(buffers, 1, 4)
        buffers["x"][:4].add_(1)
        assert buffers["x"][:5].tolist() == [advanced] * 4 + [0]
    stage(buffers, 3, 4)  # these two join without a patch
    assert buffers["x"][:4].tolist() == [2, 0, 0, 2]


def test_inputs_leave_no_autograd_history(device) -> None:
    buffers = StaticBuffers(
        max_requests=2, device=device, slots=[Slot("x", torch.float32, "request", PaddingPolicy.ZERO)]
    )
    stage(buffers, 2, 2, x=torch.ones(2, device=device, requires_grad=True) * 2)
    assert not buffers["x"].requires_grad and buffers["x"].tolist() == [2, 2]


def test_the_packed_copy_leaves_device_slots_alone(device) -> None:
    slots = [
        Slot("host", torch.int64, "request", PaddingPolicy.ZERO),
        Slot("own", torch.float32, "request", PaddingPolicy.ZERO, (3,), owner="device"),
        Slot("host2", torch.float32, "request", PaddingPolicy.ZERO, (2,)),
    ]
    buffers = StaticBuffers(max_requests=4, device=device, slots=slots)
    buffers.patch([0, 1], own=np.ones((2, 3)))
    stage(buffers, 2, 4, host=[1, 2], host2=[[1.0, 2.0], [3.0, 4.0]])
    buffers["own"].add_(1)
    stage(buffers, 2, 4, host=[5, 6])
    assert buffers["own"].tolist() == [[2, 2, 2], [2, 2, 2], [1, 1, 1], [1, 1, 1]]
    assert buffers["host"].tolist() == [5, 6, 0, 0] and buffers["host2"][1].tolist() == [3.0, 4.0]


@pytest.mark.gpu
def test_a_slot_fed_from_the_device_survives_later_packed_copies() -> None:
    slots = [Slot(name, torch.int64, "request", PaddingPolicy.ZERO) for name in ("a", "b", "c")]
    buffers = StaticBuffers(max_requests=4, device="cuda", slots=slots)
    stage(buffers, 2, 4, a=[1, 2], b=torch.tensor([3, 4], device="cuda"), c=[5, 6])
    stage(buffers, 2, 4, a=[7, 8], c=[9, 9])
    assert [buffers[name].tolist() for name in "abc"] == [[7, 8, 0, 0], [3, 4, 0, 0], [9, 9, 0, 0]]
    stage(buffers, 1, 4, b=[6])
    assert buffers["b"].tolist() == [6, 0, 0, 0]


@pytest.mark.gpu
def test_a_slot_that_the_host_feeds_again_has_a_clean_tail() -> None:
    buffers = one_slot(PaddingPolicy.ZERO, "cuda")
    stage(buffers, 8, 8, x=[9] * 8)
    stage(buffers, 3, 4, x=torch.tensor([1, 2, 3], device="cuda"))
    stage(buffers, 3, 4, x=[4, 5, 6])
    assert buffers["x"][:4].tolist() == [4, 5, 6, 0]


@pytest.mark.gpu
def test_a_mirror_in_flight_is_not_rewritten() -> None:
    buffers = one_slot(PaddingPolicy.ZERO, "cuda")
    seen = []
    for step in range(200):
        torch.cuda._sleep(20_000)  # the copies queue up behind it
        stage(buffers, 16, 16, x=[step] * 16)
        seen.append(buffers["x"].clone())
    assert [int(x[0]) for x in seen] == list(range(200)) and all(bool((x == x[0]).all()) for x in seen)


def test_kept_puts_everything_back(device) -> None:
    slots = [
        Slot("host", torch.int64, "request", PaddingPolicy.ZERO),
        Slot("own", torch.int64, "request", PaddingPolicy.ZERO, owner="device"),
    ]
    buffers = StaticBuffers(max_requests=4, device=device, slots=slots)
    stage(buffers, 2, 4, host=torch.tensor([1, 2], device=device), own=[3, 4])
    buffers.patch([2], own=[5])
    with buffers.kept():
        buffers.reset()
        stage(buffers, 4, 4, host=[9] * 4, own=[9] * 4)
    assert buffers["host"].tolist() == [1, 2, 0, 0] and buffers["own"].tolist() == [3, 4, 5, 0]
    stage(buffers, 3, 4)
    assert buffers["host"].tolist() == [1, 2, 0, 0] and buffers["own"].tolist() == [3, 4, 5, 0]


def test_views_of_a_relaxed_key_and_of_one_kind_of_batch() -> None:
    slots = [
        Slot("t", torch.int64, "token", PaddingPolicy.ZERO),
        Slot("r", torch.int64, "request", PaddingPolicy.ZERO),
        Slot("m", torch.int64, "request", PaddingPolicy.ZERO, mixed_only=True),
    ]
    buffers = StaticBuffers(max_requests=4, max_tokens=16, slots=slots)

    def rows(batch: BatchDescriptor, request_slots: int | None = None) -> dict[str, int]:
        return {name: len(view) for name, view in buffers.views(batch, request_slots).items()}

    assert rows(BatchDescriptor.relaxed(8)) == {"t": 8, "r": 4, "m": 4}
    assert rows(BatchDescriptor.relaxed(8), 3) == {"t": 8, "r": 3, "m": 3}
    assert rows(BatchDescriptor.relaxed(2), 3) == {"t": 2, "r": 2, "m": 2}
    assert rows(BatchDescriptor.mixed(7, 2)) == {"t": 7, "r": 2, "m": 2}
    assert rows(BatchDescriptor.decode(3, 2)) == {"t": 6, "r": 3}


def test_tails_of_both_units() -> None:
    slots = [Slot(per, torch.int64, per, PaddingPolicy.ZERO) for per in ("token", "request")]
    buffers = StaticBuffers(max_requests=4, max_tokens=8, slots=slots)
    full = BatchDescriptor.mixed(8, 4)
    buffers.stage(full, BatchDescriptor.relaxed(8), {"token": [7] * 8, "request": [7] * 4})
    buffers.stage(BatchDescriptor.mixed(5, 2), BatchDescriptor.relaxed(6), {"token": [1] * 5, "request": [1] * 2}, 3)
    assert buffers["token"].tolist() == [1] * 5 + [0] + [7] * 2  # the key of six tokens ends there
    assert buffers["request"].tolist() == [1, 1, 0, 7]  # and has three request slots


def test_addresses_never_move() -> None:
    buffers = one_slot(PaddingPolicy.ZERO)
    before = buffers["x"].data_ptr()
    for size in (1, 16, 3):
        stage(buffers, size, 16, x=list(range(size)))
        assert buffers["x"].data_ptr() == before
        assert buffers.views(BatchDescriptor.decode(size))["x"].data_ptr() == before


def test_slots_are_aligned_in_one_allocation() -> None:
    slots = [Slot(f"s{i}", torch.uint8, "request", PaddingPolicy.ZERO, (i + 1,)) for i in range(5)]
    buffers = StaticBuffers(max_requests=7, slots=slots)
    assert {buffers[slot.name].untyped_storage().data_ptr() for slot in slots} == {buffers.slab.data_ptr()}
    assert all(buffers[slot.name].storage_offset() % 256 == 0 for slot in slots)


def test_nothing_given_and_nothing_changed_copies_nothing(monkeypatch) -> None:
    buffers = one_slot(PaddingPolicy.ZERO)
    stage(buffers, 2, 4, x=[1, 2])
    monkeypatch.setattr(buffers, "_mirror", None)  # any upload would fail
    stage(buffers, 2, 4)


@pytest.mark.parametrize("given_rows", [[1, 2], [[1], [2], [3]], np.zeros(4, dtype=np.int64)])
def test_a_wrong_shape_names_the_slot(given_rows) -> None:
    with pytest.raises(InputError, match="slot x: .* expected"):
        stage(one_slot(PaddingPolicy.ZERO), 3, 4, x=given_rows)


def test_what_would_lose_its_kind_is_refused() -> None:
    with pytest.raises(InputError, match="float64 would lose its kind"):
        stage(one_slot(PaddingPolicy.ZERO), 1, 1, x=np.array([1.5]))


OUT_OF_RANGE = [
    (torch.int32, [2**31], "2147483648"),
    (torch.int32, [-(2**31) - 1], "-2147483649"),
    (torch.int32, np.array([2**40]), "1099511627776"),
    (torch.int32, torch.tensor([2**31]), "2147483648"),
    (torch.int64, np.array([2**63 + 5], dtype=np.uint64), "9223372036854775813"),
    (torch.int64, [2**63], "9223372036854775808"),
    (torch.int8, np.array([128], dtype=np.int16), "128"),
    (torch.uint8, torch.tensor([-1]), "-1"),
    (torch.uint16, [-1], "-1"),
]


@pytest.mark.parametrize("owner", ["host", "device"])
@pytest.mark.parametrize(("dtype", "value", "number"), OUT_OF_RANGE)
def test_an_integer_that_does_not_fit_is_refused(dtype, value, number: str, owner: str) -> None:
    buffers = StaticBuffers(max_requests=4, slots=[Slot("x", dtype, "request", PaddingPolicy.ZERO, owner=owner)])
    with pytest.raises(InputError, match=f"slot x: {number} does not fit {dtype}"):
        stage(buffers, 1, 1, x=value)
    if owner == "device":
        with pytest.raises(InputError, match=f"slot x: {number} does not fit {dtype}"):
            buffers.patch([0], x=value)


def test_integers_at_the_limits_fit() -> None:
    buffers = StaticBuffers(max_requests=4, slots=[Slot("x", torch.int32, "request", PaddingPolicy.ZERO)])
    limits = [2**31 - 1, -(2**31)]
    for value in (limits, np.array(limits), torch.tensor(limits), torch.tensor(limits, dtype=torch.int32)):
        stage(buffers, 2, 4, x=value)
        assert buffers["x"].tolist() == [*limits, 0, 0]


@pytest.mark.parametrize("tensor", [torch.eye(2)[0].to_sparse(), torch.empty(2, device="meta")], ids=["sparse", "meta"])
def test_a_tensor_that_cannot_be_copied_is_refused_before_anything_is_written(tensor: torch.Tensor) -> None:
    slots = [Slot(name, torch.float32, "request", PaddingPolicy.ZERO) for name in ("x", "y")]
    buffers = StaticBuffers(max_requests=2, slots=slots)
    stage(buffers, 2, 2, x=[1.0, 1.0], y=[1.0, 1.0])
    with pytest.raises(InputError, match="slot y: a .* tensor on .* cannot be staged"):
        stage(buffers, 2, 2, x=[50.0, 50.0], y=tensor)
    stage(buffers, 2, 2, y=[2.0, 2.0])
    assert buffers["x"].tolist() == [1, 1]


def test_a_refused_step_leaves_the_buffers_as_they_were(device) -> None:
    slots = [Slot(name, torch.int64, "request", PaddingPolicy.ZERO) for name in ("a", "b")]
    buffers = StaticBuffers(max_requests=4, device=device, slots=slots)
    stage(buffers, 2, 4, a=[1, 2], b=[3, 4])
    with pytest.raises(InputError, match="slot b"):
        stage(buffers, 2, 4, a=[9, 9], b=[1, 2, 3])
    stage(buffers, 2, 4, b=[5, 6])
    assert buffers["a"].tolist() == [1, 2, 0, 0]


@pytest.mark.parametrize("rows", [[4], [-1], [0, 9]])
def test_a_row_outside_the_buffers_is_not_patched(rows: list[int]) -> None:
    buffers = StaticBuffers(
        max_requests=4, slots=[Slot("x", torch.int64, "request", PaddingPolicy.ZERO, owner="device")]
    )
    with pytest.raises(InputError, match="rows 0 to 3"):
        buffers.patch(rows, x=[1] * len(rows))


def test_a_patch_that_is_none() -> None:
    slots = [
        Slot("x", torch.int64, "request", PaddingPolicy.ZERO, owner="device"),
        Slot("t", torch.int64, "token", PaddingPolicy.ZERO, (2,), owner="device"),
    ]
    buffers = StaticBuffers(max_requests=4, max_tokens=8, slots=slots)
    for rows in ([1.5], [1.0], ["1"], 1, None):
        with pytest.raises(InputError, match="a list of integers is expected"):
            buffers.patch(rows, x=[1])
    for value in ([1], 1):
        with pytest.raises(InputError, match="expected"):
            buffers.patch([], x=value)
    with pytest.raises(InputError, match=r"slot t, rows \[8\]: the buffers hold rows 0 to 7"):
        buffers.patch([8], t=[[1, 1]])
    buffers.patch([], x=[], t=[])
    assert not buffers["x"].any()
    buffers.patch(np.array([6]), t=[[1, 2]])
    assert buffers["t"][6].tolist() == [1, 2]


def test_bfloat16_slots_take_lists_and_tensors() -> None:
    buffers = StaticBuffers(max_requests=4, slots=[Slot("x", torch.bfloat16, "request", PaddingPolicy.ZERO)])
    stage(buffers, 2, 4, x=[1.5, 2.5])
    stage(buffers, 1, 4, x=torch.tensor([3.5]))
    assert buffers["x"].tolist() == [3.5, 0, 0, 0]


def test_unknown_and_missing_slots_are_named() -> None:
    with pytest.raises(InputError, match="slot y: no such slot; known are x"):
        stage(one_slot(PaddingPolicy.ZERO), 1, 1, y=[1])
    with pytest.raises(InputError, match="slot x: FOREACH_COPY needs it"):
        stage(one_slot(PaddingPolicy.FOREACH_COPY), 1, 1)
    with pytest.raises(InputError, match="only slots with owner='device' are patched"):
        one_slot(PaddingPolicy.ZERO).patch([0], x=[1])


def test_a_slot_needs_a_policy_and_sense() -> None:
    with pytest.raises(TypeError):
        Slot("x", torch.int64, "request")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="use FILL_SENTINEL"):
        Slot("x", torch.int64, "request", PaddingPolicy.ZERO, pad_value=3)
    for name in ("self", "class", "None"):
        with pytest.raises(ConfigError, match=f"slot {name}: Python keeps this name"):
            Slot(name, torch.int64, "request", PaddingPolicy.ZERO)
    for shape in (3, (-1,), (2.0,), None):
        with pytest.raises(ConfigError, match="slot x: shape"):
            Slot("x", torch.int64, "request", PaddingPolicy.ZERO, shape)
    assert Slot("x", torch.int64, "request", PaddingPolicy.ZERO, [2, 3]).shape == (2, 3)
    with pytest.raises(ConfigError, match="'int64' is no torch.dtype"):
        Slot("x", "int64", "request", PaddingPolicy.ZERO)
    for sizes in ({"max_requests": 2.0}, {"max_requests": "2"}, {"max_requests": 2, "max_tokens": 4.0}):
        with pytest.raises(ConfigError, match="both are integers"):
            StaticBuffers(slots=SOME, **sizes)
    with pytest.raises(ConfigError, match="identifier"):
        Slot("not a name", torch.int64, "request", PaddingPolicy.ZERO)
    with pytest.raises(ConfigError, match="a name of its own"):
        StaticBuffers(max_requests=1, slots=[Slot("x", torch.int64, "request", PaddingPolicy.ZERO)] * 2)
    with pytest.raises(ConfigError, match="4 tokens are fewer than 8 requests"):
        StaticBuffers(max_requests=8, max_tokens=4, slots=SOME)
    with pytest.raises(ConfigError, match="none that torch knows"):
        StaticBuffers(max_requests=8, device="foo", slots=SOME)
    with pytest.raises(InputError, match="of different lengths"):
        stage(one_slot(PaddingPolicy.ZERO), 2, 2, x=[[1], [2, 3]])
    with pytest.raises(ConfigError, match="start at 1"):
        StaticBuffers(max_requests=0, slots=[Slot("x", torch.int64, "request", PaddingPolicy.ZERO)])


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        *[(torch.int8, 1000), (torch.int8, -129), (torch.int64, 2**63), (torch.int32, 0.5), (torch.int32, NAN)],
        *[(torch.int32, INF), (torch.uint8, -1), (torch.bool, 2), (torch.float16, 1e6), (torch.float32, 1e39)],
        *[(torch.int32, "1"), (torch.int32, None), (torch.float32, 1j), (torch.bfloat16, 10**400)],
    ],
    ids=lambda argument: str(argument)[:16],
)
def test_a_pad_value_that_the_dtype_cannot_hold(dtype: torch.dtype, value) -> None:
    with pytest.raises(ConfigError, match="slot x: .*pad_value"):
        Slot("x", dtype, "request", PaddingPolicy.FILL_SENTINEL, pad_value=value)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        *[
            (torch.int8, -128),
            (torch.int64, 2**63 - 1),
            (torch.int32, 3.0),
            (torch.bool, True),
            (torch.int32, np.int64(4)),
        ],
        *[(torch.float16, 65504.0), (torch.float32, INF), (torch.bfloat16, -INF), (torch.complex64, 2.0)],
    ],
)
def test_a_pad_value_at_the_limits(dtype: torch.dtype, value) -> None:
    slot = Slot("x", dtype, "request", PaddingPolicy.FILL_SENTINEL, pad_value=value)
    assert StaticBuffers(max_requests=1, slots=[slot])["x"].tolist() == [value]


def test_resets_are_counted_but_not_those_that_are_undone() -> None:
    buffers = StaticBuffers(max_requests=1, slots=[Slot("x", torch.int64, "request", PaddingPolicy.ZERO)])
    before = buffers.times_reset
    with buffers.kept():
        buffers.reset()
    assert buffers.times_reset == before
    buffers.reset()
    assert buffers.times_reset == before + 1


def owned(device, *more: Slot) -> StaticBuffers:
    zero = PaddingPolicy.ZERO
    slots = [
        Slot("table", torch.int32, "request", zero, (3,), owner="device"),
        Slot("place", torch.int64, "request", zero, owner="device"),
        Slot("token", torch.int64, "token", zero, owner="device"),
        Slot("host", torch.int32, "request", zero),
    ]
    return StaticBuffers(max_requests=4, slots=[*slots, *more], device=device)


def test_entries_are_put_where_they_belong(device) -> None:
    buffers = owned(device)
    buffers.put("table", [0, 2, 2], [1, 0, 2], [7, 8, 9])
    assert buffers["table"].tolist() == [[0, 7, 0], [0, 0, 0], [8, 0, 9], [0, 0, 0]]
    for name, rows, columns in (("host", [0], [0]), ("place", [0], [0]), ("table", [4], [0]), ("table", [0], [-1])):
        with pytest.raises(InputError, match=f"slot {name}"):
            buffers.put(name, rows, columns, [1])
    for rows, columns in (([0, 1], [0, 1]), ([0], [0, 1])):
        with pytest.raises(InputError, match="not as many"):
            buffers.put("table", rows, columns, [1])
    with torch.inference_mode():
        buffers.put("table", [], [], [])
    assert buffers["table"].sum() == 24


def test_rows_move_with_all_that_the_device_owns(device) -> None:
    buffers = owned(device)
    buffers.patch([0, 1, 2, 3], table=[[1] * 3, [2] * 3, [3] * 3, [4] * 3], place=[1, 2, 3, 4])
    buffers["token"].copy_(torch.arange(4))
    buffers.move([3, 0], [0, 1])  # as they were before, not one after the other
    assert buffers["place"].tolist() == [4, 1, 3, 4] and buffers["table"][:, 0].tolist() == [4, 1, 3, 4]
    assert buffers["token"].tolist() == [0, 1, 2, 3]
    with pytest.raises(InputError, match="rows 0 to 3"):
        buffers.move([4], [0])
    with pytest.raises(InputError, match="rows 0 to 3"):
        buffers.move([1], [0, 2])


def test_a_row_that_one_moved_to_joins_as_it_is(device) -> None:
    buffers = owned(device)
    stage(buffers, 1, 1, host=[1])
    buffers["place"].copy_(torch.tensor([5, 6, 0, 0]))
    buffers.move([0], [1])
    stage(buffers, 2, 2, host=[1, 1])
    assert buffers["place"][:2].tolist() == [5, 5]
