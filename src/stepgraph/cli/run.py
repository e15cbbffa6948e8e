"""`stepgraph run`: decode prompts with a model, print the answers, and account for every step."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__

if TYPE_CHECKING:
    from ..engine import LLM, SamplingParams
    from ..engine.llm import RequestOutput
    from ..runtime import Ladder

MOST_SEQS = 256
"""Requests decoded at once where the user names no number."""
LONGEST_RULE = 512
"""The rules' ladders are taken up to here and then cut to the batch; vLLM's own default ends here as well."""


@dataclass(frozen=True)
class RunOptions:
    """The options of the command line, as given; None where the default depends on the machine or the prompts."""

    prompts: tuple[str, ...] = ()
    file: Path | None = None
    model: str | None = None
    graphs: str = "full"
    ladder: str = "vllm"
    device: str | None = None
    attention: str | None = None
    dtype: str | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_num_seqs: int | None = None
    chat: bool = True
    as_json: bool = False


def run(options: RunOptions) -> None:
    """Run the command. Raises StepgraphError where an option, a prompt or the model cannot work."""
    prompts = gather_prompts(options)
    batch = min(len(prompts), MOST_SEQS) if options.max_num_seqs is None else options.max_num_seqs
    ladder = choose_ladder(options.ladder, batch)
    params = _sampling_params(options)
    llm, seconds_to_start = _start(options, ladder, batch)
    started = time.perf_counter()
    outputs = _generate(llm, prompts, params, options)
    seconds = {"start": seconds_to_start, "generate": time.perf_counter() - started}
    report = _report(options, llm, prompts, outputs, seconds)
    if options.as_json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        from .console import print_run

        print_run(report)


def gather_prompts(options: RunOptions) -> list[str]:
    """Prompts from arguments, a file, and standard input where '-' asks for it or nothing else is given.

    Blank lines of a file or of standard input separate prompts and are none; an argument stands as it is.

    Raises:
        RequestError: no prompt at all, an empty one, or a file that cannot be read.
    """
    from ..engine.errors import RequestError

    prompts: list[str] = []
    for prompt in options.prompts:
        prompts.extend(_lines(sys.stdin.read()) if prompt == "-" else [prompt])
    if options.file is not None:
        try:
            prompts.extend(_lines(options.file.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"prompts: cannot read {options.file}: {error}") from None
    if not options.prompts and options.file is None and not sys.stdin.isatty():
        prompts.extend(_lines(sys.stdin.read()))
    if not prompts:
        raise RequestError("prompts: none given; name them as arguments, with --file, or on standard input")
    for number, prompt in enumerate(prompts, start=1):
        if not prompt.strip():
            raise RequestError(f"prompts: number {number} is empty; give it a text or leave it out")
    return prompts


def choose_ladder(text: str, batch: int) -> Ladder:
    """The ladder that --ladder names. vLLM's and SGLang's rules end at the rung that holds `batch` requests,
    since larger sizes would be captured and never used; an explicit list stands as given.

    Raises:
        ConfigError: a ladder that cannot be read, or one with no room for the batch.
    """
    from ..runtime import ConfigError, Ladder

    if batch < 1:
        raise ConfigError(f"--max-num-seqs: {batch} leaves no room for a request; it must be at least 1")
    ladder = Ladder.parse(text, max(LONGEST_RULE, batch))
    top = ladder.rung(batch)
    if top is None:
        raise ConfigError(
            f"ladder: {text} has no room for {batch} requests at once; "
            f"add a size of at least {batch}, or lower --max-num-seqs to {ladder.max_size}"
        )
    return ladder if ladder.rule == "explicit" else ladder.upto(top)
