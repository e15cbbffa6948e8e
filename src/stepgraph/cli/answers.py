"""The answers of `stepgraph run`, as they arrive."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepgraph.engine import TextDelta


class Answers:
    """Prints text as it arrives: one prompt's answer piece by piece, several prompts' answers as each is finished."""

    def __init__(self, prompts: list[str], *, quiet: bool) -> None:
        self.first_at: float | None = None
        self._prompts, self._quiet = prompts, quiet
        self._texts = [""] * len(prompts)

    def __call__(self, delta: TextDelta) -> None:
        from stepgraph.cli.console import print_answer, write

        if self.first_at is None:
            self.first_at = time.perf_counter()
        if self._quiet:
            return
        if len(self._prompts) == 1:
            write(delta.text)
            return
        self._texts[delta.index] += delta.text
        if delta.finish_reason is not None:
            print_answer(delta.index + 1, len(self._prompts), self._prompts[delta.index], self._texts[delta.index])

    def end(self) -> None:
        from stepgraph.cli.console import write

        if not self._quiet and len(self._prompts) == 1:
            write("\n\n")
