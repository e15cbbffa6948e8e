"""What the benchmarks of steady decode share: an engine whose rows decode step after step, and marks that are timed."""

from __future__ import annotations

import time
from itertools import cycle, islice

import torch

from stepgraph import SamplingParams
from stepgraph.engine.core import EngineCore
from stepgraph.engine.kv_blocks import blocks_for
from stepgraph.engine.model import DecoderModel, attention_shape
from stepgraph.engine.request import Request
from stepgraph.engine.running import Running
from stepgraph.engine.tracked import TrackedRequest
from stepgraph.ops.attention import get_backend
from stepgraph.runtime import GraphConfig, Ladder
from stepgraph.runtime.platforms.base import Mark

GREEDY = SamplingParams(temperature=0)


class TimedMark:
    """A mark that counts how long the host waited for it."""

    def __init__(self, mark: Mark) -> None:
        self._mark, self.waited = mark, 0.0
        self.set = mark.set

    def wait(self) -> None:
        started = time.perf_counter()
        self._mark.wait()
        self.waited += time.perf_counter() - started


class NoText:
    """Stands in for `TextStream`: detokenising is not the engine's time."""

    text, stopped = "", False

    def push(self, *tokens: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class SteadyEngine:
    """`rows` requests of `prompt` tokens each that have joined and decode; `most` tokens can be had of each.

    steps_per_launch: of `many_us`.
    """

    def __init__(self, model: DecoderModel, rows: int, prompt: int, most: int, steps_per_launch: int = 1) -> None:
        device, longest = model.device, prompt + most
        self.core = EngineCore(
            model,
            get_backend(None, device, attention_shape(model.config), max_rows=rows, max_len=longest),
            GraphConfig.preset("FULL_DECODE_ONLY", ladder=Ladder.explicit([rows])),
            max_num_seqs=rows,
            max_model_len=longest,
            num_blocks=rows * (blocks_for(longest) + 2) + 1,
            chunk_tokens=max(512, rows + 1),
            steps_per_launch=steps_per_launch,
        )
        self.core.capture()
        self.running = Running(self.core)
        self.step = self.running.step
        for id in range(rows):
            text = [(7 * id + 13 * place) % model.config.vocab_size for place in range(prompt)]
            request = Request(id, text, GREEDY, 7, most)
            self.running.add(TrackedRequest(id, None, request, NoText(), heard=False))  # type: ignore[arg-type]
        while self.core.scheduler.waiting or self.core.scheduler.prefilling:
            self.step()
        flights = self.core._flights
        asleep = self.core._loops._mark = TimedMark(self.core._loops._mark)
        marks = [TimedMark(mark) for mark in islice(flights._marks, 2)]
        flights._marks = cycle(marks)
        self.marks = [asleep, *marks]

    def host_us(self, count: int) -> list[float]:
        """Of each step the host's time without its waiting for the device."""
        samples, changes = [], self.core.scheduler.changes
        for _ in range(count):
            before, started = self._waited(), time.perf_counter()
            self.step()
            samples.append((time.perf_counter() - started - (self._waited() - before)) * 1e6)
        assert self.core.scheduler.changes == changes, "a request ended or was preempted"
        return samples

    def loop_ms(self, count: int) -> float:
        """Of a step in a loop of `count`, by the host's clock, from an idle device to an idle device."""
        self.core.buffers.platform.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            self.step()
        self.core.buffers.platform.synchronize()
        return (time.perf_counter() - started) * 1e3 / count

    def many_us(self, launches: int) -> list[tuple[float, float]]:
        """Of so many launches of many steps, µs a token of a row: in all, and the host's without its waiting."""
        samples, rows, stats = [], len(self.core.scheduler.rows), self.core.runner.stats
        while len(samples) < launches:
            before, waited = stats.looped_steps, self._waited()
            started = time.perf_counter()
            self.step()
            whole = (time.perf_counter() - started) * 1e6
            if steps := stats.looped_steps - before:
                host = whole - (self._waited() - waited) * 1e6
                samples.append((whole / steps, host / (steps * rows)))
        return samples

    def bare_step(self) -> None:
        """The graph alone, without the engine. The rows go on by a token that nobody reads."""
        self.core.runner.graph(len(self.core.scheduler.rows)).recording.replay()

    def _waited(self) -> float:
        return sum(mark.waited for mark in self.marks)

    @torch.inference_mode()
    def rewind(self, tokens: int) -> None:
        """Put every row back by so many tokens: after replays that nobody has read."""
        self.core.buffers["positions"].sub_(tokens)
        self.core.buffers["seq_lens"].sub_(tokens)
