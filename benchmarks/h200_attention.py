"""Paged decode of the 8B shape on a GPU: how fast each configuration reads the KV cache, beside a read-only stream.

    python benchmarks/h200_attention.py [--only NAME ...]

Each cell is one CUDA graph of decodes over so many layers that the L2 cache holds few of them. Every backend is made
for 8192 tokens and 64 rows, and measured at all lengths. None is measured before it agreed with float64.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

import torch
from common import commit, device_ms, machine, quantiles, versions, write_result

from stepgraph.measure.stream import read_limit
from stepgraph.ops.attention import AttentionShape
from stepgraph.ops.attention.cuda_backend import CudaAttention
from stepgraph.ops.attention.decode_plan import DecodeConfig
from stepgraph.ops.attention.triton_backend import TritonAttention

SHAPE = AttentionShape(32, 8, 128)
BATCHES, CONTEXTS = (1, 16, 64), (512, 2048, 8192)
MAX_LEN, MAX_ROWS = max(CONTEXTS), max(BATCHES)
TOKEN_BYTES = 2 * SHAPE.num_kv_heads * SHAPE.head_dim * 2
CACHE_BYTES = 6 << 30  # three layers of the largest case
GRAPH_BYTES = 1 << 30  # what one graph reads, where 256 layers reach it: many times the L2
CHECKED = [8192, 1, 0, 15, 16, 17, 127, 129, 1000, 4097, 8191]
BAR = 0.80  # of the read limit, at batch 1 and 8192 tokens

DEFAULT = "cuda"  # what is taken on this device; the others are Triton's

_DEEP = DecodeConfig(num_stages=4, min_chunk=64)  # tiles of 64 tokens, three on their way to shared memory
_AHEAD = DecodeConfig(num_stages=1, min_chunk=64)  # the next tile in registers
CANDIDATES = {
    "one program a head": DecodeConfig(num_stages=4, min_chunk=MAX_LEN, max_chunk=MAX_LEN),
    "tile 64, 3 stages, 2 a SM": replace(_DEEP, num_stages=3),
    "tile 64, 4 stages, 2 a SM": _DEEP,
    "tile 64, 4 stages, 8 warps, 1 a SM": replace(_DEEP, num_warps=8, programs_per_sm=1),
    "tile 128, 3 stages, 8 warps, 1 a SM": replace(
        _DEEP, num_stages=3, num_warps=8, tile_bytes=32 << 10, programs_per_sm=1
    ),
    "tile 32, 4 stages, 4 a SM": replace(_DEEP, tile_bytes=8 << 10, programs_per_sm=4),
    "tile 64, ahead, 2 a SM": _AHEAD,
    "tile 64, ahead, 8 warps, 2 a SM": replace(_AHEAD, num_warps=8),
    "tile 128, ahead, 8 warps, 1 a SM": replace(_AHEAD, num_warps=8, tile_bytes=32 << 10, programs_per_sm=1),
    "tile 32, ahead, 3 a SM": replace(_AHEAD, tile_bytes=8 << 10, programs_per_sm=3),
    "tile 64, ahead, 2 a SM, chunks from 256": replace(_AHEAD, min_chunk=256),
    "tile 64, ahead, 1 a SM": replace(_AHEAD, programs_per_sm=1),
    "tile 64, 3 stages, 1 a SM": replace(_DEEP, num_stages=3, programs_per_sm=1),
    "tile 32, ahead, 2 warps, 4 a SM": replace(_AHEAD, num_warps=2, tile_bytes=8 << 10, programs_per_sm=4),
    "tile 32, 6 stages, 1 a SM": replace(_DEEP, num_stages=6, tile_bytes=8 << 10, programs_per_sm=1),
    "tile 32, 4 stages, 2 a SM": replace(_DEEP, num_stages=4, tile_bytes=8 << 10),
    "tile 64, 2 stages, 2 a SM": replace(_DEEP, num_stages=2),
}


def make(config: DecodeConfig | None) -> TritonAttention:
    if config is None:
        return CudaAttention(SHAPE, torch.device("cuda"), max_rows=MAX_ROWS, max_len=MAX_LEN)
    return TritonAttention(SHAPE, torch.device("cuda"), max_rows=MAX_ROWS, max_len=MAX_LEN, config=config)


class Caches:
    """One allocation, seen as the caches of any batch: layers [blocks, 2, 16, heads, size], blocks in random order."""

    def __init__(self) -> None:
        noise = torch.Generator("cuda").manual_seed(0)
        self._values = torch.empty(CACHE_BYTES // 2, dtype=torch.bfloat16, device="cuda").normal_(generator=noise)
        self._q = torch.randn(MAX_ROWS, SHAPE.num_heads, SHAPE.head_dim, device="cuda", generator=noise).bfloat16()

    def views(self, lengths: list[int]) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Queries, the layers' caches, block tables and lengths."""
        rows, blocks_a_row = len(lengths), -(-max(lengths) // 16)
        blocks, layer_bytes = rows * blocks_a_row, rows * blocks_a_row * 16 * TOKEN_BYTES
        layers = min(256, max(3, GRAPH_BYTES // layer_bytes), CACHE_BYTES // layer_bytes)
        tokens = self._values[: layers * layer_bytes // 2]
        cache = tokens.view(blocks, layers, 2, 16, SHAPE.num_kv_heads, SHAPE.head_dim)
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(rows))
        tables = torch.zeros(rows, MAX_LEN // 16, dtype=torch.int32, device="cuda")  # as wide as an engine's
        tables[:, :blocks_a_row] = order.view(rows, blocks_a_row)
        seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        return self._q[:rows], [cache[:, layer] for layer in range(layers)], tables, seq_lens


def in_float64(q: torch.Tensor, kv: torch.Tensor, tables: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    out = torch.zeros(q.shape, dtype=torch.float64, device="cuda")
    for row, length in enumerate(lengths):
        keys, values = (kv[tables[row].long(), half].flatten(0, 1)[:length].double() for half in (0, 1))
        queries = q[row].double().view(SHAPE.num_kv_heads, -1, SHAPE.head_dim)
        weights = (
            (torch.einsum("hgd,lhd->hgl", queries, keys) * SHAPE.scale).softmax(-1) if length else queries[..., :0]
        )
        out[row] = torch.einsum("hgl,lhd->hgd", weights, values).flatten(0, 1)
    return out


def worst_error(backend: TritonAttention, caches: Caches) -> float:
    """The largest error of a head, relative to its length, for one batch of mixed lengths and each of them alone."""
    worst = 0.0
    for lengths in (CHECKED, *([length] for length in CHECKED if length)):
        q, layers, tables, seq_lens = caches.views(lengths)
        out = torch.full_like(q, float("nan"))
        backend.decode(q, layers[1], tables, seq_lens, out)
        want = in_float64(q, layers[1], tables, lengths)
        error = (out.double() - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-30)
        worst = max(worst, float(error.nan_to_num(float("inf")).max()))
    return worst


def microseconds(backend: TritonAttention, caches: Caches, batch: int, context: int) -> list[float]:
    """Of one layer, averaged over a graph of many; one sample a replay."""
    q, layers, tables, seq_lens = caches.views([context] * batch)
    out = torch.empty_like(q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for kv in layers:
            backend.decode(q, kv, tables, seq_lens, out)
    return [ms * 1e3 / len(layers) for ms in device_ms(graph.replay, 20)]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=None, help="measure the configurations whose name contains one")
    options = parser.parse_args()
    chosen: dict[str, DecodeConfig | None] = {DEFAULT: None}
    chosen |= {
        name + (", pdl" if pdl else ""): replace(config, pdl=pdl)
        for name, config in CANDIDATES.items()
        for pdl in (False, True)
        if options.only is None or any(word in name for word in options.only)
    }
    started = time.perf_counter()
    limit = read_limit()
    print(f"read limit {limit['median'] / 1e12:.2f} TB/s ({limit['p10'] / 1e12:.2f} to {limit['p90'] / 1e12:.2f})")
    caches = Caches()
    cells = [(batch, context) for batch in BATCHES for context in CONTEXTS]
    rows, samples, wrong = [], {}, []
    print(f"{'µs a layer / share of the limit':50}" + "".join(f"{f'{b}x{c}':>15}" for b, c in cells))
    for name, config in chosen.items():
        backend = make(config)
        error = worst_error(backend, caches)
        if error > 7e-3:
            wrong.append(name)
            print(f"{name:50} is off by {error:.2g}: not measured")
            continue
        line = f"{name:50}"
        for batch, context in cells:
            times = microseconds(backend, caches, batch, context)
            q = quantiles(times)
            share = batch * context * TOKEN_BYTES / (q["median"] * 1e-6) / limit["median"]
            samples[f"{name}, {batch}x{context}"] = times
            splits = backend.splits(batch)
            rows.append([name, batch, context, splits, q["median"], q["p10"], q["p90"], share * 100])
            line += f"{q['median']:9.2f} {share:5.0%}"
        print(line, flush=True)
    best = max((row for row in rows if row[1:3] == [1, MAX_LEN]), key=lambda row: row[-1], default=None)
    print(f"{time.perf_counter() - started:.0f} s; best at batch 1 and {MAX_LEN} tokens: {best}")
    write_result(
        {
            "name": "h200_attention",
            "definition": "Paged decode with 32 heads, 8 KV heads of 128, bfloat16, blocks of 16 tokens in random "
            "order: one layer's time in one CUDA graph over enough layers to defeat the L2 cache, and the share of "
            f"the read limit, {limit['median'] / 1e12:.2f} TB/s for a sum over 4 GiB in the same run. One backend for "
            f"up to {MAX_ROWS} rows and {MAX_LEN} tokens at all lengths; `splits` is programs a row and KV head. The "
            f"default configuration; {len(chosen)} were measured, and are in the file.",
            "unit": "µs",
            "machine": machine(),
            "versions": versions("torch", "triton"),
            "commit": commit(),
            "columns": ["batch", "context", "splits", "median", "p10", "p90", "% of the limit"],
            "rows": [row[1:] for row in rows if row[0] == DEFAULT],
            "configurations": rows,
            "samples": {"read limit": limit, **samples},
        }
    )
    return 0 if best is not None and best[-1] >= BAR * 100 and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
