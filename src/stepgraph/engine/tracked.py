"""A request with what only the text side knows of it: its growing text, where it ends, and what is still to be told."""

from __future__ import annotations

from collections import deque

from stepgraph.engine.outputs import CompletionOutput, RequestOutput, TextDelta
from stepgraph.engine.request import FinishReason, Request
from stepgraph.engine.text import TextStream


class TrackedRequest:
    """One prompt of a call.

    index: the prompt's place in the call.
    heard: whether its text is wanted, or may end it, with each token. Others have no deltas and end as the device says.
    deltas: text that has become certain and that the caller has not been given yet.
    """

    def __init__(self, index: int, prompt: str | None, request: Request, text: TextStream, *, heard: bool) -> None:
        self.index, self.request, self.heard = index, request, heard
        self.deltas: deque[TextDelta] = deque()
        self._prompt, self._text = prompt, text
        self._taken = 0  # tokens; the request may have more already

    @property
    def finished(self) -> bool:
        return self.request.finish_reason is not None

    def catch_up(self) -> None:
        """Take in the tokens that the request has got since; one may end it."""
        if not self.heard and not self.request.ended:
            self.go_on()
        output = self.request.output
        while self._taken < len(output) and not self.finished:
            self._accept(output[self._taken])

    def go_on(self) -> None:
        """As `catch_up`, where nobody hears it and none of the tokens has ended it."""
        output = self.request.output
        self._text.push(*output[self._taken :])
        self._taken = len(output)

    def _accept(self, token: int) -> None:
        request, text = self.request, self._text
        self._taken += 1
        reason: FinishReason | None = None
        if token in request.stops:
            reason, new = "stop", text.finish()
        else:
            new = text.push(token)
            if text.stopped:
                reason = "stop"
            elif self._taken >= request.max_tokens:
                reason = "length"
                new += text.finish()
        request.finish_reason = reason
        if new or reason:
            self.deltas.append(TextDelta(request.id, self.index, new, reason))

    def result(self) -> RequestOutput:
        request = self.request
        output = CompletionOutput(0, self._text.text, list(request.output), request.finish_reason)
        return RequestOutput(request.id, self._prompt, list(request.prompt), [output], self.finished)
