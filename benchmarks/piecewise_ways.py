"""The steps of `h200_piecewise.py`, and every way to run one."""

from __future__ import annotations

import gc
import statistics
from typing import Any

import torch
from common import device_ms

from stepgraph import SamplingParams
from stepgraph.engine.core import EngineCore
from stepgraph.engine.kv_blocks import blocks_for
from stepgraph.engine.model import DecoderModel, attention_shape
from stepgraph.engine.request import Request
from stepgraph.engine.sampling_state import sampling_inputs
from stepgraph.ops.attention import get_backend
from stepgraph.runtime import Backend, DecodePhase, GraphConfig, GraphRunner, Ladder, PrefillPhase

MAX_LEN, CONTEXT, STEPS_A_ROUND = 4096, 512, 3
ROWS, TOKENS = (1, 16, 64), (1, 16, 128, 512, 2048)
CASES = {f"{phase}-{n}": (phase, n) for phase, sizes in (("decode", ROWS), ("prefill", TOKENS)) for n in sizes}
GRAPHS = {"breakable": Backend.BREAKABLE, "full": Backend.FULL, "eager": Backend.DISABLED}


def config_of(case: str, backend: Backend, compiler: str) -> GraphConfig:
    """One graph, of the case's size."""
    phase, size = CASES[case]
    if backend is Backend.BREAKABLE and compiler != "off":
        backend = Backend.PIECEWISE
    ladder = None if backend is Backend.DISABLED else Ladder.explicit([size])
    if phase == "decode":
        return GraphConfig(decode=DecodePhase(backend, ladder), compile=compiler)
    return GraphConfig(prefill=PrefillPhase(backend, ladder), compile=compiler)


class Ways:
    """One operation set's engine, and the runners of a case that share its step and buffers, by the name of the way."""

    def __init__(self, model: DecoderModel, compilers: tuple[str, ...]) -> None:
        self.name, self.compilers = model.operations.name, compilers
        device, blocks = model.device, blocks_for(MAX_LEN)
        rows, per_row = max(ROWS), blocks_for(CONTEXT + 1)
        backend = get_backend(None, device, attention_shape(model.config), max_rows=rows, max_len=MAX_LEN)
        self.core = EngineCore(
            model,
            backend,
            GraphConfig(),
            max_num_seqs=rows,
            max_model_len=MAX_LEN,
            num_blocks=1 + blocks + rows * per_row,
            chunk_tokens=max(TOKENS),
            penalties=False,
        )
        self.core.kv_cache.normal_(generator=torch.Generator(device).manual_seed(1))
        self.buffers = self.core.buffers
        self.runners: dict[str, GraphRunner] = {}
        order = torch.randperm(blocks + rows * per_row, generator=torch.Generator().manual_seed(2)).int() + 1
        width = self.buffers["block_tables"].shape[1]
        self.long, self.short = torch.zeros(1, width).int(), torch.zeros(rows, width).int()
        self.long[0, :blocks] = order[:blocks]
        self.short[:, :per_row] = order[blocks:].view(rows, per_row)
        self.prompt = torch.randint(model.config.vocab_size, (max(TOKENS),), generator=torch.Generator().manual_seed(3))

    def begin(self, case: str) -> None:
        """The case's runners, nothing captured yet, and its rows: those that decode at CONTEXT, or a prompt from an
        empty cache; one of a single token stands at CONTEXT."""
        self.runners = {
            f"{self.name}, {graphs}{'' if compiler == 'off' else ', compiled'}": GraphRunner(
                self.core.runner._run.step, self.buffers, config_of(case, backend, compiler)
            )
            for compiler in self.compilers
            for graphs, backend in GRAPHS.items()
        }
        phase, size = CASES[case]
        decode = phase == "decode"
        self.rows = size if decode else 1
        self.end = CONTEXT if decode or size == 1 else size
        self.tables = self.short[:size] if decode else self.long
        requests = [Request(i, [1], SamplingParams(temperature=0), 7, 16) for i in range(self.rows)]
        brought = [1] * self.rows if decode else [size]
        self.inputs = {
            **sampling_inputs(requests, penalties=False),
            "query_lens": brought,
            "prompt_tokens": [-1] * size if decode else self.prompt[:size],
        }
        self.call: dict[str, Any] = {"num_requests": self.rows} if decode else {"num_requests": 1, "num_tokens": size}

    def let_go(self) -> None:
        for runner in self.runners.values():
            runner.release()
        self.runners = {}
        gc.collect()

    def stage(self) -> None:
        """After every capture, which resets the buffers."""
        state = {"tokens": [1], "positions": [0], "seq_lens": [0]}
        columns = {name: value * self.rows for name, value in state.items()}
        self.buffers.patch(list(range(self.rows)), **columns, block_tables=self.tables)

    def rewind(self) -> None:
        self.buffers["positions"][: self.rows] = self.end - 1
        self.buffers["seq_lens"][: self.rows] = self.end
        self.buffers["tokens"][: self.rows] = 1

    def tokens(self, way: str) -> list[int]:
        """Twice, since the first step of a way may compile."""
        for _ in range(2):
            self.rewind()
            output = self.runners[way](**self.call, **self.inputs)
        return output.tokens.tolist()

    def ms(self, way: str) -> float:
        runner = self.runners[way]
        return statistics.median(device_ms(lambda: runner(**self.call), STEPS_A_ROUND, before=self.rewind, warm=1))
