"""Any causal model of transformers, recorded: its modules become regions."""

from pathlib import Path

import pytest
import torch

from stepgraph.engine.errors import ModelError
from stepgraph.measure.census import Census, census
from stepgraph.measure.count_step import count_step
from stepgraph.measure.hugging_face import HuggingFaceStep
from stepgraph.runtime.platforms import platform_for

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 260,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2 = {"vocab_size": 260, "n_embd": 48, "n_head": 6, "n_layer": 3, "bos_token_id": None, "eos_token_id": None}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def recorded(folder: Path, family: str, **sizes: object) -> Census:
    transformers.AutoConfig.for_model(family, **sizes).save_pretrained(folder)
    step = HuggingFaceStep(folder, device="cpu", dtype=torch.float32, rows=2, context=16)
    assert step.layers == 3
    platform = platform_for("cpu")
    with torch.inference_mode():
        platform.warm_up(step)
        recording, _ = platform.record(step, platform.new_pool())
        before = step._positions.clone()
        recording.replay()
    assert torch.equal(step._positions, before + 1)
    return census(recording.nodes())


@pytest.mark.parametrize(
    ("family", "sizes", "operations", "around"),
    [
        ("llama", SIZES, {"self_attn/q_proj": 3, "mlp/down_proj": 3}, {"embed_tokens", "norm", "lm_head"}),
        ("gpt2", GPT2, {"attn/c_attn": 3, "mlp/c_fc": 3}, {"wte", "wpe", "ln_f", "lm_head"}),
        ("qwen3_moe", {**SIZES, **EXPERTS}, {"self_attn/v_proj": 3, "mlp/experts/act_fn": 3}, {"embed_tokens"}),
    ],
)
def test_modules_are_regions(
    tmp_path: Path, family: str, sizes: dict[str, object], operations: dict[str, int], around: set[str]
) -> None:
    counted = recorded(tmp_path, family, **sizes)
    assert len(counted.layers) == 3 and len(set(counted.layers)) == 1
    assert operations.items() <= counted.operations.items()
    assert around | {"sampling", "advance"} <= set(counted.around)


def test_a_directory_that_transformers_cannot_run(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="transformers cannot run it"):
        HuggingFaceStep(tmp_path, device="cpu", dtype=torch.float32, rows=1, context=4)


def test_weights_are_read_where_there_are_some(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("llama", **SIZES)
    saved = transformers.AutoModelForCausalLM.from_config(config)
    saved.save_pretrained(tmp_path)
    step = HuggingFaceStep(tmp_path, device="cpu", dtype=torch.float32, rows=1, context=4)
    assert torch.equal(step.model.lm_head.weight, saved.lm_head.weight)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_on_the_device_graph_and_eager_launch_the_same(tmp_path: Path, family: str) -> None:
    pytest.importorskip("cuda.bindings.driver")
    sizes = {**SIZES, **(EXPERTS if family == "qwen3_moe" else {})}
    transformers.AutoConfig.for_model(family, **sizes).save_pretrained(tmp_path)
    counted = count_step(HuggingFaceStep(tmp_path, device="cuda", dtype=torch.bfloat16, rows=2, context=16), "cuda")
    assert counted.nodes is not None and counted.launches is not None, counted
    graph, eager = census(counted.nodes), census(counted.launches)
    assert len(graph.layers) == 3 and graph.operations == eager.operations
