import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from stepgraph.engine.chat_template import ChatTemplate
from stepgraph.engine.errors import ModelError, RequestError
from stepgraph.engine.gguf_tokenizer import tokenizer_from_gguf
from stepgraph.engine.tokenizer import Tokenizer, tokenizer_from_directory

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
HELLO = [{"role": "user", "content": "Hello"}]


def byte_backend() -> tokenizers.Tokenizer:
    """One token a byte, then <s> and </s>: every text has a token boundary inside each of its characters."""
    backend = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(ALPHABET)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return backend


def metadata(**changes: Any) -> dict[str, Any]:
    tokens = [*ALPHABET, "Ġa", "ab", "<s>", "</s>", "<think>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 258 + [3, 3, 4],
        "tokenizer.ggml.merges": ["Ġ a", "a b"],
        "tokenizer.ggml.bos_token_id": 258,
        "tokenizer.ggml.eos_token_id": 259,
        **{f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()},
    }


def test_special_tokens_are_added_recognised_and_skipped() -> None:
    tokenizer = Tokenizer(byte_backend(), eos_token_ids=(257,))
    assert tokenizer.encode("a") == [256, ALPHABET.index("a")]
    assert tokenizer.encode("<s></s>", add_special_tokens=False) == [256, 257]
    assert tokenizer.decode([256, ALPHABET.index("a"), 257]) == "a"
    assert tokenizer.decode([256, ALPHABET.index("a")], skip_special_tokens=False) == "<s>a"
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (258, (257,))


@pytest.mark.parametrize("text", ["\ud800", b"bytes", None, 3])
def test_what_is_not_text_is_refused(text: Any) -> None:
    with pytest.raises(RequestError, match="valid Unicode"):
        Tokenizer(byte_backend()).encode(text)


def test_training_set_up_in_the_file_never_cuts_or_pads_a_prompt() -> None:
    backend = byte_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    assert len(Tokenizer(backend).encode("0123456789")) == 11


@pytest.mark.parametrize("text", ["plain", "é", "日本語", "👩‍👩‍👧 family", "e\u0301", "a\ufffdb", "\x00\n\t "])
def test_a_stream_gives_whole_characters_and_all_of_them(text: str) -> None:
    tokenizer = Tokenizer(byte_backend())
    stream = tokenizer.decode_stream()
    pieces = [stream.step(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) + stream.finish() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    assert stream.finish() == ""


def test_a_stream_of_any_tokens_equals_decoding_them_at_once() -> None:
    tokenizer = Tokenizer(byte_backend())
    chance = random.Random(0)
    for _ in range(300):
        ids = [chance.randrange(258) for _ in range(chance.randrange(24))]
        stream = tokenizer.decode_stream()
        assert "".join(map(stream.step, ids)) + stream.finish() == tokenizer.decode(ids)
        several, cuts = tokenizer.decode_stream(), sorted([0, *chance.choices(range(len(ids) + 1), k=3), len(ids)])
        pieces = [several.step(*ids[start:stop]) for start, stop in pairwise(cuts)]
        assert "".join(pieces) + several.finish() == tokenizer.decode(ids)


def test_a_stream_ends_an_unfinished_character_with_a_replacement() -> None:
    tokenizer = Tokenizer(byte_backend())
    stream = tokenizer.decode_stream()
    ids = tokenizer.encode("ok日", add_special_tokens=False)[:-1]
    assert [stream.step(token) for token in ids] == ["o", "k", "", ""]
    assert stream.finish() == "\ufffd"


def test_a_stream_keeps_the_blanks_of_a_sentencepiece_decoder() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"▁a": 0, "▁b": 1, "▁": 2}, []))
    backend.decoder = decoders.Metaspace()
    stream = Tokenizer(backend).decode_stream()
    assert [stream.step(token) for token in (0, 1, 2, 1)] == ["a", " b", " ", " b"]


def test_a_tokenizer_survives_its_own_dict() -> None:
    before = Tokenizer(
        byte_backend(), eos_token_ids=(257,), chat_template=ChatTemplate("{{ bos_token }}", {"bos_token": "<s>"})
    )
    after = Tokenizer.from_dict(json.loads(json.dumps(before.to_dict())))
    assert after.encode("é</s>") == before.encode("é</s>") and after.eos_token_ids == (257,)
    assert after.apply_chat_template(HELLO) == "<s>"
    assert Tokenizer.from_dict(Tokenizer(byte_backend()).to_dict()).to_dict()["chat_template"] is None


def test_templates_of_a_directory(tmp_path: Path) -> None:
    byte_backend().save(str(tmp_path / "tokenizer.json"))
    settings = tmp_path / "tokenizer_config.json"

    def rendered() -> str:
        return tokenizer_from_directory(tmp_path, (257,)).apply_chat_template(HELLO)

    with pytest.raises(ModelError, match="no chat template"):
        rendered()
    specials = {"bos_token": {"content": "<s>", "special": True}, "eos_token": "</s>"}
    settings.write_text(json.dumps({**specials, "chat_template": "{{ bos_token }}{{ messages[0].content }}"}))
    assert rendered() == "<s>Hello"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ eos_token }}"}]
    settings.write_text(json.dumps({**specials, "chat_template": named}))
    assert rendered() == "</s>"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['role'] }}{{ eos_token }}")
    assert rendered() == "user</s>"
    (tmp_path / "chat_template.jinja").unlink()
    settings.write_text(json.dumps({"chat_template": 3}))
    with pytest.raises(ModelError, match="chat_template must be a string"):
        rendered()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="is not a tokenizer"):
        rendered()


def test_a_template_has_blocks_trimmed_and_the_usual_helpers() -> None:
    source = (
        "  {% for message in messages %}\n{{ message | tojson }}\n"
        "    {% generation %}\nx\n{% endgeneration %}\n{% break %}{% endfor %}\n"
        "{% if add_generation_prompt %}{{ strftime_now('%Y')[:2] }}{% endif %}"
    )
    template = ChatTemplate(source, {})
    assert template.render([{"role": "user", "content": "<é>"}]) == '{"role": "user", "content": "<é>"}\nx\n20'
    assert not template.render(HELLO, add_generation_prompt=False).endswith("20")


@pytest.mark.parametrize(
    "source",
    [
        "{% for",
        "{{ messages | nosuchfilter }}",
        "{{ missing.attribute }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% include 'other' %}",
        "{% for x in range(10**9) %}{% endfor %}",
    ],
)
def test_a_broken_or_hostile_template_is_the_models_fault(source: str) -> None:
    with pytest.raises(ModelError, match="the model's chat template") as caught:
        ChatTemplate(source, {}).render(HELLO)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("messages", [[], "hi", None, ["hi"], [{"role": "user"}], [{"role": "user", "content": None}]])
def test_bad_messages_are_the_requests_fault(messages: Any) -> None:
    with pytest.raises(RequestError):
        ChatTemplate("", {}).render(messages)


def test_a_template_can_refuse_a_conversation() -> None:
    with pytest.raises(RequestError, match="refuses these messages: roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must\nalternate') }}", {}).render(HELLO)


def test_gguf_metadata_makes_a_byte_level_bpe() -> None:
    tokenizer = tokenizer_from_gguf(metadata(), (259,), "m.gguf")
    assert tokenizer.encode("ab a<think></s>") == [257, 256, 260, 259]
    assert tokenizer.decode([257, 256, 260, 259]) == "ab a<think>"  # user-defined tokens are text, control ones are not
    assert tokenizer.eos_token_ids == (259,)
    assert tokenizer_from_gguf(metadata(ggml__add_bos_token=True), (), "m").encode("ab") == [258, 257]
    template = metadata(chat_template="{{ bos_token }}{{ eos_token }}")
    assert tokenizer_from_gguf(template, (), "m").apply_chat_template(HELLO) == "<s></s>"


def test_llama_3_takes_known_words_whole_and_cuts_its_own_way() -> None:
    changes = {"ggml__pre": "llama-bpe", "ggml__merges": ["Ġ a"]}
    tokenizer = tokenizer_from_gguf(metadata(**changes), (), "m")
    assert tokenizer.encode("ab") == [257]  # a token, though no merge leads to it
    assert tokenizer.decode(tokenizer.encode("x=1234\n\n  y's")) == "x=1234\n\n  y's"


@pytest.mark.parametrize(
    "text", ["x=1234\n\n  y's aab", "e\u0301 naïve İ", "a  b\t\n c", "٣٤٥ ½ Ⅷ日本語🙂", "I'LL a1b22", " ab ab"]
)
def test_qwen_2_joins_marks_and_cuts_as_transformers_does(text: str) -> None:
    from transformers import Qwen2Tokenizer

    data = metadata(ggml__pre="qwen2")
    vocabulary = {token: index for index, token in enumerate(data["tokenizer.ggml.tokens"])}
    reference = Qwen2Tokenizer(vocabulary, [("Ġ", "a"), ("a", "b")], unk_token=None, eos_token="</s>", pad_token=None)
    ids = reference(text).input_ids
    tokenizer = tokenizer_from_gguf(data, (), "m")
    assert tokenizer.encode(text) == ids and tokenizer.decode(ids) == reference.decode(ids)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ggml__model": "llama"}, "'llama' with tokenizer.ggml.pre 'smollm' is not supported; known: 'gpt2' with"),
        ({"ggml__pre": "unheard-of"}, "'unheard-of' is not supported"),
        ({"ggml__pre": None}, "is not supported"),
        ({"ggml__tokens": None}, "tokens must be a non-empty array"),
        ({"ggml__tokens": [1, 2]}, "tokens must be a non-empty array of str"),
        ({"ggml__token_type": [1]}, "1 entries for 261 tokens"),
        ({"ggml__merges": ["a b c"]}, "not a BPE"),
        ({"ggml__merges": ["a c"]}, "not a BPE"),
        ({"ggml__bos_token_id": 261}, "bos_token_id must be a token id from 0 to 260, got 261"),
    ],
)
def test_bad_gguf_tokenizers(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError) as caught:
        tokenizer_from_gguf(metadata(**changes), (), "m.gguf")
    assert says in str(caught.value) and "m.gguf" in str(caught.value) and "\n" not in str(caught.value)
