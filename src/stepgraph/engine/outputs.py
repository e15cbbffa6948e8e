"""What a finished or running request looks like to the caller, in the shape that vLLM's users know."""

from __future__ import annotations

from dataclasses import dataclass

from stepgraph.engine.request import FinishReason


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation. `token_ids` includes the end token, `text` does not."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class RequestOutput:
    """A request with its continuation; `prompt` is None where token ids were given."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool


@dataclass(frozen=True)
class TextDelta:
    """New text of one request. `index` is the prompt's place in the call; the last delta carries the reason."""

    request_id: int
    index: int
    text: str
    finish_reason: FinishReason | None
