"""One request as the engine sees it: tokens, blocks, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from stepgraph.engine.params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]


@dataclass(eq=False)
class Request:
    """A prompt being continued.

    id: arrival order; lower is older.
    seed: of this request's own noise stream, always set.
    adapter: the name of one that is loaded; None: the model alone.
    blocks: KV blocks held, in order of position.
    computed: leading tokens whose keys and values prefill has put into the cache. A decoding request's are all there,
        but for its last token's.
    stops: token ids that end it. ended: a token has; the device computes nothing more for it.
    stint: how often it has lost its row and blocks. A token that was on its way meanwhile is nobody's.
    one_by_one: whether each token must be seen before the next step is launched.
    mailbox: where the device tells its tokens, wherever its row is.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    adapter: str | None = None
    stops: frozenset[int] = frozenset()
    one_by_one: bool = False
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    ended: bool = False
    stint: int = 0
    mailbox: int = 0
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def limit(self) -> int:
        """The most tokens that it may come to, prompt and output."""
        return len(self.prompt) + self.max_tokens

    @property
    def last_token(self) -> int:
        return self.output[-1] if self.output else self.prompt[-1]

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens at positions [start, stop), prompt and output as one sequence."""
        boundary = len(self.prompt)
        return self.prompt[start:stop] + self.output[max(start - boundary, 0) : max(stop - boundary, 0)]
