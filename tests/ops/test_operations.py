"""Operation sets: which one is chosen, and that each gives what the reference gives."""

import re
from collections import Counter
from importlib.util import find_spec

import pytest
import torch
from engine.tiny import CONFIG, tiny_engine, tiny_model
from ops.interpreter import check_interpreted
from ops.layers import check_cache, distance, make_adapters, make_case, run

from stepgraph.ops import operations
from stepgraph.ops.operations import choose_operations, get_operations
from stepgraph.ops.reference_set import ReferenceOperations
from stepgraph.runtime import ConfigError
from stepgraph.runtime.nodes import GraphNode

LENGTHS = [1, 0, 16, 17, 80, 31, 0]
ADDED = re.compile("reduce|combine", re.IGNORECASE)  # launches that cuBLAS or attention add to their own


def test_the_default_is_the_devices_own() -> None:
    assert choose_operations(None, "cpu") == "reference"
    assert choose_operations("reference", "cuda") == "reference"
    assert tiny_model().operations.name == "reference"


@pytest.mark.skipif(find_spec("triton") is None, reason="fused needs triton")
def test_fused_is_the_default_on_cuda() -> None:
    assert choose_operations(None, "cuda") == choose_operations("fused", "cuda:0") == "fused"


@pytest.mark.parametrize(
    ("name", "device", "says"),
    [
        ("magic", "cpu", "unknown set 'magic'; available on cpu: reference"),
        ("fused", "cpu", "'fused' runs on cuda, not on cpu"),
        ("unfused", "cpu", "'unfused' runs on cuda, not on cpu"),
        (None, "meta", "no set runs on device 'meta'"),
    ],
)
def test_what_cannot_run_is_refused(name: str | None, device: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"operations: {says}"):
        choose_operations(name, device)


def test_without_triton_the_reference_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "find_spec", lambda name: None)
    assert choose_operations(None, "cuda") == "reference"
    for name in ("unfused", "fused"):
        with pytest.raises(ConfigError, match=f"'{name}' needs the triton package"):
            choose_operations(name, "cuda")


def test_the_reference_names_its_regions_on_the_tape() -> None:
    core = tiny_engine(max_num_seqs=2)
    nodes = core.runner.graph_nodes(1)
    assert len(nodes) > 20 and all(node.type == "operator" and node.name for node in nodes)
    own = ("norm_qkv_rope_write", "attention", "output_projection", "norm_gate_up_swiglu", "down_projection")
    layers = {f"layers.{layer}/{name}" for layer in range(CONFIG.num_layers) for name in own}
    around = {"embedding", "places", "final_norm", "lm_head", "sampling", "advance"}
    assert {node.region for node in nodes} == layers | around
    attention = [node.name for node in nodes if node.region == "layers.1/attention"]
    assert attention[-1] == "stepgraph.reference_decode.default"


def test_padded_rows_write_to_block_0_only() -> None:
    case = make_case(LENGTHS, bias=True, head_norms=True)
    before = case.kv_cache.clone()
    _, cache = run(ReferenceOperations(case.shape), case)
    check_cache(cache, before, case)


def test_the_unfused_kernels_agree_with_the_reference_under_the_interpreter() -> None:
    check_interpreted("interpreted_unfused.py")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "bias", "head_norms"),
    [((6, 2, 16), False, False), ((8, 2, 64), True, False), ((4, 4, 128), False, True), ((2, 1, 80), True, True)],
)
def test_unfused_is_as_near_to_float32_as_the_reference(device, dtype, heads, bias, head_norms) -> None:
    case = make_case(LENGTHS, heads=heads, bias=bias, head_norms=head_norms)
    truth, truth_cache = run(ReferenceOperations(case.shape), case)
    moved = case.to(device, dtype)
    reference, reference_cache = run(get_operations("reference", device, moved.shape), moved)
    got, cache = run(get_operations("unfused", device, moved.shape), moved)
    check_cache(cache, moved.kv_cache, moved)
    # The sets round at different places, so neither is the other's truth.
    assert distance(got, truth) <= 2 * distance(reference, truth) + 1e-5
    assert distance(cache, truth_cache) <= 2 * distance(reference_cache, truth_cache) + 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_unfused_with_adapters_is_as_near_to_float32_as_the_reference(device, dtype) -> None:
    case = make_case(LENGTHS, heads=(8, 2, 64))
    truth, truth_cache = run(ReferenceOperations(case.shape), case, make_adapters(case))
    moved = case.to(device, dtype)
    adapters = make_adapters(moved)
    reference, reference_cache = run(get_operations("reference", device, moved.shape), moved, adapters)
    got, cache = run(get_operations("unfused", device, moved.shape), moved, adapters)
    assert distance(got, truth) <= 2 * distance(reference, truth) + 1e-5
    assert distance(cache, truth_cache) <= 2 * distance(reference_cache, truth_cache) + 1e-5


@pytest.mark.gpu
def test_unfused_writes_beyond_2_gib_of_cache(device) -> None:
    """Offsets are 64-bit: the last block of a cache of 5 GiB."""
    from stepgraph.ops.unfused.kernels import write_kv

    kv = torch.zeros(80_000, 1, 2, 16, 8, 128, dtype=torch.bfloat16, device=device)[:, 0]
    qkv = torch.randn(1, (32 + 16) * 128, dtype=torch.bfloat16, device=device)
    tables = torch.full((1, 4), len(kv) - 1, dtype=torch.int32, device=device)
    write_kv(qkv, torch.tensor([37], device=device), tables, kv, 32)
    assert torch.equal(kv[-1, :, 5].flatten(), qkv[0, 32 * 128 :])
    assert kv.count_nonzero() == qkv[0, 32 * 128 :].count_nonzero()


def is_added(node: GraphNode) -> bool:
    return node.type != "kernel" or ADDED.search(node.name) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 4])
def test_a_layer_is_ten_launches_and_every_node_has_a_region(device, size: int) -> None:
    pytest.importorskip("cuda.bindings.driver")
    from stepgraph.ops.unfused import TEN

    core = tiny_engine(device, max_num_seqs=4, operations="unfused")
    nodes = core.runner.graph_nodes(size)
    assert all(node.region for node in nodes) and all(node.name for node in nodes if node.type == "kernel")
    own = Counter(node.region for node in nodes if not is_added(node))
    for layer in range(CONFIG.num_layers):
        assert [own[f"layers.{layer}/{name}"] for name in TEN] == [1] * 10, [(n.region, n.name) for n in nodes]
    assert own["embedding"] == own["final_norm"] == own["lm_head"] == 1
    order = [node.region for node in nodes if node.region.startswith("layers.0/")]
    assert list(dict.fromkeys(order)) == [f"layers.0/{name}" for name in TEN]
