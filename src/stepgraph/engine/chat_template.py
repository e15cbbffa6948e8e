"""Turns a conversation into a prompt with the model's own Jinja template, in a sandbox."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from json import dumps
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stepgraph.engine.errors import ModelError, RequestError
from stepgraph.engine.fields import one_line


@dataclass(frozen=True)
class ChatTemplate:
    """A template and the special tokens it may name, such as {"bos_token": "<s>"}.

    It is compiled at its first use: a model whose template is broken can still complete plain prompts.
    """

    source: str
    variables: Mapping[str, str]

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt for `messages`, each {"role": ..., "content": ...}, ending where the assistant's turn begins.

        Raises RequestError for messages that are malformed or that the template refuses, ModelError for a template
        that does not compile or fails.
        """
        _check_messages(messages)
        try:
            return self._compiled.render(
                {
                    **self.variables,
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                    "tools": None,
                    "documents": None,
                }
            )
        except _Refused as refusal:
            raise RequestError(f"the model's chat template refuses these messages: {one_line(refusal)}") from None
        except ModelError:
            raise
        except Exception as error:  # a template is code: it can fail in any way, and every way is the template's fault
            raise ModelError(f"the model's chat template fails: {one_line(error)}") from None

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            return environment.from_string(self.source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"the model's chat template does not compile: {one_line(error)}") from None


class _Refused(Exception):
    """The template called raise_exception: the conversation breaks one of its rules."""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is only its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which prompts are not."""
    return dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _check_messages(messages: object) -> None:
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a non-empty list of {'role': ..., 'content': ...}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"message {index} must be a mapping with 'role' and 'content'")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise RequestError(f"message {index} needs a string under {key!r}, got {message.get(key)!r:.80}")
