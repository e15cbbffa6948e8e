"""The engine's steps: plan, tell the device what changed, launch, and take the tokens in, at once or one step late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stepgraph.engine.flight import Flights, Produced
from stepgraph.engine.loops import Loops, steps_ahead
from stepgraph.engine.parallel import TensorParallel
from stepgraph.engine.scheduler import Chunk, Scheduler
from stepgraph.engine.staging import Staging
from stepgraph.engine.steady import SteadyRows
from stepgraph.ops.attention import AttentionBackend
from stepgraph.runtime.buffers import StaticBuffers
from stepgraph.runtime.capture import CaptureReport
from stepgraph.runtime.runner import GraphRunner


class Stepping:
    """The part of the engine that steps. `core.py` makes what it uses."""

    attention: AttentionBackend
    buffers: StaticBuffers
    parallel: TensorParallel | None
    runner: GraphRunner
    scheduler: Scheduler
    _flights: Flights
    _loops: Loops
    _staging: Staging
    _steady: SteadyRows | None = None  # since the last step, unless the scheduler's changes went up
    _changes = 0

    def capture_pending(self, seconds: float | None = None) -> CaptureReport:
        """Between two steps, of lazy graphs: record some that are left."""
        raise NotImplementedError

    def step(self) -> Produced:
        """One token for every decoding request, and for every request whose prefill this step completes.

        Where `step_ahead` has left tokens on their way, those, and no other step. Without work it is a gap, in which
        one of the graphs that lazy capture has left is recorded.
        """
        produced = self._read(leave=0)
        if produced:
            return produced
        if not self._launch():
            self._use_gap()
        return self._read(leave=0)

    def step_ahead(self) -> Produced:
        """As `step`, but the next step is launched before the last one's tokens are read, so that the device does not
        wait for the host. The first call returns none, and one behind the last step its tokens.

        A request that is removed meanwhile gets no further token; the device may have computed one for it.
        """
        if self._launch():
            return self._read(leave=1)
        if not self._flights.under_way:
            self._use_gap()
        return self._read(leave=0)

    def step_many(self) -> Produced:
        """As `step_ahead`; where the same rows go on, the device runs up to `steps_per_launch` steps by itself, until
        one of them ends, and the host sleeps meanwhile. Returns the tokens of all of them, step by step."""
        steady = self._unchanged()
        if steady is None or not self._loops.may_run(self.runner, self.scheduler.rows):
            return self.step_ahead()
        if produced := self._read(leave=0):
            return produced
        try:
            if grown := steady.reach(steps_ahead(self._loops.terms.most, steady.num_rows)):
                self._staging.grow(*grown)
            steps = self._loops.run(self.runner, steady.num_rows, self._staging.num_loras) if steady.left > 0 else 0
            if steps:
                steady.went(steps)
                return self._flights.read_loop(steps)
        except BaseException:
            self._staging.doubt()
            raise
        return self.step_ahead()

    def _launch(self) -> bool:
        """Launch the next step. Not where there is none, or where it takes tokens that are still on their way."""
        if len(self._flights.under_way) > 1:  # an interrupt has left one unread
            return False
        steady = self._unchanged()
        if steady is not None and self._launch_again(steady):
            return True
        if self._flights.under_way and self._staging.lost:
            return False
        return self._launch_planned()

    @torch.inference_mode()
    def _launch_planned(self) -> bool:
        """Who decodes, who is prefilled, and what the device must be told of it."""
        scheduler, ahead = self.scheduler, self._flights.ahead()
        try:
            grown = scheduler.grow(ahead)
            chunks = scheduler.plan_prefill()
            rows = list(scheduler.rows)
            tokens = {request: request.num_tokens + ahead.get(request, 0) for request in rows}
            takers = {request: count for request, count in tokens.items() if scheduler.goes_on(request, ahead)}
            if not takers and not chunks:
                return False
            lengths = [*tokens.values(), *(chunk.stop for chunk in chunks)]
            inputs = self._staging.stage(rows, scheduler.take_dirty_rows(), grown, chunks)
            if self.parallel is not None and inputs:
                ids = [request.id for request in [*rows, *(chunk.request for chunk in chunks)]]
                self.parallel.agree_on_step((ids, lengths, [chunk.start for chunk in chunks]))
            self._run(len(rows), lengths, chunks, inputs)
            for chunk in chunks:
                completes, request = chunk.completes, chunk.request
                request.computed = chunk.stop
                if completes:
                    scheduler.join(request)
                    takers[request] = chunk.stop
            self._flights.launched(takers)
        except BaseException:
            self._staging.doubt()
            raise
        self._steady, self._changes = None, scheduler.changes
        if not chunks and not scheduler.prefilling:
            self._steady = SteadyRows(rows, lengths, scheduler.pool)
        return True

    def _unchanged(self) -> SteadyRows | None:
        """The rows of the last step, if the next one has the same and the device knows all it needs of them."""
        unchanged = self._changes == self.scheduler.changes and not self._staging.lost
        return self._steady if unchanged else None

    def _launch_again(self, steady: SteadyRows) -> bool:
        """The same step once more: everybody is a token further. Not where it must be planned anew.

        Without inference mode, which takes longer to enter than anything that is done here.
        """
        try:
            grown = steady.next()
            if grown is None:
                return False
            if grown:
                self._staging.grow(*grown)
            if self.attention.plans_each_step:
                self.attention.plan(steady.lengths, self.buffers["block_tables"])
            self.runner.again()
            self._flights.launched_again()
        except BaseException:
            self._staging.doubt()
            raise
        return True

    def _run(self, rows: int, lengths: Sequence[int], chunks: list[Chunk], inputs: Any) -> None:
        """lengths: tokens of each row, then of each chunk's request, the step's included."""
        num_loras = self._staging.num_loras
        if all(chunk.stop - chunk.start == 1 for chunk in chunks):  # no prefill, or a token of it: a decode step
            self.attention.plan(lengths, self.buffers["block_tables"])
            self.runner(num_requests=rows + len(chunks), num_loras=num_loras, **inputs)
        else:
            prompt_tokens = len(inputs["prompt_tokens"])
            self.runner(num_requests=rows + len(chunks), num_tokens=prompt_tokens, num_loras=num_loras, **inputs)

    def _read(self, leave: int) -> Produced:
        """The tokens of all steps on their way but the last `leave`."""
        flights = self._flights
        produced = flights.read() if len(flights.under_way) > leave else Produced([], [])
        while len(flights.under_way) > leave:
            produced = produced.then(flights.read())
        return produced

    def _use_gap(self) -> None:
        self.scheduler.refuse_if_stuck()
        self.capture_pending(seconds=0)
