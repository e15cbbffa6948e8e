"""A few decoder layers with random weights, run by any operation set, and how far two runs are apart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from stepgraph.ops.attention import AttentionShape, get_backend
from stepgraph.ops.layer import inverse_frequencies, rotary_tables
from stepgraph.ops.lora import NO_ADAPTERS, LayerLora, LoraPair, LoraRows
from stepgraph.ops.operations import DecoderShape, LayerWeights, OperationSet

HIDDEN, INTERMEDIATE, VOCAB, BLOCK_SIZE, MAX_BLOCKS = 96, 80, 50, 16, 5


@dataclass(frozen=True)
class Case:
    """One decode step. The rows' lengths count the new token; padded rows have length 0, position 0 and block 0."""

    shape: DecoderShape
    embedding: torch.Tensor
    layers: list[LayerWeights]
    norm: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    kv_cache: torch.Tensor

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Case:
        """The same on a device, its numbers in `dtype`."""

        def move(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.to(device, dtype) if value.is_floating_point() else value.to(device)
            if isinstance(value, list):
                return [move(item) for item in value]
            if isinstance(value, LayerWeights | DecoderShape):
                return replace(value, **{name: move(field) for name, field in vars(value).items()})
            return value

        return Case(**{name: move(value) for name, value in vars(self).items()})


def make_case(
    lengths: list[int],
    *,
    heads: tuple[int, int, int] = (6, 2, 16),
    bias: bool = False,
    head_norms: bool = False,
    sizes: tuple[int, int] = (HIDDEN, INTERMEDIATE),
    seed: int = 0,
) -> Case:
    """heads: query heads, KV heads, head size. sizes: hidden and intermediate. float32 on the CPU.

    What nobody may read of the cache is NaN.
    """
    num_heads, kv_heads, size = heads
    hidden, intermediate = sizes
    noise = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=noise) * columns**-0.5

    def weight(length: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(length, generator=noise)

    qkv = (num_heads + 2 * kv_heads) * size
    layers = [
        LayerWeights(
            input_norm=weight(hidden),
            qkv=matrix(qkv, hidden),
            attention_out=matrix(hidden, num_heads * size),
            post_norm=weight(hidden),
            gate_up=matrix(2 * intermediate, hidden),
            down=matrix(hidden, intermediate),
            qkv_bias=torch.randn(qkv, generator=noise) if bias else None,
            q_norm=weight(size) if head_norms else None,
            k_norm=weight(size) if head_norms else None,
        )
        for _ in range(3)
    ]
    tables = torch.zeros(len(lengths), MAX_BLOCKS, dtype=torch.int32)
    cache = torch.full((1 + len(lengths) * MAX_BLOCKS, len(layers), 2, BLOCK_SIZE, kv_heads, size), float("nan"))
    free = (torch.randperm(len(cache) - 1, generator=noise) + 1).tolist()
    for row, length in enumerate(lengths):
        for index in range(-(-length // BLOCK_SIZE)):
            block = tables[row, index] = free.pop()
            held = min(BLOCK_SIZE, length - 1 - index * BLOCK_SIZE)  # the last token is the one to be written
            cache[block, :, :, :held] = torch.randn(len(layers), 2, held, kv_heads, size, generator=noise)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    frequencies, positions = inverse_frequencies(size, 10000.0), (seq_lens.long() - 1).clamp_min(0)
    cos, sin = rotary_tables(frequencies, MAX_BLOCKS * BLOCK_SIZE, torch.float32, torch.device("cpu"))
    return Case(
        shape=DecoderShape(num_heads, kv_heads, size, 1e-5, cos, sin),
        embedding=torch.randn(VOCAB, hidden, generator=noise),
        layers=layers,
        norm=weight(hidden),
        tokens=torch.randint(VOCAB, (len(lengths),), generator=noise) * (seq_lens > 0),
        positions=positions,
        block_tables=tables,
        seq_lens=seq_lens,
        kv_cache=cache,
    )


def make_adapters(case: Case, seed: int = 0) -> tuple[LoraRows, list[LayerLora]]:
    """Three slots for adapters, two of them active, on the case's device; every third row has none."""
    noise, weights = torch.Generator().manual_seed(seed), case.layers[0]

    def pair(weight: torch.Tensor, *ends: int) -> LoraPair:
        out, width = weight.shape
        a = torch.randn(3, max(len(ends), 1) * 16, width, generator=noise) * width**-0.5
        b = torch.randn(3, out, 16, generator=noise) * 0.25
        return LoraPair(a.to(weight), b.to(weight), ends or (out,))

    queries, keys = (heads * case.shape.head_dim for heads in (case.shape.num_heads, case.shape.num_kv_heads))
    layers = [
        LayerLora(
            pair(weights.qkv, queries, queries + keys, queries + 2 * keys),
            pair(weights.attention_out),
            pair(weights.gate_up, len(weights.gate_up) // 2, len(weights.gate_up)),
            pair(weights.down),
        )
        for _ in case.layers
    ]
    index = torch.arange(len(case.tokens), dtype=torch.int32, device=case.tokens.device) % 3 - 1
    return LoraRows(index, (2 - index).clamp(max=2), 2), layers


def run(
    operations: OperationSet, case: Case, adapters: tuple[LoraRows, list[LayerLora]] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and the cache afterwards (the case keeps its own)."""
    shape, cache = case.shape, case.kv_cache.clone()
    attention = get_backend(
        "reference",
        cache.device,
        AttentionShape(shape.num_heads, shape.num_kv_heads, shape.head_dim, BLOCK_SIZE),
    )

    def attend(q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
        attention.decode(q, kv, case.block_tables, case.seq_lens, out)

    with torch.no_grad():
        places = operations.places(case.positions, case.block_tables, BLOCK_SIZE)
        mine = [NO_ADAPTERS] * len(case.layers) if adapters is None else operations.adapters(*adapters)
        hidden = operations.embed(case.tokens, case.embedding)
        for index, layer in enumerate(case.layers):
            hidden = operations.layer(hidden, layer, places, cache[:, index], attend, mine[index])
        return operations.head(hidden, case.norm, case.embedding), cache


def check_cache(cache: torch.Tensor, before: torch.Tensor, case: Case) -> None:
    """Only the rows' own places were written, and block 0 by padded rows."""
    changed = ~torch.isclose(cache, before, rtol=0, atol=0, equal_nan=True).flatten(4).all(-1)
    where = {(int(block), int(token)) for block, _, _, token in changed.nonzero()}
    real = [row for row, length in enumerate(case.seq_lens.tolist()) if length]
    places = {
        (int(case.block_tables[row, position // BLOCK_SIZE]), position % BLOCK_SIZE)
        for row, position in ((row, int(case.positions[row])) for row in real)
    }
    padded = {(0, 0)} if len(real) < len(case.seq_lens) else set()
    assert where == places | padded


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error of a whole tensor; where both are NaN there is none."""
    got, want = got.cpu().double(), want.cpu().double()
    assert torch.equal(got.isnan(), want.isnan())
    got, want = got.nan_to_num(), want.nan_to_num()
    return float((got - want).norm() / want.norm())
