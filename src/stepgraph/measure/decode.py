"""The decode step that is measured: rows that decode the same token again and again, at one context."""

from __future__ import annotations

from pathlib import Path

import torch

from stepgraph.engine.checkpoint import load_checkpoint
from stepgraph.engine.config import read_config
from stepgraph.engine.core import EngineCore
from stepgraph.engine.demo import demo_model_path
from stepgraph.engine.errors import ModelError
from stepgraph.engine.kv_blocks import blocks_for
from stepgraph.engine.model import DecoderModel, attention_shape
from stepgraph.engine.parallel import TensorParallel
from stepgraph.engine.params import SamplingParams
from stepgraph.engine.random_model import SHAPES, random_model
from stepgraph.engine.request import Request
from stepgraph.engine.sampling_state import sampling_inputs
from stepgraph.ops.attention import get_backend
from stepgraph.ops.operations import Attend, choose_operations
from stepgraph.ops.sampling import get_sampler
from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.config import GraphConfig
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.runner import GraphRunner

GREEDY = SamplingParams(temperature=0)


def load_model(name: str | None, *, device: str, max_len: int, operations: str | None = None) -> DecoderModel:
    """A shape's name (random weights), a Hugging Face directory, a GGUF file or a hub id; None: the demo model.

    In bfloat16 on a GPU, in float32 on a CPU. max_len: the longest sequence in tokens.

    Raises:
        StepgraphError: it cannot be loaded, or allows no sequence of this length.
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    if name in SHAPES:
        config = SHAPES[name]
        _require_length(name, max_len, config.max_position_embeddings)
        return random_model(config, device=device, dtype=dtype, max_positions=max_len, operations=operations)
    operations = choose_operations(operations, device)
    checkpoint = load_checkpoint(demo_model_path() if name is None else name, dtype=dtype, device=device)
    _require_length(name or "the demo model", max_len, checkpoint.config.max_position_embeddings)
    return DecoderModel(checkpoint.config, checkpoint.weights, max_len, operations)


def is_ours(directory: Path) -> bool:
    """Whether the engine runs the model of a Hugging Face directory."""
    try:
        read_config(directory)
    except ModelError:
        return False
    return True


class DecodeRows:
    """An engine core, and the same work at every step.

    rows: the most that may decode at once. context: tokens that each attends to, the one it writes included.
    graphs: of decode. Nothing is captured until `core.capture()`. parallel: of a rank, whose part the model is.

    Raises:
        ConfigError: graphs that the attention backend cannot run, or a size that cannot work.
    """

    def __init__(
        self,
        model: DecoderModel,
        graphs: GraphConfig,
        *,
        rows: int,
        context: int,
        attention: str | None = None,
        sampler: str = "fused",
        parallel: TensorParallel | None = None,
    ) -> None:
        device, self.context = model.device, context
        if rows < 1 or context < 1:
            raise ConfigError(f"{rows} rows at a context of {context}: both start at 1")
        a_row = blocks_for(context + 1)
        self.core = EngineCore(
            model,
            get_backend(attention, device, attention_shape(model.config), max_rows=rows, max_len=context + 1),
            graphs,
            max_num_seqs=rows,
            max_model_len=context + 1,
            num_blocks=rows * a_row + 1,
            chunk_tokens=1,
            sampler=get_sampler(sampler) if parallel is None else parallel.sampler(model.config),
            parallel=parallel,
        )
        self.core.kv_cache.normal_(generator=torch.Generator(device).manual_seed(1))
        self.runner, self.buffers = self.core.runner, self.core.buffers
        order = torch.randperm(rows * a_row, generator=torch.Generator().manual_seed(2)) + 1
        self._tables = order.view(rows, a_row).int()
        self._live = 0

    def another(self, graphs: GraphConfig) -> GraphRunner:
        """A second runner of the same step on the same buffers, such as an eager one. Its graphs share the pool."""
        return GraphRunner(self.runner._run.step, self.buffers, graphs, pool=self.runner.pool)

    def stage(self, rows: int, params: SamplingParams = GREEDY) -> None:
        """Let the first `rows` rows decode from now on, and none behind them."""
        count, self._live = rows, rows
        self.buffers.patch(
            range(count),
            tokens=[1] * count,
            positions=[self.context - 1] * count,
            seq_lens=[self.context] * count,
            block_tables=self._tables[:count],
        )
        requests = [Request(index, [1], params, 7, 16) for index in range(count)]
        self.runner(num_requests=count, **sampling_inputs(requests))

    def rewind(self) -> None:
        """Back to before the last step. The token is whatever that one chose, which changes nothing of the work."""
        self.buffers["positions"][: self._live] = self.context - 1
        self.buffers["seq_lens"][: self._live] = self.context

    def bare(self) -> object:
        """The step function itself on the rows that are staged, as a recording of it calls it."""
        return self.runner._run.step(**self.buffers.views(BatchDescriptor.decode(self._live)))

    def logits(self, attend: Attend | None = None) -> torch.Tensor:
        """[rows, vocab] of the rows that are staged: a step without sampling, launched here and now.

        attend: in place of the core's attention.
        """
        model, attention = self.core.model, self.core.attention
        views = self.buffers.views(BatchDescriptor.decode(self._live))
        tables, lengths = views["block_tables"], views["seq_lens"]

        def attend_to_all(q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
            attention.decode(q, kv, tables, lengths, out)

        tokens, positions, attend = views["tokens"], views["positions"], attend or attend_to_all
        return model.logits(model.forward(tokens, positions, tables, self.core.kv_cache, attend))

    def step(self, runner: GraphRunner | None = None) -> None:
        """One step of the rows that are staged; by default through the core's own graphs."""
        (runner or self.runner)(num_requests=self._live)


def _require_length(name: str, max_len: int, most: int) -> None:
    if max_len > most:
        raise ConfigError(
            f"{name} allows sequences of {most} tokens, not of {max_len}; lower the tokens of context or prompt"
        )
