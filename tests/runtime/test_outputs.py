"""Outputs: what their rows count, where they lie, and how the real ones are cut out."""

import pytest
import torch

from stepgraph.runtime import BatchDescriptor, CaptureError, InputError
from stepgraph.runtime.outputs import SharedOutputs, Unit, named_outputs, real_rows

SLAB = torch.zeros(64, dtype=torch.uint8)


def shared(tokens: int = 32, requests: int = 8) -> SharedOutputs:
    return SharedOutputs(SLAB, tokens, requests)


def rows(n: int) -> torch.Tensor:
    return torch.arange(n).float()


def test_units_are_told_apart_where_the_counts_differ() -> None:
    outputs = shared()
    outputs.collect({"t": rows(32), "r": rows(8), "n": torch.zeros(3, 2), "s": torch.tensor(1.0)}, 32, 8)
    assert outputs.units == {"t": Unit.TOKEN, "r": Unit.REQUEST, "n": Unit.NEITHER, "s": Unit.NEITHER}
    assert not outputs.undecided


def test_equal_counts_are_decided_by_another_key() -> None:
    outputs = shared()
    outputs.collect({"t": rows(4), "r": rows(4)}, 4, 4)
    assert outputs.undecided
    outputs.collect({"t": rows(8), "r": rows(4)}, 8, 4)
    assert outputs.units == {"t": Unit.TOKEN, "r": Unit.REQUEST} and not outputs.undecided


def test_a_fixed_size_that_happens_to_be_a_count() -> None:
    outputs = shared()
    outputs.collect({"n": torch.zeros(8)}, 32, 8)
    outputs.collect({"n": torch.zeros(8)}, 16, 8)
    outputs.collect({"n": torch.zeros(8)}, 4, 4)
    assert outputs.units == {"n": Unit.NEITHER}


def test_a_size_that_may_be_fixed_is_known_to_be_undecided() -> None:
    outputs = shared()
    outputs.collect({"n": torch.zeros(4), "one": torch.zeros(1), "s": torch.tensor(1.0)}, 4, 4)
    assert outputs.maybe_fixed
    outputs.learn({"n": torch.zeros(4), "one": torch.zeros(1), "s": torch.tensor(1.0)}, 1, 1)
    assert outputs.units["n"] is Unit.NEITHER and not outputs.maybe_fixed


def test_names_stay_the_same() -> None:
    outputs = shared()
    outputs.collect({"a": rows(32)}, 32, 8)
    for result in ({"b": rows(16)}, {"a": rows(16), "b": rows(16)}, rows(16)):
        with pytest.raises(CaptureError, match="at 16 tokens and 8 request rows, and a before; .* the same names"):
            outputs.collect(result, 16, 8)
    assert outputs.collect({"a": rows(16)}, 16, 8)["a"].tolist() == list(range(16))


def test_every_key_writes_the_leading_rows_of_one_buffer() -> None:
    outputs = shared()
    small = outputs.collect({"t": rows(4), "r": rows(4)}, 4, 4)  # the larger keys were dropped
    large = outputs.collect({"t": rows(32), "r": rows(8)}, 32, 8)
    assert [small[name].data_ptr() for name in "tr"] == [large[name].data_ptr() for name in "tr"]
    assert large["t"].tolist() == list(range(32)) and large["r"].tolist() == list(range(8))


def test_what_lies_in_the_slab_is_left_there() -> None:
    outputs = shared()
    view = SLAB[:8]
    assert outputs.collect({"r": view}, 32, 8)["r"] is view and outputs.units == {"r": Unit.REQUEST}


def test_rows_that_count_nothing_are_refused() -> None:
    outputs = shared()
    outputs.collect({"t": rows(32)}, 32, 8)
    with pytest.raises(CaptureError, match="output t: 5 rows at 16 tokens and 8 request rows"):
        outputs.collect({"t": rows(5)}, 16, 8)
    assert outputs.units == {"t": Unit.TOKEN}


@pytest.mark.parametrize("other", [torch.zeros(16, 2), torch.zeros(16, dtype=torch.float64)])
def test_rows_keep_their_shape(other: torch.Tensor) -> None:
    outputs = shared()
    outputs.collect({"t": rows(32)}, 32, 8)
    with pytest.raises(CaptureError, match="output t: .* at 16 tokens does not fit .* rows must keep their shape"):
        outputs.collect({"t": other}, 16, 8)


def test_real_rows_of_each_unit() -> None:
    units = {"t": Unit.TOKEN, "r": Unit.REQUEST, "n": Unit.NEITHER}
    cut = real_rows({"t": rows(16), "r": rows(16), "n": rows(16)}, units, BatchDescriptor.mixed(11, 3))
    assert {name: len(value) for name, value in cut.items()} == {"t": 11, "r": 3, "n": 16}


@pytest.mark.parametrize("result", [None, [torch.zeros(1)], {"x": 1}])
def test_what_has_no_name_is_no_output(result) -> None:
    with pytest.raises(InputError, match="a step returns a tensor, a mapping or a named tuple"):
        named_outputs(result)
