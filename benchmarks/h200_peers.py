"""A greedy decode step on an H200: ours beside what others compile it to, in turns in one run.

python benchmarks/h200_peers.py [--shapes llama-3.2-1b llama-3-8b] [--rows 1 16 64]
    [--peers gpt-fast-like transformers]

Each shape has a file of its own.

rows: at which the peers are compiled (ours run at 1 to 256 all the same). A peer is compiled as a whole for every size,
    which takes most of a minute for 32 layers. The file is written after each size, so that a run may be cut.
peers: see `peers.py`; one that cannot be imported is left out, with the reason. Fewer than all have a file of their
    own.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from common import in_turns, quantiles, ratio, versions
from h200_fused import BIG, CONTEXT, MOST_ERROR, ROUNDS, SIZES, SMALL, captured, compared, floor_ms, ms, write
from peers import PEERS, Compiled, PeerMissing

from stepgraph.engine.model import DecoderModel
from stepgraph.measure.decode import DecodeRows, load_model
from stepgraph.measure.stream import read_limit
from stepgraph.runtime import GraphConfig

SHAPE_SIZES = {SMALL: [1], BIG: SIZES}  # the short one first: what fails does so soon
PEER_ROWS = [1, 16, 64]
VLLM_MS = {1: 4.91, 2: 4.90, 4: 4.97, 8: 5.07, 16: 5.30, 64: 6.63, 256: 13.64}  # of BIG, by rows
DEFINITION = (
    f"One greedy decode step at a context of {CONTEXT}, random bfloat16 weights: all layers, LM head and argmax. "
    "`unfused` and each peer in turns with `fused`, with 95 % intervals of the ratios. gpt-fast-like: plain torch as "
    "gpt-fast writes it, a contiguous static KV cache, one position for all rows. transformers: its Llama with its "
    "static cache. Both compiled as a whole for one size (mode reduce-overhead, a CUDA graph), with the argmax inside, "
    "at a few numbers of rows. Floor: bytes of weights and KV at the read limit. vLLM: from another run, not in turns."
)
VLLM_COLUMN = "vLLM 0.26, another run"


class Table:
    """What was measured of a shape, and in `wrong` what should not be. peers: those with columns, by name."""

    def __init__(self, shape: str, peers: Sequence[str], limit: dict[str, float]) -> None:
        self.columns = ["shape", "rows", "fused", "p10", "p90", "unfused", "unfused / fused", "from", "to", "floor"]
        for name in peers:
            self.columns += [name, f"{name} / fused", "from", "to"]
        self.columns.append(VLLM_COLUMN)
        self.rows: list[list[Any]] = []
        self.samples: dict[str, Any] = {}
        self.wrong: list[str] = []
        self._name = re.sub(r"\W", "_", "_".join(["h200_peers", shape, *(() if set(peers) == set(PEERS) else peers)]))
        self._shape, self._peers, self._run, self._limit = shape, peers, set(peers), limit

    def measure(self, sizes: Sequence[int], peer_sizes: Sequence[int]) -> None:
        """peer_sizes: those among the sizes at which the peers run too."""
        shape = self._shape
        names = ("fused", "unfused")
        models = [load_model(shape, device="cuda", max_len=CONTEXT + 1, operations=name) for name in names]
        fused, unfused = (captured(model, CONTEXT, *sizes) for model in models)
        truth = first_logits(models[1])
        for size in sizes:
            for decode in (fused, unfused):
                decode.stage(size)
            found = compared(fused, unfused)
            took = quantiles(found["fused"])
            row = [shape, size, took["median"], took["p10"], took["p90"], statistics.median(found["unfused"])]
            row += [*found["ratio"], floor_ms(shape, size, CONTEXT, self._limit["median"])]
            for name in self._peers:
                told = None
                if size in peer_sizes and name in self._run:
                    told = self._peer(name, models[1], fused, size, truth)
                    free()
                row += [None] * 4 if told is None else [statistics.median(told["peer"]), *told["ratio"]]
                found[name] = told
            self.rows.append([*row, VLLM_MS.get(size) if shape == BIG else None])
            self.samples[f"{shape}, {size}"] = found
            print(*self.rows[-1], flush=True)
            self._write()

    def _peer(
        self, name: str, model: DecoderModel, fused: DecodeRows, size: int, truth: torch.Tensor
    ) -> dict[str, Any] | None:
        """Its times in turns with those of `fused`, and what it was compiled to. None: it cannot run, here or later."""
        where = f"{name}, {size} rows"
        try:
            peer = PEERS[name](model, size, CONTEXT)
            compiled = Compiled(peer)
            error = from_truth(peer, compiled, truth)
            made = {"seconds": compiled.seconds, "graphs": compiled.graphs, "skips": compiled.skips, "error": error}
            print(where, made, flush=True)
            if compiled.graphs != 1 or compiled.skips:
                self.wrong.append(f"{where}: {compiled.graphs} graphs a step, {compiled.skips} given up")
            if not error < MOST_ERROR:
                self.wrong.append(f"{where}: logits are {error:.2g} from ours")
            pairs = in_turns(ROUNDS, lambda: ms(compiled), lambda: ms(fused))
            return {"peer": [a for a, _ in pairs], "fused": [b for _, b in pairs], "ratio": ratio(pairs), **made}
        except PeerMissing as reason:
            print(f"{name} is left out: {reason}", flush=True)
        except Exception:
            traceback.print_exc()
            self.wrong.append(f"{where} failed")
        self._run.remove(name)
        return None

    def _write(self) -> None:
        packages = versions("torch", "triton", "cuda-bindings", "transformers")
        more = {"samples": self.samples, "read_limit": self._limit, "versions": packages}
        write(self._name, DEFINITION, "ms", self.columns, self.rows, **more)


def first_logits(model: DecoderModel) -> torch.Tensor:
    """Of token 1 at position 0, which no noise in a cache changes: float32 [vocab]."""
    decode = DecodeRows(model, GraphConfig.preset("NONE"), rows=1, context=1)
    decode.stage(1)
    decode.rewind()
    decode.buffers["tokens"].fill_(1)
    return decode.logits()[0].float()


def from_truth(peer: Any, compiled: Compiled, truth: torch.Tensor) -> float:
    """How far its logits of the same are from those, of the row that is furthest."""
    peer.place(0)
    peer.tokens.fill_(1)
    got = compiled.step().float()
    return float((got - truth).norm(dim=-1).max() / truth.norm())


def free() -> None:
    """A peer's compiled code, its graphs and its cache."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Decode steps on an H200 beside those that others compile.")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPE_SIZES), default=list(SHAPE_SIZES))
    parser.add_argument("--rows", type=int, nargs="+", choices=SIZES, default=PEER_ROWS, help="of the peers")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    return parser.parse_args(given)


@torch.no_grad()  # and not inference_mode, whose tensors the compiler handles otherwise
def main(given: Sequence[str] | None = None) -> int:
    asked = arguments(given)
    limit = read_limit()
    print(f"read limit {limit['median'] / 1e12:.2f} TB/s ({limit['p10'] / 1e12:.2f} to {limit['p90'] / 1e12:.2f})")
    wrong = []
    for shape in asked.shapes:
        started, table = time.perf_counter(), Table(shape, asked.peers, limit)
        table.measure(SHAPE_SIZES[shape], asked.rows)
        wrong += table.wrong
        free()
        print(f"{shape}: {time.perf_counter() - started:.0f} s", flush=True)
    print("; ".join(wrong) or "nothing is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
