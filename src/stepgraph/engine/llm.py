"""LLM: prompts in, text out. The engine's public face."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from stepgraph.comm.errors import CommError
from stepgraph.engine.budget import MemoryTable
from stepgraph.engine.call import Adapters, Params, Prompt, read_call
from stepgraph.engine.checkpoint import load_checkpoint
from stepgraph.engine.config import ModelConfig, model_len
from stepgraph.engine.core import EngineCore
from stepgraph.engine.errors import RequestError
from stepgraph.engine.graphs import Graphs, graph_config, largest_batch
from stepgraph.engine.intake import Intake
from stepgraph.engine.kv_plan import kv_plan
from stepgraph.engine.loops import StepsPerLaunch, most_steps
from stepgraph.engine.lora import LoraConfig, LoraSlots, read_adapter, with_cases
from stepgraph.engine.lora.serving import load_adapter, require_slots, unload_adapter
from stepgraph.engine.model import DecoderModel, attention_shape
from stepgraph.engine.outputs import RequestOutput, TextDelta
from stepgraph.engine.parallel import TensorParallel, require_plain
from stepgraph.engine.running import Running
from stepgraph.engine.scheduler import most_tokens
from stepgraph.engine.tracked import TrackedRequest
from stepgraph.ops.attention import get_backend
from stepgraph.ops.operations import choose_operations
from stepgraph.ops.sampling import get_sampler
from stepgraph.runtime.capture import CaptureReport
from stepgraph.runtime.config import Compile, GraphConfig
from stepgraph.runtime.errors import ConfigError, StepgraphError
from stepgraph.runtime.ladder import Ladder
from stepgraph.runtime.platforms import platform_for
from stepgraph.runtime.progress import Progress
from stepgraph.runtime.resolve import Resolution
from stepgraph.runtime.stats import Stats
from stepgraph.runtime.verify import VerifyReport

_log = logging.getLogger(__name__)

_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_A_CHAT = "a chat is a list of messages such as {'role': 'user', 'content': 'Hello'}"
_GPU_SEQS, _CPU_SEQS = 256, 16
_GPU_CHUNK, _CPU_CHUNK = 512, 128


class LLM:
    """A model with its engine.

    model: a Hugging Face directory, a GGUF file, or the id of a model on the Hugging Face hub, such as org/name.
    device: `cpu` or `cuda`; by default cuda where it works.
    dtype: of weights and cache, by name or as torch's. `auto` is float32 on a CPU, and on a GPU what the weights are
        stored as, bfloat16 where they are quantised.
    graphs: `full` runs decode and prefill through captured graphs, `breakable` through graphs with attention between
        them, `disabled` eagerly; vLLM's names choose by phase (`FULL_AND_PIECEWISE`), and a GraphConfig chooses all.
        What the attention backend cannot do is changed, with a warning; `resolution` tells.
    compile: `inductor` compiles the step between its breaks, which takes minutes, on a GPU with the `reference`
        operations. `breakable` and vLLM's PIECEWISE are then piecewise: each compiled piece has a graph of its own.
        `aot_eager` takes the same way and changes nothing, for tests.
    ladder: captured decode sizes, in requests. By default vLLM's. It must hold `max_num_seqs`; larger rungs are left
        out. Prefill is captured at sizes in tokens up to `chunk_tokens`: SGLang's on a GPU, a few on a CPU.
    max_num_seqs: requests that decode at once; by default 256 on a GPU and 16 on a CPU, where capturing takes longer.
    max_model_len: longest sequence in tokens, prompt and output; by default the model's own limit.
    attention: backend name; by default the best that runs on the device.
    operations: what computes a layer around its attention: `fused` (five launches a layer for up to 64 rows, the
        default on a GPU), `unfused` (ten) or `reference` (plain torch, the default on a CPU and under `compile`).
    kv_blocks, kv_bytes: the KV cache's size in blocks of 16 tokens, the null block included, or in bytes; one of them.
        By default what `max_num_seqs` sequences of `max_model_len` need, bounded by 1 GiB on a CPU and by
        `memory_fraction` on a GPU: there the cache takes what weights, graphs and the largest eager step leave of it.
    memory_fraction: of a GPU's memory, that this and every other process there may take together; by default 0.9.
    chunk_tokens: tokens of a step that prefills, its decoding rows included; prefill alone where those could fill it.
        By default 512 on a GPU and 128 on a CPU, where capturing takes as long as computing.
    penalties: whether requests may ask for repetition, presence and frequency penalties. Takes 4 bytes a row and
        token of the vocabulary; steps of requests that ask for none read nothing of it.
    lora: room for LoRA adapters, which requests name; by default there is none. Its cases are the graphs' too, unless a
        GraphConfig has its own.
    strict: refuse graphs that would have to be changed.
    lazy: serve once the largest graph of each kind is there, and record one more whenever nothing is left to do, what
        most steps wanted first.
    steps_per_launch: decode steps that the device runs by itself while nobody joins or ends; a request that ends costs
        the others nothing. More than one means fewer launches, and tokens that come in bursts. `auto` is many, but 1
        while a request streams; requests with stop strings always make it 1. Where the device or the graphs cannot,
        it is 1 too, and `stats` says why.
    parallel: this rank's part in an engine of several processes, each of which makes an LLM with the same arguments
        and calls the same methods; prompts and parameters are rank 0's. See docs/tensor_parallel.md.
    sampler: `fused`, or `chain`, which takes its steps one by one in seven launches, for comparison.
    progress: called with (done, total, what) while loading and capturing.

    Raises:
        StepgraphError: a model, device, ladder or size that cannot work; the message says what to change.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str | None = None,
        dtype: torch.dtype | str = "auto",
        graphs: Graphs | GraphConfig = "full",
        compile: Compile | str = Compile.OFF,
        ladder: Ladder | None = None,
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
        attention: str | None = None,
        operations: str | None = None,
        kv_blocks: int | None = None,
        kv_bytes: int | None = None,
        memory_fraction: float | None = None,
        chunk_tokens: int | None = None,
        penalties: bool = True,
        sampler: str = "fused",
        lora: LoraConfig | None = None,
        steps_per_launch: StepsPerLaunch = 1,
        strict: bool = False,
        lazy: bool = False,
        parallel: TensorParallel | None = None,
        progress: Progress | None = None,
    ) -> None:
        most = most_steps(steps_per_launch)
        platform = platform_for(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        target = platform.device
        if max_num_seqs is None:
            max_num_seqs = _GPU_SEQS if target.type == "cuda" else _CPU_SEQS
        if chunk_tokens is None:
            chunk_tokens = _GPU_CHUNK if target.type == "cuda" else _CPU_CHUNK
        tokens = most_tokens(chunk_tokens, max_num_seqs)
        config = graph_config(
            graphs, ladder, max_num_seqs=max_num_seqs, step_tokens=tokens, device=target, lazy=lazy, compile=compile
        )
        config = with_cases(config, lora)
        compiled = config.compile is not Compile.OFF
        # Before the weights, which take a while.
        operations = choose_operations(operations, target, compiled=compiled)
        choose_token = get_sampler(sampler)
        if parallel is not None:
            require_plain(lazy=config.lazy, compiled=compiled, adapters=lora is not None, steps_per_launch=most)
            if sampler != "fused":
                raise ConfigError(f"sampler: {sampler!r} is of one rank; several choose among candidates, leave it out")
        started = time.perf_counter()
        rows = largest_batch(config, max_num_seqs)
        plan = kv_plan(
            platform,
            memory_fraction,
            max_num_seqs=max_num_seqs,
            rows=rows,
            tokens=max(rows, tokens),
            penalties=penalties,
            lora=lora,
            kv_blocks=kv_blocks,
            kv_bytes=kv_bytes,
        )

        def check(model_config: ModelConfig, weights_dtype: torch.dtype) -> None:
            local = model_config if parallel is None else parallel.shard(model_config).local
            plan.require_fit(local, weights_dtype, model_len(model_config, max_model_len))

        checkpoint = load_checkpoint(
            model,
            dtype=_dtype(dtype, target),
            device=target,
            check=check,
            progress=progress,
            cut_for=None if parallel is None else lambda config: parallel.shard(config).cut,
        )
        self.config, self.tokenizer = checkpoint.config, checkpoint.tokenizer
        max_len = model_len(self.config, max_model_len)
        if parallel is None:
            local = self.config
            decoder = DecoderModel(local, checkpoint.weights, max_len, operations)
        else:
            shard, choose_token = parallel.shard(self.config), parallel.sampler(self.config)
            local, reduce = shard.local, parallel.all_reduce
            decoder = DecoderModel(local, checkpoint.weights, max_len, operations, reduce=reduce, vocab=shard.vocab)
        plan.took("weights")
        if parallel is not None:
            parallel.agree_on_engine(
                self.config,
                decoder,
                attention=attention,
                max_num_seqs=max_num_seqs,
                max_model_len=max_len,
                chunk_tokens=chunk_tokens,
                penalties=penalties,
                warmups=config.warmups,
            )
        slots = None
        if lora is not None:
            slots = LoraSlots(self.config, lora, decoder.dtype, target)
            plan.took("adapters")
        backend = get_backend(attention, target, attention_shape(local), max_rows=rows, max_len=max_len)
        plan.took("attention workspaces")
        self.load_seconds = time.perf_counter() - started
        num_blocks = plan.num_blocks(local, decoder.dtype, max_len, config)
        self.core = EngineCore(
            decoder,
            backend,
            config,
            max_num_seqs=max_num_seqs,
            max_model_len=max_len,
            num_blocks=num_blocks if parallel is None else parallel.least(num_blocks),
            memory=plan.virtual,
            chunk_tokens=chunk_tokens,
            sampler=choose_token,
            penalties=penalties,
            lora=slots,
            steps_per_launch=most,
            strict=strict,
            parallel=parallel,
        )
        plan.took("step buffers")
        self.core.capture(progress)
        self.memory: MemoryTable = plan.settle(self.core)
        if parallel is not None and self.core.kv_memory.resizable:
            self.core.resize_kv(parallel.least(self.core.kv_memory.num_blocks))
        self._parallel = parallel
        self._intake = Intake(self.core, self.tokenizer, streams_bind=steps_per_launch == "auto")
        self._running = Running(self.core)

    @property
    def capture_report(self) -> CaptureReport:
        """What was captured, dropped and left for later so far."""
        return self.core.runner.capture_report

    @property
    def stats(self) -> Stats:
        """Steps by batch size, mode and reason: decode steps, and those with prefill in them."""
        return self.core.runner.stats

    @property
    def resolution(self) -> Resolution:
        """The graphs that run, and what was changed of those asked for, by which rule and why."""
        return self.core.resolution

    def capture_pending(self, seconds: float | None = None) -> CaptureReport:
        """Of lazy graphs: record some of those that are left, what most steps wanted first.

        For longer gaps than those that are used anyway: between two calls, or between two pieces of a stream. seconds:
        none is begun after so many. Returns what was recorded now; `capture_report` has all.

        Raises:
            ReplayError: weights or the cache have moved.
        """
        return self.core.capture_pending(seconds)

    def verify(
        self, *, seed: int = 0, rtol: float = 0.0, atol: float = 0.0, progress: Progress | None = None
    ) -> VerifyReport:
        """Replay every graph against eager on random batches, and find the first operator that differs.

        rtol, atol: how far apart they may be, for steps that inductor compiled. progress: called with (graphs done,
        graphs, what comes next).

        Raises:
            ReplayError: requests are under way. CaptureError: there are no graphs. ConfigError: a tolerance that is
                negative or no number.
        """
        return self.core.verify(seed=seed, rtol=rtol, atol=atol, progress=progress)

    def resize_kv(self, num_blocks: int) -> None:
        """Give memory of the KV cache back, or take it again, while graphs stay; see `EngineCore.resize_kv`.

        Raises:
            ConfigError: the cache cannot have this size; says why.
        """
        self.core.resize_kv(num_blocks)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that are loaded."""
        return () if self.core.lora is None else self.core.lora.names

    def load_adapter(self, name: str, directory: str | Path) -> None:
        """Load a LoRA adapter that PEFT saved, into a free slot or in place of the one with this name.

        May be called between two pieces of a stream; graphs stay.

        Raises:
            ModelError: an adapter that is damaged, for another model, of too high a rank or not supported, or no free
                slot. ConfigError: the engine was started without `lora`. RequestError: requests under way use the one
                with this name.
        """
        adapter = read_adapter(directory, self.config, require_slots(self.core).config.rank)
        load_adapter(self.core, name, adapter)

    def unload_adapter(self, name: str) -> None:
        """Free an adapter's slot.

        Raises:
            RequestError: requests under way use it, or it is not loaded. ConfigError: as `load_adapter`.
        """
        unload_adapter(self.core, name)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | None = None,
        *,
        adapter: Adapters = None,
        stream: Callable[[TextDelta], None] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; results in the order of the prompts.

        prompts: text, token ids, or a list of either. sampling_params: one for all, or one for each.
        adapter: the name of one that is loaded, for all prompts, or one for each, None for the model alone.
        stream: called with every piece of text as it becomes certain.

        Raises:
            RequestError: an empty prompt, one longer than the model allows, parameters that do not fit, or an adapter
                that is not loaded.
        """
        tracked = self._track_all(prompts, sampling_params, adapter, streams=stream is not None)
        for delta in self._drive(tracked):
            if stream is not None:
                stream(delta)
        return [request.result() for request in tracked]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | None = None,
        *,
        adapter: Adapters = None,
    ) -> Iterator[TextDelta]:
        """As `generate`, but yields the text as it arrives. Leaving the loop early cancels what is unfinished.

        Raises:
            RequestError: as `generate`; at the first piece, if the cache has shrunk since the call.
        """
        tracked = self._track_all(prompts, sampling_params, adapter, streams=True)
        return self._drive(tracked)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: Params | None = None,
        *,
        adapter: Adapters = None,
        stream: Callable[[TextDelta], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several at once, through the model's chat template.

        Raises:
            RequestError: as `generate`. ModelError: the model has no chat template.
        """
        if isinstance(messages, str) or not isinstance(messages, Sequence):
            raise RequestError(f"{_A_CHAT}, not {'a text' if isinstance(messages, str) else type(messages).__name__}")
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self.chat_prompt(conversation) for conversation in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, adapter=adapter, stream=stream)

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """A conversation as token ids, ready for the assistant's turn."""
        if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
            raise RequestError(f"{_A_CHAT}, not {messages!r:.80}")
        text = self.tokenizer.apply_chat_template([dict(message) for message in messages])
        return self.tokenizer.encode(text, add_special_tokens=False)

    def abort(self, request_id: int) -> None:
        """Stop a running request; it ends with reason `abort`. Unknown or finished ids are ignored."""
        self._running.abort(request_id)

    def _track_all(
        self, prompts: Prompt | Sequence[Prompt], params: Params | None, adapter: Adapters, *, streams: bool
    ) -> list[TrackedRequest]:
        if self._parallel is None:
            call = read_call(prompts, params, adapter)
        else:
            call = self._parallel.share_call(lambda: read_call(prompts, params, adapter))
        # All are checked before the first is queued: a bad prompt leaves nothing behind.
        return [self._intake.take(index, asked, streams=streams) for index, asked in enumerate(call)]

    def _drive(self, tracked: list[TrackedRequest]) -> Iterator[TextDelta]:
        """Queue these requests and step the engine until they are done. Others that are queued advance along."""
        for one in tracked:
            self._intake.require_still(one)
        try:
            for one in tracked:
                self._running.add(one)
            heard = [one for one in tracked if one.heard]
            while not all(one.finished for one in tracked):
                self._running.step()
                yield from _told(heard)
            yield from _told(heard)  # a caller who steps the engine between two pieces may have ended the last ones
            self._use_gap()
        finally:
            for one in tracked:
                self.abort(one.request.id)

    def _use_gap(self) -> None:
        if self.core.scheduler.has_work:
            return
        try:
            self.core.step()
        except CommError:  # of a step that was launched ahead: another rank is gone
            raise
        except StepgraphError as error:  # of no request
            _log.warning("lazy graphs: none could be recorded: %s", error)


def _told(heard: list[TrackedRequest]) -> Iterator[TextDelta]:
    for one in heard:
        while one.deltas:
            yield one.deltas.popleft()


def _dtype(asked: torch.dtype | str, device: torch.device) -> torch.dtype | None:
    """What to load the weights as; None: as they are stored."""
    if isinstance(asked, torch.dtype):
        return asked
    if asked not in _DTYPES:
        raise ConfigError(f"dtype: {asked!r} is not one of {', '.join(_DTYPES)}")
    return torch.float32 if asked == "auto" and device.type == "cpu" else _DTYPES[asked]
