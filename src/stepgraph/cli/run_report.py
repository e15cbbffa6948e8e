"""What `stepgraph run` knows of a run, as one mapping: --json prints it, and the closing table is drawn from it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from stepgraph import __version__
from stepgraph.cli.run import RunOptions
from stepgraph.engine import LLM, RequestOutput
from stepgraph.runtime import Decision
from stepgraph.runtime.graphs import BreakTotal
from stepgraph.runtime.naming import describe


def make_report(
    options: RunOptions,
    llm: LLM,
    prompts: list[str],
    outputs: list[RequestOutput],
    started: float,
    first_at: float,
    stopped: float,
) -> dict[str, Any]:
    """All that is known of a run, ready for JSON.

    Steps are `uniform`, which is decoding, or `mixed`, which is prefill and the decoding beside it. rows: tokens that
    were computed; the same as requests where steps are uniform. captured_sizes: in requests, captured_tokens: those of
    mixed steps. coverage, coverage_mixed: what batches of 1, 2, 3, ... requests, or tokens, are padded to; null: eager.
    projections: by captured size, what computes each and why, where that depends on the size.
    compile: what compiling has taken in all, null where nothing is compiled; compiled_while_serving: of that.
    loops: launches that ran several steps, those steps, and why others were launched one by one, by reason.
    parallel: of several ranks, how many, and by captured size what each graph has frozen of its collectives; else null.
    breaks: of breakable graphs, how often each was called at replays, and the host's µs a call; null: never called.
    started, first_at, stopped: seconds on one clock: before the first prompt, at the first text, after the last.
    tokens_per_second: `overall` is all generated tokens over the whole time; `decode` leaves out each request's
    first token and the time until the first text; null where there is nothing to divide.
    """
    capture, stats, runner = llm.capture_report, llm.stats.as_dict(), llm.core.runner
    sizes = sorted(key.num_reqs for key in capture.graphs if key.num_reqs is not None)
    compiled = runner.compile_total()
    generated = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "model": options.model or "demo model SmolLM2-135M-Instruct",
        "device": str(llm.core.model.device),
        "dtype": str(llm.core.model.dtype).removeprefix("torch."),
        "attention": llm.core.attention.name,
        "operations": llm.core.model.operations.name,
        "adapter": None if options.adapter is None else str(options.adapter),
        "parallel": _parallel(llm),
        "graphs": options.graphs,
        "compile": None if compiled is None else asdict(compiled),
        "ladder": options.ladder,
        "changes": [asdict(change) for change in llm.resolution.changes],
        "captured_sizes": sizes,
        "projections": {size: told for size in sizes if (told := llm.core.model.describe(size))},
        "captured_tokens": sorted(key.num_tokens for key in capture.graphs if key.num_reqs is None),
        "coverage": padded(runner.coverage()),
        "coverage_mixed": padded(runner.coverage_mixed()),
        "dropped_sizes": {describe(key): reason for key, reason in capture.dropped.items()},
        "sampling": options.sampling(),
        "results": [_result(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)],
        "steps": stats["steps"],
        "memory": llm.memory.as_dict() | {"kv_blocks": llm.core.kv_memory.num_blocks},
        "rows": {"real": stats["real_rows"], "padded": stats["padded_rows"]},
        "modes": stats["modes"],
        "reasons": stats["reasons"],
        "routes": stats["routes"],
        "compiled_while_serving": {"steps": stats["compiles"], "seconds": stats["compile_seconds"]},
        "loops": stats["loops"],
        "breaks": [_break_cost(name, total) for name, total in runner.break_costs().items()],
        "tokens": {"prompt": sum(len(output.prompt_token_ids) for output in outputs), "generated": generated},
        "seconds": {"load": llm.load_seconds, "capture": capture.seconds, "generate": stopped - started},
        "tokens_per_second": {
            "decode": _rate(generated - len(outputs), stopped - first_at),
            "overall": _rate(generated, stopped - started),
        },
        "versions": {"stepgraph": __version__, "torch": torch.__version__},
    }


def _parallel(llm: LLM) -> dict[str, Any] | None:
    parallel = llm.core.parallel
    return None if parallel is None else {"ranks": parallel.group.world, "collectives": parallel.frozen()}


def padded(coverage: list[Decision]) -> list[int | None]:
    return [None if route.mode == "EAGER" else route.padded for route in coverage]


def _break_cost(name: str, total: BreakTotal) -> dict[str, Any]:
    host_us = total.host_seconds / total.calls * 1e6 if total.calls else None
    return {"name": name, "calls": total.calls, "host_us_per_call": host_us}


def _result(prompt: str, output: RequestOutput) -> dict[str, Any]:
    (answer,) = output.outputs
    return {
        "prompt": prompt,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
    }


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if tokens > 0 and seconds > 0 else None
