"""GraphRunner: a step function, its buffers and its graphs, called like a function."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from stepgraph.runtime.audit import AddressAudit, Watchable, module_of, require_tensors
from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.batch_step import BatchStep
from stepgraph.runtime.buffers import StaticBuffers
from stepgraph.runtime.capture import CaptureReport
from stepgraph.runtime.capture_guard import no_captures
from stepgraph.runtime.captured import Captured
from stepgraph.runtime.compiler.steps import CompiledSteps
from stepgraph.runtime.config import Compile, Debug, GraphConfig
from stepgraph.runtime.dispatch import Decision, Mode, Reason
from stepgraph.runtime.errors import CaptureError, ConfigError, InputError
from stepgraph.runtime.graphs import Graphs, Staged
from stepgraph.runtime.leases import Leases
from stepgraph.runtime.live_batches import LiveBatches
from stepgraph.runtime.outputs import StepOutput, named_outputs
from stepgraph.runtime.platforms.base import LoopTerms
from stepgraph.runtime.pool import GraphPool
from stepgraph.runtime.progress import Progress
from stepgraph.runtime.session import require_fit
from stepgraph.runtime.stats import Stats
from stepgraph.runtime.verify.bench import Subject
from stepgraph.runtime.verify.check import MakeInputs, Nearest, verify
from stepgraph.runtime.verify.compare import Tolerance
from stepgraph.runtime.verify.report import VerifyReport

Step = Callable[..., Any]

_log = logging.getLogger(__name__)


class GraphRunner(Captured):
    """Runs a step through captured graphs: decode, prefill, and both in one batch.

    step: called as `step(**views)` with each slot's leading rows; returns a tensor, a mapping or a named tuple of
        tensors. Once captured it is not called again, except for batches that no graph covers. What it changes
        outside its buffers it must also change on the device. With `lora_cases` other than (0,) it is also given
        `num_loras`. Where it is a module or a method of one, that is watched: see `watch`.
    buffers: the step's inputs and its persistent state.
    config: backend and ladder of each phase.
    state: what the step changes outside its buffers, by name (a KV cache); `verify` saves and compares it.
    pool: memory that the graphs share with those of other runners, of which one runs at a time; by default their own.

    A uniform batch has keys of its own: views of num_reqs rows for request slots, num_reqs x query_len for token slots.
    All others share keys that depend on the token count alone: token slots have that many rows, and request slots one
    for each token, up to `prefill.max_requests`; those that no request takes hold the slot's padding. A batch that runs
    eagerly has views of its own sizes.

    The step is run and recorded without gradients. Calls come from one thread at a time, and a replay runs on that
    thread's current stream: who changes the stream between calls has the new one wait for the old one
    (`runner.pool.follow()`). The runner keeps the step alive, but not what the step has let go of; see `watch`. The
    whole contract is in docs/design.md, "Threads and streams".

    Raises:
        ConfigError: a ladder that does not fit the buffers, a slot that is called like an argument of a call, or a
            state that is not made of tensors.
    """

    def __init__(
        self,
        step: Step,
        buffers: StaticBuffers,
        config: GraphConfig,
        *,
        state: Mapping[str, torch.Tensor] | None = None,
        pool: GraphPool | None = None,
    ) -> None:
        require_fit(config, buffers)
        self.pool = pool or GraphPool(buffers.platform)
        if self.pool.platform.device != buffers.device:
            raise ConfigError(f"a pool on {self.pool.platform.device} for buffers on {buffers.device}")
        self.buffers = buffers
        self.config = config
        self.state: Mapping[str, torch.Tensor] = {} if state is None else state
        self.stats = Stats()
        self._request_slots = config.prefill.max_requests
        self._run = BatchStep(step, buffers, self._request_slots, with_loras=config.lora_cases != (0,))
        self._graphs = Graphs(config, buffers, CaptureReport(), {})
        self._session = None
        self._compiled = None
        if config.compile is not Compile.OFF:
            self._compiled = CompiledSteps(self._run, config.compile.value, self.stats.compiled)
        self._live = LiveBatches(buffers)
        self._leases = None if config.debug is Debug.OFF else Leases(buffers.slab)
        self._told: set[tuple[Reason, bool]] = set()  # why uniform and other batches have fallen back so far
        self._audit = AddressAudit()
        self._check: Callable[[], None] | None = None  # before each replay, once something is watched
        if (module := module_of(step)) is not None:
            self.watch(module)
        if state is not None:
            require_tensors(state)
            self.watch(state, "state")

    def watch(self, target: Watchable, name: str = "") -> None:
        """Refuse replays once a tensor of `target` has left the memory that the graphs use.

        target: a module (its parameters and buffers), a mapping (its tensors), or a workspace, which is locked too.
        `module.weight = x`, `weight.data = x`, `load_state_dict(assign=True)` and `module.to(...)` move a tensor; a
        graph goes on reading the old memory, freed or not. Each replay looks at a few tensors in turn (at most 1 µs),
        and with `debug` at all. What counts is where they lie when the graphs are captured: call this before, or
        straight after. name: goes before the tensors' dotted names.

        Raises:
            ConfigError: another module or mapping is watched under this name, or it is nothing that can be watched.
        """
        self._audit.watch(target, name, captured=bool(self._graphs))
        self._check = self._audit.glance if self.config.debug is Debug.OFF else self._audit.sweep

    def check_addresses(self) -> None:
        """Look at every watched tensor now, rather than at a few a replay.

        Raises:
            ReplayError: names the tensors that moved since the capture, from where to where.
        """
        self._audit.sweep()

    def __call__(
        self,
        *,
        num_requests: int | None = None,
        query_len: int = 1,
        num_tokens: int | None = None,
        num_loras: int = 0,
        **inputs: Any,
    ) -> StepOutput:
        """Run one step.

        inputs: per slot its real rows; a slot left out keeps what it held. num_requests is needed only where no
        request slot is given. Without num_tokens the batch is uniform: every request brings query_len tokens. With it
        they bring so many altogether. num_loras: active adapters.

        Raises:
            InputError: no batch size, more requests or tokens than the buffers hold, or inputs that do not fit.
            ReplayError: a watched tensor moved, or the pool's last step is not over, in another thread or stream.
        """
        self.pool.enter()
        try:
            if num_requests is None:
                num_requests = self._live.infer_requests(inputs)
            return self._serve(self._live.get(num_requests, query_len, num_tokens, num_loras), inputs)
        finally:
            self.pool.leave()

    def again(self) -> StepOutput:
        """Run the batch that was staged last once more, on what its slots hold now: a call with its counts and no
        inputs, which does not look up what it found the last time.

        Raises:
            InputError: nothing is staged since the buffers were reset, or a slot is needed with every step.
            ReplayError: as for a call.
        """
        self.pool.enter()
        try:
            known = self._graphs.again
            if known is None or known.staged is not self.buffers.staged:
                return self._serve_again()
            _, replay, output = known
            if self._check is not None:
                self._check()
            replay()
            self.stats.record(output.decision)
            return output
        finally:
            self.pool.leave()

    def loop(self, terms: LoopTerms, *, num_requests: int, num_loras: int = 0) -> Decision:
        """Run the step of a uniform batch again and again in one launch, with what its slots hold now, until it halts
        or has run `terms.most` times.

        How often is in `terms.told` once a mark behind it was waited for; `stats.looped` counts it. Outputs are the
        last run's, and where the step left them.

        Raises:
            CaptureError: no single graph runs the batch, or the device cannot; says why, and nothing has run.
            torch.OutOfMemoryError: no room for the loop, which has not run.
            ReplayError: as for a call.
        """
        self.pool.enter()
        try:
            batch = self._live.get(num_requests, 1, None, num_loras)
            decision = self._graphs.dispatcher.dispatch(batch)
            if decision.mode is Mode.EAGER:
                raise CaptureError(f"a batch that runs eagerly ({decision.reason}) is launched one by one")
            replay = self._graphs.by_key[decision.key].recording.loop(terms)
            if self._check is not None:
                self._check()
            self.buffers.stage(batch, decision.key, {}, self._request_slots)
            if self._leases is not None:
                self._leases.step(replays=True)
            replay()
            return decision
        finally:
            self.pool.leave()

    def verify(
        self,
        make_inputs: MakeInputs | None = None,
        *,
        nearest: Nearest | None = None,
        seed: int = 0,
        batches_per_key: int = 3,
        rtol: float = 0.0,
        atol: float = 0.0,
        progress: Progress | None = None,
    ) -> VerifyReport:
        """Replay against eager for every captured key, on random batches; says where they part.

        make_inputs: called as `make_inputs(batch, generator)`; gives the real rows of every slot, device-owned ones
            too. By default floats are drawn and all others are 0.
        rtol, atol: how far a replay may be from eager on the same rows; by default they are the same bit for bit.
        progress: called with (keys done, keys, what comes next).

        Padded rows that a policy leaves alone are filled with NaN, or with the largest real index. The step runs many
        times, eagerly too, so call this in the mode in which it serves. Buffers and `state` are put back; twice the
        memory of the state is needed meanwhile.

        Raises:
            CaptureError: nothing is captured.
            ConfigError: a tolerance that is negative or no number.
            InputError: `make_inputs` gives what does not fit the batch.
            ReplayError: another thread is in a step.
        """
        platform, slots = self.pool.platform, self._request_slots
        subject = Subject(self._run, self._graphs, self.buffers, platform, slots, self.state, self._audit.sweep)
        with self.pool.alone(), torch.no_grad():
            if self._leases is not None:
                self._leases.verified()
            return verify(subject, make_inputs, nearest, seed, batches_per_key, Tolerance(rtol, atol), progress)

    def rehearse(self, batch: BatchDescriptor) -> None:
        """Run a batch's step eagerly, on padded rows and on this thread's current stream. The buffers are reset.

        What the step allocates stays with torch, where later eager steps find it.

        Raises:
            ReplayError: a step is under way.
        """
        with self.pool.alone(), torch.no_grad(), no_captures() if self._graphs else nullcontext():
            self.buffers.reset()
            try:
                self._run(batch)
            finally:
                self.buffers.reset()

    def _serve(self, batch: BatchDescriptor, inputs: Mapping[str, Any]) -> StepOutput:
        decision = self._graphs.dispatcher.dispatch(batch)
        replays = decision.mode is not Mode.EAGER
        if replays and self._check is not None:
            self._check()
        self.buffers.stage(batch, decision.key, inputs, self._request_slots)
        if self._leases is not None:
            self._leases.step(replays=replays)
        tensors = self._graphs.replay(decision) if replays else self._run_eager(decision)
        self.stats.record(decision)
        if decision.wanted is not None:
            self._graphs.wanted[decision.wanted] += 1
        if self._leases is not None:
            tensors = self._leases.lend(tensors, replayed=replays)
        return StepOutput(tensors, decision)

    def _serve_again(self) -> StepOutput:
        """And remember what was found, where a step is nothing but its replay."""
        staged = self.buffers.staged
        if staged is None:
            raise InputError(
                "again: nothing is staged since the buffers were reset; call the runner with a batch first"
            )
        output = self._serve(staged[0], {})
        decision, staged = output.decision, self.buffers.staged
        if decision.mode is not Mode.EAGER and decision.wanted is None and self._leases is None:
            self._graphs.again = Staged(staged, self._graphs.by_key[decision.key].recording.replay, output)
        return output

    def _run_eager(self, decision: Decision) -> dict[str, torch.Tensor]:
        told = (decision.reason, decision.batch.is_uniform)
        if told not in self._told and decision.reason is not Reason.DISABLED:
            self._told.add(told)
            _log.warning("a step runs eagerly (%s): %s", decision.reason, decision.detail)
        with torch.no_grad(), no_captures() if self._graphs else nullcontext():
            if self._compiled is not None and decision.reason is Reason.DISABLED:
                return named_outputs(self._compiled.serve(decision.key))
            return named_outputs(self._run(decision.key))
