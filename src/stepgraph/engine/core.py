"""The engine: model, cache, scheduler and graphs put together, and what may happen to them between two steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from stepgraph.engine.flight import Flights
from stepgraph.engine.graphs import largest_batch
from stepgraph.engine.kv_blocks import BlockPool, blocks_for
from stepgraph.engine.kv_memory import KVMemory, resize
from stepgraph.engine.loops import Loops
from stepgraph.engine.lora import LoraSlots
from stepgraph.engine.model import DecoderModel
from stepgraph.engine.parallel import TensorParallel, require_plain
from stepgraph.engine.random_batches import RandomBatches
from stepgraph.engine.scheduler import Scheduler, most_tokens, num_mailboxes
from stepgraph.engine.staging import Staging
from stepgraph.engine.step import DecoderStep, step_slots
from stepgraph.engine.stepping import Stepping
from stepgraph.ops.attention import AttentionBackend
from stepgraph.ops.operations import choose_operations
from stepgraph.ops.sampling import Sampler, sample
from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.buffers import StaticBuffers
from stepgraph.runtime.capture import CaptureReport
from stepgraph.runtime.config import Compile, GraphConfig
from stepgraph.runtime.errors import ConfigError, ReplayError
from stepgraph.runtime.memory.cost import Left
from stepgraph.runtime.platforms.virtual import VirtualMemory
from stepgraph.runtime.progress import Progress
from stepgraph.runtime.resolve import AttentionGroup, Severity, resolve
from stepgraph.runtime.runner import GraphRunner
from stepgraph.runtime.verify import VerifyReport

_log = logging.getLogger(__name__)

_VERIFIED_BLOCKS = 4  # a request, at most, beside those for a step's tokens


class EngineCore(Stepping):
    """Requests in, tokens out. Text, files and threads are others' business.

    graphs: as asked for; `resolution` is what the attention backend and the sizes here make of it.
    max_num_seqs: rows that decode at once. chunk_tokens: tokens of a step with prefill in it, see
        `most_tokens`.
    num_blocks: KV blocks, the null block included. memory: the device's virtual memory. With it the cache begins with
        the least that a capture needs, `num_blocks` is the most there may be, and `resize_kv` adds what is left.
    sampler: chooses the tokens. penalties: whether requests may ask for them; takes 4 bytes a row and token of the
        vocabulary.
    lora: the adapters that requests may have; `graphs.lora_cases` says for how many at a time steps are captured.
    steps_per_launch: the most that `step_many` has the device run by itself.
    strict: refuse a configuration that would be downgraded.
    parallel: this rank's part, where several compute the model; the model and the sampler are then the rank's.

    Raises:
        ConfigError: graphs that the attention backend or the engine cannot run, or a cache that does not fit.
    """

    def __init__(
        self,
        model: DecoderModel,
        attention: AttentionBackend,
        graphs: GraphConfig,
        *,
        max_num_seqs: int,
        max_model_len: int,
        num_blocks: int,
        chunk_tokens: int,
        memory: VirtualMemory | None = None,
        sampler: Sampler = sample,
        penalties: bool = True,
        lora: LoraSlots | None = None,
        steps_per_launch: int = 1,
        strict: bool = False,
        parallel: TensorParallel | None = None,
    ) -> None:
        if lora is not None:
            lora.config.require_cases(graphs.lora_cases)
        if graphs.decode.query_lens != (1,) or (lora is None and graphs.lora_cases != (0,)):
            raise ConfigError(
                f"graphs: the engine decodes one token a step without adapters; query lengths "
                f"{graphs.decode.query_lens} must be (1,) and LoRA cases {graphs.lora_cases} (0,)"
            )
        choose_operations(model.operations.name, model.device, compiled=graphs.compile is not Compile.OFF)
        if parallel is not None:
            require_plain(
                lazy=graphs.lazy,
                compiled=graphs.compile is not Compile.OFF,
                adapters=lora is not None,
                steps_per_launch=steps_per_launch,
            )
            graphs = parallel.graphs(graphs)
        self.parallel, self._holds_peers = parallel, False
        self.model, self.attention = model, attention
        self.penalties, self.lora = penalties, lora
        self.max_model_len, self.steps_per_launch = max_model_len, steps_per_launch
        step_tokens = most_tokens(chunk_tokens, max_num_seqs)
        rows = largest_batch(graphs, max_num_seqs)
        tokens = max(rows, step_tokens)
        group = AttentionGroup(attention.name, attention.support, attention.max_query_len)
        self.resolution = resolve(graphs, [group], max_requests=rows, max_tokens=tokens, strict=strict)
        for change in self.resolution.changes:
            if change.severity is Severity.WARNING:
                _log.warning("graphs: %s", change)
        self.kv_memory = KVMemory(model.config, num_blocks, model.dtype, model.device, memory)
        self.scheduler = Scheduler(BlockPool(self.kv_memory.num_blocks), max_num_seqs, step_tokens)
        self._max_blocks = blocks_for(max_model_len)
        vocab = model.config.vocab_size if penalties else None
        self.buffers = StaticBuffers(
            max_requests=rows,
            max_tokens=tokens,
            device=model.device,
            slots=step_slots(self._max_blocks, attention.pad_seq_len, vocab, adapters=lora is not None),
        )
        platform = self.buffers.platform
        self._loops = Loops(platform, steps_per_launch, attention)
        check = None if parallel is None else parallel.check
        self._flights = Flights(platform, self.scheduler, num_mailboxes(max_num_seqs), steps_per_launch, check)
        self._staging = Staging(self.buffers, self._max_blocks, penalties=penalties, lora=lora)
        told, halt = self._flights.told, self._loops.terms.halt
        step: Callable[..., Any] = DecoderStep(model, attention, self.kv_memory.cache, sampler, told, halt, lora)
        if parallel is not None:
            step = parallel.guarded(step)
        self._most_verified = blocks_for(tokens) + _VERIFIED_BLOCKS * rows
        self.runner = GraphRunner(step, self.buffers, self.resolution.config, state=self._verified())
        self.runner.watch(vars(model), "model")
        for index, layer in enumerate(model.layers):
            self.runner.watch(vars(layer), f"model.layers.{index}")
        self.runner.watch(attention.tensors(), "attention")
        if lora is not None:
            self.runner.watch(lora.tensors, "adapters")
        self.kv_bytes_at_capture = 0
        self.eager_left = Left()  # by `run_largest_step`

    @property
    def kv_cache(self) -> torch.Tensor:
        """The blocks there are: [num_blocks, layers, 2, block_size, kv_heads, head_dim]."""
        return self.kv_memory.blocks

    def resize_kv(self, num_blocks: int) -> None:
        """Take memory for more KV blocks, or give back that of the blocks from `num_blocks` on. Graphs stay.

        Requests that hold blocks which go are preempted: they wait, and are computed again.

        Raises:
            ConfigError: as `kv_memory.resize`.
            ReplayError: a step is under way.
        """
        with self.runner.pool.alone():
            resize(self.kv_memory, self.scheduler, num_blocks)
        self._steady = None
        self.runner.state = self._verified()

    @torch.inference_mode()
    def capture(self, progress: Progress | None = None) -> CaptureReport:
        self.kv_bytes_at_capture = self.kv_memory.nbytes
        if self.parallel is not None:
            self.parallel.all_reduce.take()
            self._holds_peers = True
            self.parallel.group.before_close(self.release)
        with nullcontext() if self.parallel is None else self.parallel.capturing(self.runner):
            report = self.runner.capture(progress)
        self._loops.prepare(self.runner)
        return report

    def release(self) -> None:
        """Give the graphs back, for good. Of several ranks on all alike; at the latest before their group ends."""
        if self.parallel is not None and self._holds_peers:
            self._holds_peers = False
            self.parallel.group.released(self.release)
            self.parallel.all_reduce.close()
        self.runner.release()

    @torch.inference_mode()
    def capture_pending(self, seconds: float | None = None) -> CaptureReport:
        """Between two steps, of lazy graphs: record some that are left; see `GraphRunner.capture_pending`."""
        return self.runner.capture_pending(seconds)

    @torch.inference_mode()
    def run_largest_step(self) -> None:
        """Run the largest step eagerly, on padded rows: torch then holds what a step may need. Not while serving."""
        platform = self.runner.pool.platform
        before = platform.memory()
        adapters = 0 if self.lora is None else self.lora.config.slots
        self.runner.rehearse(BatchDescriptor.mixed(self.buffers.max_tokens, self.buffers.max_requests, adapters))
        platform.synchronize()
        self.eager_left += Left.between(before, platform.memory())

    @torch.inference_mode()
    def verify(
        self, *, seed: int = 0, rtol: float = 0.0, atol: float = 0.0, progress: Progress | None = None
    ) -> VerifyReport:
        """Replay every captured key against eager, on random batches; see `GraphRunner.verify`. Overwrites the cache.

        rtol, atol: what a compiler's own arithmetic (inductor) needs, which rounds otherwise than eager.

        Raises:
            ReplayError: requests are under way.
            CaptureError: nothing is captured.
        """
        if self.scheduler.has_work:
            raise ReplayError("verify writes the KV cache, and requests are under way; let them end first")
        verified = self._verified()["kv_cache"]
        batches = RandomBatches(
            vocab_size=self.model.config.vocab_size,
            max_model_len=self.max_model_len,
            num_blocks=len(verified),
            max_blocks=self._max_blocks,
            penalties=self.penalties,
            device=self.model.device,
            adapter_slots=0 if self.lora is None else self.lora.config.slots,
        )
        verified.normal_(generator=torch.Generator(self.model.device).manual_seed(seed))
        if self.lora is not None:
            self.lora.fill_free(torch.Generator().manual_seed(seed))
        with self._cache_cut_to(1 + len(verified)):
            return self.runner.verify(
                batches, nearest=batches.nearest, seed=seed, rtol=rtol, atol=atol, progress=progress
            )

    @contextmanager
    def _cache_cut_to(self, num_blocks: int) -> Iterator[None]:
        """Meanwhile the rest of the cache's memory is free for other use, if it can be given back."""
        before = self.kv_memory.num_blocks
        if not self.kv_memory.resizable:
            yield
            return
        self.resize_kv(num_blocks)
        try:
            yield
        finally:
            self.runner.pool.platform.give_back()
            self._grow_kv(before)

    def _grow_kv(self, num_blocks: int) -> None:
        """As far towards `num_blocks` as the device has room."""
        more = num_blocks - self.kv_memory.num_blocks
        while more > 0 and self.kv_memory.num_blocks < num_blocks:
            try:
                self.resize_kv(min(self.kv_memory.num_blocks + more, num_blocks))
            except ConfigError:
                more //= 2
        if self.kv_memory.num_blocks < num_blocks:
            _log.warning("KV cache: %d blocks of %d; the device has no room", self.kv_memory.num_blocks, num_blocks)

    def _verified(self) -> dict[str, torch.Tensor]:
        """Of the cache what `verify` uses: it saves and compares that. Padded rows may write block 0."""
        return {"kv_cache": self.kv_memory.blocks[1 : 1 + self._most_verified]}
