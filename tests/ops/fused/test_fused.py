"""The fused operations: what was chosen, and that each gives what the reference gives."""

from __future__ import annotations

import shutil
from collections import Counter
from typing import Any

import pytest
import torch
from engine.tiny import CONFIG, tiny_engine, tiny_graphs
from ops.interpreter import check_interpreted
from ops.layers import check_cache, distance, make_adapters, make_case, run

from stepgraph.engine.lora import LoraConfig, LoraSlots, with_cases
from stepgraph.ops.lora import NO_ADAPTERS
from stepgraph.ops.operations import Hidden, Places, get_operations
from stepgraph.ops.reference_set import ReferenceOperations
from stepgraph.runtime.batch import BatchDescriptor

BATCHES = {"one": [80], "few": [1, 0, 16, 17, 80, 31, 0], "many": [1 + 4 * row for row in range(18)]}
HALF = torch.bfloat16
FAMILIES = [  # heads, bias, norms of heads, hidden and intermediate, dtype; multiples of 64 are for the CUDA kernel
    ((6, 2, 16), False, False, (96, 80), torch.float32),
    ((6, 2, 16), False, False, (96, 80), HALF),
    ((8, 2, 64), True, False, (128, 192), HALF),
    ((8, 2, 64), True, False, (128, 192), torch.float16),
    ((4, 4, 128), False, True, (128, 192), HALF),
    ((4, 4, 128), False, True, (96, 80), torch.float16),
    ((2, 1, 80), True, True, (192, 128), HALF),
    ((8, 2, 128), False, False, (256, 512), HALF),
    ((8, 2, 128), True, False, (256, 512), torch.float32),
]


def test_the_triton_kernels_agree_with_the_reference_under_the_interpreter() -> None:
    check_interpreted("fused/interpreted.py")


@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation is compiled by g++")
def test_layers_by_the_cuda_kernels_emulated() -> None:
    check_interpreted("fused/interpreted_cuda.py")


@pytest.mark.gpu
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("heads", "bias", "head_norms", "sizes", "dtype"), FAMILIES)
def test_a_layer_is_as_near_to_float32_as_the_reference(device, batch, heads, bias, head_norms, sizes, dtype) -> None:
    case = make_case(BATCHES[batch], heads=heads, bias=bias, head_norms=head_norms, sizes=sizes)
    truth, truth_cache = run(ReferenceOperations(case.shape), case)
    moved = case.to(device, dtype)
    reference, reference_cache = run(get_operations("reference", device, moved.shape), moved)
    got, cache = run(get_operations("fused", device, moved.shape), moved)
    check_cache(cache, moved.kv_cache, moved)
    # The sets round at different places, so neither is the other's truth.
    assert distance(got, truth) <= 2 * distance(reference, truth) + 1e-5
    assert distance(cache, truth_cache) <= 2 * distance(reference_cache, truth_cache) + 1e-5


ADAPTED = ["_shrink_row", "_expand_row"]
IN_A_LAYER = {  # what it launches besides its attention, by adapters and norms of heads
    (False, False): ["norm_qkv_rope_write", "linear", "norm_gate_up_swiglu", "linear"],
    (False, True): ["linear", "_rope_write", "linear", "norm_gate_up_swiglu", "linear"],
    (True, False): [
        *("linear", *ADAPTED, "_rope_write", "linear", *ADAPTED),
        *("linear", *ADAPTED, "_silu_mul", "linear", *ADAPTED),
    ],
}
IN_A_LAYER[True, True] = IN_A_LAYER[True, False]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run where there is a GPU")
@pytest.mark.parametrize(("adapters", "head_norms"), IN_A_LAYER)
@pytest.mark.parametrize("rows", [1, 16])
def test_a_layer_of_the_triton_kernels_compiles_for_hopper(adapters: bool, head_norms: bool, rows: int) -> None:
    """What is no program to a compiler may pass the interpreter. The launches are the layer's own, in their order."""
    pytest.importorskip("triton")
    from ops.compiling import compiled_kernels

    from stepgraph.ops.fused.operation_set import FusedOperations
    from stepgraph.ops.fused.tiling import OneTile, Tile

    case = make_case([80] * rows, heads=(8, 2, 64), bias=True, head_norms=head_norms, sizes=(256, 512)).to("cpu", HALF)
    operations = FusedOperations(case.shape, OneTile(Tile(16, 64, 4, 3 if rows > 1 else 1)), overlap=True)
    mine = operations.adapters(*make_adapters(case))[0] if adapters else NO_ADAPTERS

    def layer() -> None:
        operations.layer(
            Hidden(torch.zeros(rows, 256, dtype=HALF)), case.layers[0], Places(case.positions, case.block_tables),
            case.kv_cache[:, 0], lambda q, kv, out: None, mine,
        )  # fmt: skip

    assert compiled_kernels(layer) == IN_A_LAYER[adapters, head_norms]


@pytest.mark.gpu
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("heads", "bias", "head_norms", "sizes", "dtype"), FAMILIES)
def test_with_adapters_it_is_as_near_to_float32_as_the_reference(
    device, batch, heads, bias, head_norms, sizes, dtype
) -> None:
    case = make_case(BATCHES[batch], heads=heads, bias=bias, head_norms=head_norms, sizes=sizes)
    truth, truth_cache = run(ReferenceOperations(case.shape), case, make_adapters(case))
    moved = case.to(device, dtype)
    adapters = make_adapters(moved)
    reference, reference_cache = run(get_operations("reference", device, moved.shape), moved, adapters)
    got, cache = run(get_operations("fused", device, moved.shape), moved, adapters)
    check_cache(cache, moved.kv_cache, moved)
    assert distance(got, truth) <= 2 * distance(reference, truth) + 1e-5
    # But for the null block: padded rows write it at once, and their adapters differ.
    bound = 2 * distance(reference_cache[1:], truth_cache[1:]) + 1e-5
    assert distance(cache[1:], truth_cache[1:]) <= bound


@pytest.mark.gpu
def test_a_layer_with_adapters_is_fifteen_launches(device) -> None:
    pytest.importorskip("cuda.bindings.driver")
    from stepgraph.ops.fused.operation_set import SEVEN

    lora = LoraConfig(slots=2, max_rank=16, cases=(0, 2))
    core = tiny_engine(
        device,
        graphs=with_cases(tiny_graphs("full", device=device, max_num_seqs=4), lora),
        max_num_seqs=4,
        operations="fused",
        lora=LoraSlots(CONFIG, lora, torch.float32, device),
    )
    nodes = core.runner.graph_nodes(BatchDescriptor.decode(4, num_loras=2))
    for layer in range(CONFIG.num_layers):
        front = f"layers.{layer}/"
        mine = Counter(node.region.removeprefix(front) for node in nodes if node.region.startswith(front))
        adapted = {f"{name}/adapters": 2 for name in SEVEN if name.endswith("_projection")}
        assert mine == dict.fromkeys(SEVEN, 1) | adapted


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "regions"), [(1, "FIVE"), (4, "FIVE"), (32, "NINE"), (80, "TEN")])
def test_the_choice_is_seen_in_a_graphs_regions(device, size: int, regions: str) -> None:
    pytest.importorskip("cuda.bindings.driver")
    from stepgraph.ops.fused import operation_set
    from stepgraph.ops.unfused import TEN

    core = tiny_engine(device, max_num_seqs=size, operations="fused")
    nodes = core.runner.graph_nodes(size)
    wanted = TEN if regions == "TEN" else getattr(operation_set, regions)
    for layer in range(CONFIG.num_layers):
        mine = [node.region for node in nodes if node.region.startswith(f"layers.{layer}/")]
        assert list(dict.fromkeys(mine)) == [f"layers.{layer}/{name}" for name in wanted]
        if regions == "FIVE":
            assert set(Counter(mine).values()) == {1}, mine


def test_description_by_the_number_of_rows() -> None:
    pytest.importorskip("triton")
    from stepgraph.ops.fused.operation_set import FusedOperations
    from stepgraph.ops.fused.tiling import Choice, Tiles

    case = make_case([1])
    out, width = case.layers[0].down.shape
    operations = FusedOperations(case.shape, Tiles([Choice("down", out, width, 1, None, "a test")]), overlap=False)
    one, hundred = (operations.describe(case.layers[0], case.embedding, rows) for rows in (1, 100))
    assert one.keys() == hundred.keys() == {"qkv", "attention_out", "gate_up", "down", "lm_head"}
    assert one["down"] == "library (a test)" and one["qkv"].startswith("Tile(")
    assert set(hundred.values()) == {"library (not measured)"}


@pytest.mark.gpu
def test_description_names_each_projection(device) -> None:
    operations: Any = tiny_engine(device, max_num_seqs=1, operations="fused").model.operations
    case = make_case([1]).to(device, torch.bfloat16)
    told = operations.describe(case.layers[0], case.embedding, 1)
    assert set(told) == {"qkv", "attention_out", "gate_up", "down", "lm_head"}
    assert all(text.startswith("Tile(") for text in told.values())
    assert all(text.startswith("library") for text in operations.describe(case.layers[0], case.embedding, 200).values())
