"""Builds a tokenizer from the metadata of a GGUF file, which carries no tokenizer.json."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from stepgraph.engine.chat_template import ChatTemplate
from stepgraph.engine.errors import ModelError
from stepgraph.engine.fields import one_line
from stepgraph.engine.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # values of "tokenizer.ggml.token_type"


@dataclass(frozen=True)
class _Split:
    """How text is cut into words before merging."""

    pattern: str | None  # None: GPT-2's own rule
    whole_words: bool = False  # a word that is a token by itself is taken whole, without its merges
    composed: bool = False  # letters and their marks are first joined (Unicode's NFC)


_LLAMA3 = _Split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    whole_words=True,
)

_QWEN2 = _Split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    composed=True,
)

# By "tokenizer.ggml.pre". "smollm" is read as transformers reads it. llama.cpp also cuts every digit off first; the
# two differ only where two or more blanks stand before a digit, since no merge of that vocabulary holds a digit.
_SPLITS: Mapping[str, _Split] = {
    "gpt-2": _Split(None),
    "smollm": _Split(None),
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
}


def tokenizer_from_gguf(metadata: Mapping[str, Any], eos_token_ids: Sequence[int], where: str) -> Tokenizer:
    """The tokenizer that a GGUF file describes: a byte-level BPE ("gpt2").

    metadata: the file's keys with their values as Python objects. Raises ModelError, naming `where`, for another
    kind of tokenizer or one whose parts do not fit together.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    split = _SPLITS.get(pre) if isinstance(pre, str) else None
    if kind != "gpt2" or split is None:
        raise ModelError(
            f"{where}: tokenizer.ggml.model {kind!r} with tokenizer.ggml.pre {pre!r} is not supported; "
            f"known: 'gpt2' with {', '.join(map(repr, _SPLITS))}"
        )
    tokens = _array(metadata, "tokenizer.ggml.tokens", str, where)
    types = _array(metadata, "tokenizer.ggml.token_type", int, where)
    merges = [tuple(merge.split(" ")) for merge in _array(metadata, "tokenizer.ggml.merges", str, where)]
    if len(types) != len(tokens):
        raise ModelError(f"{where}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    try:
        vocabulary = {token: index for index, token in enumerate(tokens)}
        backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split.whole_words))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{where}: the tokenizer's tokens and merges are not a BPE: {one_line(error)}") from None
    if split.composed:
        backend.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=metadata.get("tokenizer.ggml.add_space_prefix") is True, use_regex=split.pattern is None
    )
    if split.pattern is None:
        backend.pre_tokenizer = byte_level
    else:
        words = pre_tokenizers.Split(Regex(split.pattern), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    user_defined = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in user_defined])
    names = _special_names(metadata, tokens, where)
    if metadata.get("tokenizer.ggml.add_bos_token") is True and "bos_token" in names:
        bos = names["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    source = metadata.get("tokenizer.chat_template")
    template = ChatTemplate(source, names) if isinstance(source, str) else None
    return Tokenizer(backend, eos_token_ids=eos_token_ids, chat_template=template)


def _array(metadata: Mapping[str, Any], key: str, kind: type, where: str) -> list[Any]:
    values = metadata.get(key)
    if not isinstance(values, list) or not values or not isinstance(values[0], kind):  # GGUF arrays are of one type
        raise ModelError(f"{where}: {key} must be a non-empty array of {kind.__name__}, got {values!r:.60}")
    return values


def _special_names(metadata: Mapping[str, Any], tokens: Sequence[str], where: str) -> dict[str, str]:
    """The special tokens by the names that chat templates use."""
    names = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is None:
            continue
        if not isinstance(token, int) or not 0 <= token < len(tokens):
            allowed = f"a token id from 0 to {len(tokens) - 1}"
            raise ModelError(f"{where}: tokenizer.ggml.{key}_token_id must be {allowed}, got {token!r}")
        names[name] = tokens[token]
    return names
