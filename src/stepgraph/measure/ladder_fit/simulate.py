"""A small simulator of continuous batching: which batch sizes a server decodes, given how long its steps take."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np

from stepgraph.measure.ladder_fit.optimum import Integers
from stepgraph.measure.ladder_fit.requests import Requests


@dataclass(frozen=True)
class Prefill:
    """Prompts computed beside the decoding rows. ns_a_token: of device time. chunk: tokens a step, at most."""

    ns_a_token: int
    chunk: int = 512


@dataclass(frozen=True)
class Served:
    """What a server did. steps: of decoding, by number of rows. step_ns: what one of so many rows took."""

    steps: Integers
    step_ns: Integers

    @property
    def ms_a_step(self) -> float:
        """Of decoding, the mean over all steps."""
        return float(self.steps @ self.step_ns) / int(self.steps.sum()) / 1e6

    @property
    def ms_a_token(self) -> float:
        """The mean over all decoded tokens of the time of the step that decoded it."""
        tokens = self.steps * np.arange(len(self.steps))
        return float(tokens.astype(np.float64) @ self.step_ns) / int(tokens.sum()) / 1e6

    def rows(self, quantile: float) -> int:
        """The number of rows that so large a share of the steps does not exceed."""
        return int(np.searchsorted(np.cumsum(self.steps), quantile * self.steps.sum()))


def simulate(requests: Requests, step_ns: Integers, prefill: Prefill | None = None) -> Served:
    """Serve the requests, first come first served, with as many rows at once as `step_ns` has entries.

    Every step decodes one token of every row. A request takes a row as soon as one is free between two steps, decodes
    all its tokens but the first, which its prefill gave, and leaves. prefill: None where prompts are computed elsewhere
    and take no time; otherwise up to `chunk` of their tokens lengthen each step, and a request decodes once its prompt
    is done. Memory of the KV cache is taken to suffice.

    step_ns: by number of rows, from 0.

    Raises:
        ValueError: no request decodes a token.
    """
    arrivals, tokens, prompts = requests.arrival_ns.tolist(), requests.decode_tokens.tolist(), requests.prompt.tolist()
    times, most = step_ns.tolist(), len(step_ns) - 1
    counts = [0] * (most + 1)
    leaving: list[int] = []  # numbers of the steps after which a row is free, a heap
    prefilling: deque[list[int]] = deque()  # [tokens of the prompt left, tokens to decode]
    now = step = place = 0
    while place < len(arrivals) or leaving or prefilling:
        if not leaving and not prefilling:
            now = max(now, arrivals[place])
        while place < len(arrivals) and arrivals[place] <= now and len(leaving) + len(prefilling) < most:
            if prefill is not None:
                prefilling.append([prompts[place], tokens[place]])
            elif tokens[place]:
                heapq.heappush(leaving, step + tokens[place])
            place += 1
        rows = len(leaving)
        if prefilling and prefill is not None:
            left = prefill.chunk
            joining = []
            while prefilling and left:
                computed = min(left, prefilling[0][0])
                left -= computed
                prefilling[0][0] -= computed
                if not prefilling[0][0]:
                    joining.append(prefilling.popleft()[1])
            now += (times[rows] if rows else 0) + (prefill.chunk - left) * prefill.ns_a_token
            ran = 1
        elif rows:
            joining, ran = [], leaving[0] - step
            if place < len(arrivals) and rows < most:  # nothing changes until one leaves or the next one comes
                ran = min(ran, -(-(arrivals[place] - now) // times[rows]))
            now += ran * times[rows]
        else:
            continue
        counts[rows] += ran if rows else 0
        step += ran
        while leaving and leaving[0] == step:
            heapq.heappop(leaving)
        for decoding in joining:
            if decoding:
                heapq.heappush(leaving, step + decoding)
    if not any(counts):
        raise ValueError("no request decodes a token")
    return Served(np.array(counts, dtype=np.int64), step_ns)
