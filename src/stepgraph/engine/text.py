"""Tokens to text as they arrive, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence

from stepgraph.engine.tokenizer import Tokenizer


class TextStream:
    """One request's growing text.

    Text that could still turn out to be the start of a stop string is held back, so that what was handed out is
    never taken back. A stop string itself is not part of the text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._decoder = tokenizer.decode_stream()
        self._stop = stop
        self._handed_out = 0
        self.text = ""
        self.stopped = False

    def push(self, *tokens: int) -> str:
        """Add tokens, with stop strings one at a time; returns the text that has become certain."""
        return self._advance(self._decoder.step(*tokens), held_back=True)

    def finish(self) -> str:
        """No more tokens: returns what was held back."""
        return "" if self.stopped else self._advance(self._decoder.finish(), held_back=False)

    def _advance(self, new: str, held_back: bool) -> str:
        self.text += new
        ends = [at for stop in self._stop if (at := self.text.find(stop, self._handed_out)) >= 0]
        if ends:
            self.text = self.text[: min(ends)]
            self.stopped = True
        certain = len(self.text)
        if held_back and not self.stopped:
            certain -= max((self._open_match(stop) for stop in self._stop), default=0)
        delta = self.text[self._handed_out : certain]
        self._handed_out = max(certain, self._handed_out)
        return delta

    def _open_match(self, stop: str) -> int:
        """How many of the last characters are the beginning of `stop`."""
        longest = min(len(stop) - 1, len(self.text) - self._handed_out)
        return next((n for n in range(longest, 0, -1) if self.text.endswith(stop[:n])), 0)
