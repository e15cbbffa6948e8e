"""Takes requests in: what is asked becomes a request that the engine can serve, or is refused with what to change."""

from __future__ import annotations

from stepgraph.engine.call import Asked, Prompt, is_token
from stepgraph.engine.core import EngineCore
from stepgraph.engine.ending import STOP_IDS
from stepgraph.engine.errors import RequestError
from stepgraph.engine.kv_blocks import blocks_for
from stepgraph.engine.lora.serving import require_slots
from stepgraph.engine.request import Request
from stepgraph.engine.text import TextStream
from stepgraph.engine.tokenizer import Tokenizer
from stepgraph.engine.tracked import TrackedRequest


class Intake:
    """Of one engine; numbers its requests.

    streams_bind: whether a request that streams has each token seen before the next step is launched.
    """

    def __init__(self, core: EngineCore, tokenizer: Tokenizer, *, streams_bind: bool) -> None:
        self._core, self._tokenizer, self._streams_bind = core, tokenizer, streams_bind
        self._vocab_size = core.model.config.vocab_size
        self._next_id = 0

    def take(self, index: int, asked: Asked, *, streams: bool) -> TrackedRequest:
        """The prompt `index` of a call, not queued yet. streams: whether its text is wanted token by token.

        Raises:
            RequestError: a prompt, parameters or an adapter that this engine cannot have.
        """
        prompt, params, adapter, seed = asked
        self._require_adapter(adapter)
        ids = self._ids(index, prompt)
        if params.penalises and not self._core.penalties:
            raise RequestError(f"prompt {index} asks for a penalty, and penalties are off; use LLM(penalties=True)")
        max_tokens = min(params.max_tokens, self._core.max_model_len - len(ids))
        self._require_room(index, len(ids) + max_tokens)
        if self._core.parallel is not None:
            self._core.parallel.require(params)
        ends = () if params.ignore_eos else self._tokenizer.eos_token_ids
        stops = frozenset(params.stop_token_ids) | frozenset(ends)
        one_by_one = bool(params.stop) or len(stops) > STOP_IDS or (streams and self._streams_bind)
        request = Request(self._next_id, ids, params, seed, max_tokens, adapter, stops, one_by_one)
        self._next_id += 1
        text = TextStream(self._tokenizer, params.stop)
        heard = streams or one_by_one
        return TrackedRequest(index, prompt if isinstance(prompt, str) else None, request, text, heard=heard)

    def require_still(self, one: TrackedRequest) -> None:
        """A stream begins when it is first read, and much may come before. Raises RequestError: the cache has shrunk
        too far for it, or its adapter is gone."""
        self._require_room(one.index, one.request.limit)
        self._require_adapter(one.request.adapter)

    def _ids(self, index: int, prompt: Prompt) -> list[int]:
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not all(is_token(token) for token in ids):
            raise RequestError(f"prompt {index}: token ids are whole numbers; give text or a list of ids")
        ids = [int(token) for token in ids]
        max_len = self._core.max_model_len
        if not ids:
            raise RequestError(f"prompt {index} is empty; give at least one token")
        if len(ids) >= max_len:
            raise RequestError(
                f"prompt {index} has {len(ids)} tokens; the model allows {max_len} with at least one to generate"
            )
        bad = next((token for token in ids if not 0 <= token < self._vocab_size), None)
        if bad is not None:
            raise RequestError(f"prompt {index}: token {bad} is outside the vocabulary of {self._vocab_size}")
        return ids

    def _require_adapter(self, name: str | None) -> None:
        if name is not None:
            require_slots(self._core).slot(name)

    def _require_room(self, index: int, tokens: int) -> None:
        needed, capacity = blocks_for(tokens), self._core.scheduler.pool.capacity
        if needed > capacity:
            raise RequestError(
                f"prompt {index} may need {needed} KV blocks and the cache has {capacity}; "
                f"lower max_tokens or give the cache more blocks"
            )
