"""`stepgraph run`: decode prompts with a model, print the answers, and account for every step."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepgraph.cli.options import default_device

if TYPE_CHECKING:
    from stepgraph.comm.group import Group
    from stepgraph.engine import LLM
    from stepgraph.engine.graphs import Graphs
    from stepgraph.engine.loops import StepsPerLaunch
    from stepgraph.engine.parallel import TensorParallel

MOST_SEQS = 256
"""Requests decoded at once where the user names no number and gives more prompts."""
LONGEST_RULE = 512
"""vLLM's and SGLang's rules are taken up to here; the engine leaves out the rungs that its batch cannot reach."""

_FEWER = "start fewer, or all on the CPU with --device cpu"
_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "seed",
)


@dataclass(frozen=True)
class RunOptions:
    """The options of the command line; None where the default depends on the machine, the model or the prompts."""

    prompts: tuple[str, ...] = ()
    file: Path | None = None
    model: str | None = None
    graphs: Graphs = "full"
    compile: str = "off"
    ladder: str = "vllm"
    device: str | None = None
    attention: str | None = None
    operations: str | None = None
    dtype: str = "auto"
    adapter: Path | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_num_seqs: int | None = None
    memory_fraction: float | None = None
    kv_bytes: int | None = None
    lazy: bool = False
    tp: int | None = None
    tables: Path | None = None
    steps_per_launch: str = "1"
    chat: bool = True
    as_json: bool = False

    @property
    def candidates(self) -> int:
        """Tokens that each of several ranks offers: as many as the filters asked for need."""
        from stepgraph.engine.parallel.tensor_parallel import CANDIDATES

        asked = self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
        return max(CANDIDATES, self.top_k) if asked else 0

    def sampling(self) -> dict[str, Any]:
        """The fields of SamplingParams among them."""
        return {name: getattr(self, name) for name in _SAMPLING}


def run(options: RunOptions) -> int:
    """Decode and print; with several ranks rank 0 prints. Returns the exit code: of a rank that failed, or 0.

    Raises:
        StepgraphError: an option, a prompt or the model cannot work.
    """
    from stepgraph.cli.ranks import joined, launch, must_launch
    from stepgraph.runtime.errors import ConfigError

    if options.tables is not None and not options.tables.is_dir():
        raise ConfigError(f"tables: {options.tables} is no folder; `stepgraph tune allreduce --out` makes one")
    if options.tp is not None and must_launch(options.tp):
        _require_ranks(options, options.tp)
        return launch(options.tp)
    with joined(options.tp, options.device, fewer=_FEWER) as group:
        if group is None and options.tables is not None:
            raise ConfigError("tables: they are of all-reduces among several ranks; give --tp too, or leave them out")
        _run(options, None if group is None else _parallel(group, options))
    return 0


def _require_ranks(options: RunOptions, ranks: int) -> None:
    """What can be known before any rank is started, which takes seconds. A model of the hub is fetched here, once.

    Raises:
        StepgraphError: what ranks cannot have, too few GPUs, no model, heads that cannot be dealt out, or no table.
    """
    from stepgraph.cli.ranks import require_gpus
    from stepgraph.comm.thresholds import read_tables
    from stepgraph.engine.checkpoint import read_model_config
    from stepgraph.engine.demo import demo_model_path
    from stepgraph.engine.loops import most_steps
    from stepgraph.engine.parallel import Shard, require_plain

    require_plain(
        lazy=options.lazy,
        compiled=options.compile != "off",
        adapters=options.adapter is not None,
        steps_per_launch=most_steps(_steps_per_launch(options, num_prompts=0)),
    )
    require_gpus(ranks, default_device(options.device), _FEWER)
    if options.tables is not None:
        read_tables(options.tables, ranks)
    Shard(read_model_config(options.model if options.model is not None else demo_model_path()), 0, ranks)


def _parallel(group: Group, options: RunOptions) -> TensorParallel:
    from stepgraph.comm.communicator import make_all_reduce
    from stepgraph.engine.parallel import TensorParallel

    return TensorParallel(group, make_all_reduce(group, tables=options.tables), candidates=options.candidates)


def _run(options: RunOptions, parallel: TensorParallel | None) -> None:
    from stepgraph.cli.answers import Answers
    from stepgraph.cli.console import print_memory, print_run
    from stepgraph.cli.run_report import make_report
    from stepgraph.engine import SamplingParams

    speaks = parallel is None or parallel.group.rank == 0
    prompts = gather_prompts(options) if speaks else []
    if parallel is not None:
        prompts = parallel.share(prompts)
    params = SamplingParams(**options.sampling())
    llm = start(options, len(prompts), parallel)
    if speaks and not options.as_json:
        print_memory(llm.memory.as_dict(), llm.core.kv_memory.num_blocks)
    printer = Answers(prompts, quiet=options.as_json or not speaks)
    requests = [_in_chat(llm, prompt) for prompt in prompts] if options.chat else prompts
    started = time.perf_counter()
    outputs = llm.generate(requests, params, adapter=_adapter_name(options), stream=printer)
    stopped = time.perf_counter()
    printer.end()
    if not speaks:
        return
    report = make_report(options, llm, prompts, outputs, started, printer.first_at or stopped, stopped)
    if options.as_json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        print_run(report)


def gather_prompts(options: RunOptions) -> list[str]:
    """Prompts from arguments, from a file, and from standard input where '-' asks for it or nothing else is given.

    A blank line of a file or of standard input is no prompt; an argument is one whatever it holds.

    Raises:
        RequestError: no prompt at all, an empty one, or a file that cannot be read.
    """
    from stepgraph.engine.errors import RequestError

    prompts: list[str] = []
    for prompt in options.prompts:
        prompts.extend(_lines(_read_stdin()) if prompt == "-" else [prompt])
    if options.file is not None:
        try:
            prompts.extend(_lines(options.file.read_text(encoding="utf-8-sig")))
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"prompts: {options.file} cannot be read: {_reason(error)}") from None
    if not options.prompts and options.file is None and sys.stdin is not None and not sys.stdin.isatty():
        prompts.extend(_lines(_read_stdin()))
    if not prompts:
        raise RequestError("prompts: none given; name them as arguments, with --file, or on standard input")
    for number, prompt in enumerate(prompts, start=1):
        if not prompt.strip():
            raise RequestError(f"prompts: number {number} is empty; give it a text or leave it out")
    return prompts


def start(options: RunOptions, num_prompts: int, parallel: TensorParallel | None = None) -> LLM:
    """Load the model with its adapter and capture its graphs, for as many requests at once as there are prompts."""
    from stepgraph.cli.adapter import load_into, room_for
    from stepgraph.cli.console import ProgressBar
    from stepgraph.engine import LLM
    from stepgraph.engine.demo import demo_model_path
    from stepgraph.runtime import Ladder

    lora = room_for(options.adapter)
    rows = min(num_prompts, MOST_SEQS) if options.max_num_seqs is None else options.max_num_seqs
    quiet = options.as_json or (parallel is not None and parallel.group.rank > 0)
    with ProgressBar(quiet=quiet) as progress:
        llm = LLM(
            options.model if options.model is not None else demo_model_path(),
            device=options.device if parallel is None else str(parallel.group.device),
            dtype=options.dtype,
            graphs=options.graphs,
            compile=options.compile,
            ladder=Ladder.parse(options.ladder, max(LONGEST_RULE, rows)),
            max_num_seqs=rows,
            memory_fraction=options.memory_fraction,
            kv_bytes=options.kv_bytes,
            lazy=options.lazy,
            steps_per_launch=_steps_per_launch(options, num_prompts),
            attention=options.attention,
            operations=options.operations,
            lora=lora,
            parallel=parallel,
            progress=progress,
        )
    load_into(llm, options.adapter)
    return llm


def _steps_per_launch(options: RunOptions, num_prompts: int) -> StepsPerLaunch:
    """`auto` stays that where text is printed as it arrives; otherwise nobody waits for single tokens.

    Raises:
        ConfigError: neither `auto` nor a whole number of at least 1.
    """
    from stepgraph.engine.loops import most_steps

    asked = options.steps_per_launch
    if asked == "auto" and num_prompts == 1 and not options.as_json:
        return "auto"
    return most_steps("auto" if asked == "auto" else int(asked) if asked.isdecimal() else asked)


def _adapter_name(options: RunOptions) -> str | None:
    return None if options.adapter is None else str(options.adapter)


def _in_chat(llm: LLM, prompt: str) -> list[int]:
    return llm.chat_prompt([{"role": "user", "content": prompt}])


def _read_stdin() -> str:
    return sys.stdin.read() if sys.stdin is not None else ""  # None where it was closed


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else f"it is not UTF-8 ({error.reason})"
