"""Text to token ids and back, whatever file the vocabulary came from."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from stepgraph.engine.chat_template import ChatTemplate
from stepgraph.engine.errors import ModelError, RequestError
from stepgraph.engine.fields import one_line, read_json

_REPLACEMENT = "\ufffd"  # what an unfinished UTF-8 sequence decodes to
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")  # what chat templates may name


class Tokenizer:
    """A vocabulary with the model's end tokens and, for chat models, its template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Sequence[int] = (),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        backend.no_truncation()  # a tokenizer.json may carry its training set-up; a prompt is never cut silently
        backend.no_padding()
        self._backend = backend
        self._chat_template = chat_template
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written in the text are recognised.

        add_special_tokens: also add what the model wants around a plain text, such as a begin token. Leave it out
        for text from `apply_chat_template`, which has its own. Raises RequestError for what is not valid Unicode text.
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError):
            raise RequestError(f"a prompt must be a string of valid Unicode, got {text!r:.80}") from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids outside the vocabulary give no text."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def decode_stream(self, skip_special_tokens: bool = True) -> "DecodeStream":
        """A decoder for one sequence whose tokens arrive one at a time."""
        return DecodeStream(self, skip_special_tokens)

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt text for a conversation. Raises ModelError when the model has no template or a broken one,
        RequestError for messages it cannot take."""
        if self._chat_template is None:
            raise ModelError("the model has no chat template; use generate() with a plain prompt")
        return self._chat_template.render(messages, add_generation_prompt)

    def to_dict(self) -> dict[str, Any]:
        """Everything `from_dict` needs, as JSON values."""
        template = self._chat_template
        return {
            "backend": self._backend.to_str(),
            "eos_token_ids": list(self.eos_token_ids),
            "chat_template": template and {"source": template.source, "variables": dict(template.variables)},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Tokenizer":
        """The inverse of `to_dict`."""
        template = values["chat_template"]
        return cls(
            tokenizers.Tokenizer.from_str(values["backend"]),
            eos_token_ids=values["eos_token_ids"],
            chat_template=template and ChatTemplate(**template),
        )


class DecodeStream:
    """Decodes one sequence as its tokens come; never returns half a character.

    Only a short tail is decoded at each step: the last piece that was returned, which gives the decoder its
    context, and the tokens after it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = []
        self._pending: list[int] = []

    def step(self, *token_ids: int) -> str:
        """The text that these tokens complete; empty while a character is unfinished."""
        self._pending.extend(token_ids)
        text = self._pending_text()
        if text.endswith(_REPLACEMENT):
            return ""
        if text:  # a token without text, such as a special one, leaves the context alone
            self._context = self._pending
        self._pending = []
        return text

    def finish(self) -> str:
        """What is left when the sequence ends: an unfinished character comes as U+FFFD."""
        text = self._pending_text()
        self._pending = []
        return text

    def _pending_text(self) -> str:
        before = self._tokenizer.decode(self._context, self._skip)
        return self._tokenizer.decode(self._context + self._pending, self._skip)[len(before) :]


def tokenizer_from_directory(directory: Path, eos_token_ids: Sequence[int]) -> Tokenizer:
    """The tokenizer of a Hugging Face model directory: tokenizer.json and, when there is one, the chat template.

    Raises ModelError when tokenizer.json is missing or is not a tokenizer.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{path} is missing; a model directory needs it (other tokenizer files are not read)")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path} is not a tokenizer: {one_line(error)}") from None
    settings_path = directory / "tokenizer_config.json"
    settings = read_json(settings_path) if settings_path.is_file() else {}
    variables = {name: text for name in _SPECIAL_NAMES if (text := _token_text(settings.get(name))) is not None}
    source = _template_source(directory, settings)
    template = None if source is None else ChatTemplate(source, variables)
    return Tokenizer(backend, eos_token_ids=eos_token_ids, chat_template=template)


def _token_text(value: object) -> str | None:
    """A special token is a string, or an object with its string under "content"."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template_source(directory: Path, settings: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {one_line(error)}") from None
    value = settings.get("chat_template")
    if isinstance(value, list):  # several named templates: the default one is for plain conversations
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise ModelError(f"{directory / 'tokenizer_config.json'}: chat_template must be a string, got {value!r:.80}")
    return value
