"""Adapters: tokens equal those of PEFT's merged weights, alone and mixed; they come and go; too many run eagerly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("peft")

from engine.adapters import write_adapter, write_merged
from engine.hf import greedy, write_checkpoint

from stepgraph.engine import LLM, LoraConfig, SamplingParams
from stepgraph.engine.errors import ModelError, RequestError
from stepgraph.engine.memory_rows import engine_rows
from stepgraph.runtime import ConfigError, GraphConfig, Reason
from stepgraph.runtime.memory.ledger import Captured, make_ledger

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
LORA = LoraConfig(slots=3, max_rank=16)
PROMPTS = [[7 * row % 251 + 1, *range(row, 2 * row + 1)] for row in range(13)]
SETTINGS = {  # what each adapter has of its own
    "one": {"r": 8},
    "two": {"r": 3, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "three": {"r": 16, "lora_alpha": 40, "layers_to_transform": [1]},
}
MIXED = [None, "one", "two", "three"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def saved(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    each = enumerate(SETTINGS.items())
    return {name: write_adapter(base, root / name, seed=seed, **settings) for seed, (name, settings) in each}


@pytest.fixture(scope="module")
def want(base: Path, saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, list]:
    """By adapter, the greedy tokens of every prompt, from transformers with merged weights."""
    root = tmp_path_factory.mktemp("merged")
    folders = {None: base} | {name: write_merged(base, path, root / name) for name, path in saved.items()}
    return {name: [greedy(folder, prompt, 12) for prompt in PROMPTS] for name, folder in folders.items()}


@pytest.fixture(scope="module", params=["full", "breakable", "disabled"])
def llm(request: pytest.FixtureRequest, base: Path, saved: dict[str, Path]) -> LLM:
    engine = LLM(base, device="cpu", max_num_seqs=16, graphs=request.param, lora=LORA)
    for name, folder in saved.items():
        engine.load_adapter(name, folder)
    return engine


def tokens(llm: LLM, prompts: list, adapter: object, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, adapter=adapter)]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MIXED)
def test_one_alone_equals_the_merged_weights(llm: LLM, want: dict, name: str | None) -> None:
    assert want["one"] != want[None] != want["two"] != want["three"]
    assert tokens(llm, PROMPTS[:5], name) == want[name][:5]
    assert tokens(llm, PROMPTS[5:6], name) == want[name][5:6]


def test_mixed_in_a_batch_of_13_each_row_has_its_own(llm: LLM, want: dict) -> None:
    mine = [MIXED[row % 4] for row in range(13)]
    assert tokens(llm, PROMPTS, mine) == [want[name][row] for row, name in enumerate(mine)]


def test_rows_that_leave_early_take_their_adapter_along(llm: LLM, want: dict) -> None:
    mine = [MIXED[row % 4] for row in range(13)]
    params = [SamplingParams(temperature=0, max_tokens=1 + row * 5 % 12, ignore_eos=True) for row in range(13)]
    outputs = llm.generate(PROMPTS, params, adapter=mine)
    for row, (output, name) in enumerate(zip(outputs, mine, strict=True)):
        assert output.outputs[0].token_ids == want[name][row][: params[row].max_tokens]


def test_more_adapters_than_captured_run_eagerly_and_say_why(base: Path, saved: dict, want: dict) -> None:
    llm = LLM(base, device="cpu", max_num_seqs=4, lora=LoraConfig(slots=3, max_rank=16, cases=(0, 2)))
    for name, folder in saved.items():
        llm.load_adapter(name, folder)
    assert tokens(llm, PROMPTS[:2], ["one", "two"]) == [want["one"][0], want["two"][1]]
    assert Reason.TOO_MANY_LORAS not in llm.stats.as_dict()["reasons"]
    assert tokens(llm, PROMPTS[:3], list(saved)) == [want[name][row] for row, name in enumerate(saved)]
    assert llm.stats.as_dict()["reasons"][Reason.TOO_MANY_LORAS] == 12


def test_graphs_are_captured_by_case_and_the_live_count_is_rounded_up(base: Path, saved: dict, want: dict) -> None:
    llm = LLM(base, device="cpu", max_num_seqs=2, lora=LORA)
    assert {key.num_loras for key in llm.capture_report.graphs} == {0, 1, 2, 3}
    llm.load_adapter("two", saved["two"])
    seen = []
    run = llm.core.runner.__class__.__call__

    def noted(runner, **inputs):
        output = run(runner, **inputs)
        seen.append(output.decision.key.num_loras)
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.core.runner.__class__, "__call__", noted)
        assert tokens(llm, PROMPTS[:1], None) == want[None][:1] and set(seen) == {0}
        seen.clear()
        assert tokens(llm, PROMPTS[:1], "two") == want["two"][:1] and set(seen) == {1}


def test_they_come_and_go_while_others_run(base: Path, saved: dict, want: dict) -> None:
    llm = LLM(base, device="cpu", max_num_seqs=4, lora=LoraConfig(slots=2, max_rank=16))
    llm.load_adapter("one", saved["one"])
    llm.load_adapter("two", saved["two"])
    graphs = dict(llm.capture_report.graphs)
    stream = llm.stream(PROMPTS[3:4], GREEDY, adapter="one")
    next(stream)
    (running,) = llm.core.scheduler.rows
    with pytest.raises(ModelError, match="all 2 slots are taken, by one, two"):
        llm.load_adapter("three", saved["three"])
    with pytest.raises(RequestError, match="1 requests under way use it"):
        llm.unload_adapter("one")
    with pytest.raises(RequestError, match="under way"):
        llm.load_adapter("one", saved["two"])
    llm.unload_adapter("two")
    llm.load_adapter("three", saved["three"])
    assert llm.adapters == ("one", "three")
    assert tokens(llm, PROMPTS[:2], "three", SHORT) == [want["three"][row][:3] for row in (0, 1)]
    for _ in stream:
        pass
    assert running.output == want["one"][3]
    llm.load_adapter("one", saved["two"])  # in place of the old one, though smaller
    assert tokens(llm, PROMPTS[:3], "one") == want["two"][:3]
    assert llm.core.runner.capture_report.graphs == graphs
    llm.core.runner.check_addresses()


def test_a_stream_that_begins_after_its_adapter_went_is_refused(base: Path, saved: dict) -> None:
    llm = LLM(base, device="cpu", max_num_seqs=1, graphs="disabled", lora=LORA)
    llm.load_adapter("one", saved["one"])
    stream = llm.stream("Hello", GREEDY, adapter="one")
    llm.unload_adapter("one")
    with pytest.raises(RequestError, match="'one' is not loaded; loaded are: none"):
        next(stream)
    assert not llm.core.scheduler.has_work


def test_an_adapter_that_is_not_there_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="'four' is not loaded; loaded are: one, two, three"):
        llm.generate("Hello", adapter="four")
    with pytest.raises(RequestError, match="2 adapters for 1 prompts"):
        llm.generate("Hello", adapter=["one", "two"])
    with pytest.raises(RequestError, match="adapters are names: one for all prompts, or a list"):
        llm.generate("Hello", adapter={"one": 1})  # type: ignore[arg-type]
    for name in ("four", ["one"], None):
        with pytest.raises(RequestError, match="not loaded"):
            llm.unload_adapter(name)


def test_without_room_for_adapters_there_are_none(base: Path, saved: dict) -> None:
    llm = LLM(base, device="cpu", max_num_seqs=1, graphs="disabled")
    assert llm.adapters == ()
    for refused in (lambda: llm.load_adapter("one", saved["one"]), lambda: llm.generate("Hello", adapter="one")):
        with pytest.raises(ConfigError, match="start the engine with lora=LoraConfig"):
            refused()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "slots is 0"),
        ({"max_rank": 1.5}, "max_rank is 1.5"),
        ({"max_rank": 129}, "from 1 to 128"),
        ({"slots": 2, "cases": (0, 3)}, "must end at 1 to 2"),
        ({"slots": 2, "cases": (0,)}, "must end at 1 to 2"),
        ({"cases": (2, 1)}, "must ascend"),
    ],
)
def test_room_that_is_none_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoraConfig(**options)


def test_room_as_it_is_taken() -> None:
    assert LoraConfig(slots=5).cases == (0, 1, 2, 4, 5)
    assert LoraConfig(slots=1).cases == (0, 1)
    assert [LoraConfig(max_rank=rank).rank for rank in (1, 16, 17, 64)] == [16, 16, 32, 64]


def test_a_graph_config_may_have_cases_of_its_own(base: Path) -> None:
    llm = LLM(base, device="cpu", max_num_seqs=1, graphs=GraphConfig(lora_cases=(0, 3)), lora=LORA)
    assert llm.core.runner.config.lora_cases == (0, 3)
    with pytest.raises(ConfigError, match="must end at 1 to 3"):
        LLM(base, device="cpu", max_num_seqs=1, graphs=GraphConfig(lora_cases=(0, 9)), lora=LORA)


def test_every_graph_is_as_eager_also_with_empty_slots(base: Path, saved: dict, want: dict) -> None:
    llm = LLM(base, device="cpu", max_num_seqs=4, chunk_tokens=160, lora=LORA)  # of 128 tokens are the longest
    llm.load_adapter("one", saved["one"])
    report = llm.verify()
    assert report.ok, str(report)
    assert {one.key.num_loras for one in report.keys} == {0, 1, 2, 3}
    assert tokens(llm, PROMPTS[:2], "one") == want["one"][:2]


def test_the_ledger_tells_graphs_with_adapters_apart(base: Path) -> None:
    llm = LLM(base, device="cpu", max_num_seqs=2, chunk_tokens=16, lora=LoraConfig(slots=2, cases=(0, 2)))
    rows = engine_rows(llm.core)
    weights = next(row.nbytes for row in rows if row.name == "adapters")
    assert weights == sum(tensor.nbytes for tensor in llm.core.lora.tensors.values())
    assert llm.memory["adapters"] == weights
    families = make_ledger([Captured(llm.capture_report)], rows).families()
    assert list(families) == ["prefill", "prefill with adapters", "decode", "decode with adapters"]
    assert families["decode"].graphs == families["decode with adapters"].graphs == 2
    assert families["decode with adapters"].pool_bytes > families["decode"].pool_bytes
    assert families["decode with adapters"].capture_seconds > 0


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["full", "breakable", "disabled"])
@pytest.mark.parametrize("operations", ["unfused", "fused", "reference"])
def test_tokens_on_a_gpu(base: Path, saved: dict, want: dict, graphs: str, operations: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    llm = LLM(base, device="cuda", dtype="float32", max_num_seqs=16, graphs=graphs, operations=operations, lora=LORA)
    for name, folder in saved.items():
        llm.load_adapter(name, folder)
    mine = [MIXED[row % 4] for row in range(13)]
    assert tokens(llm, PROMPTS, mine) == [want[name][row] for row, name in enumerate(mine)]
    if graphs != "disabled":
        assert llm.verify().ok
