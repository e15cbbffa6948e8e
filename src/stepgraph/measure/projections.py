"""The projections of one shape by themselves, each over so many weights that no cache serves them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from stepgraph.engine.config import ModelConfig
from stepgraph.measure.graph import CallGraph
from stepgraph.ops.fused import cuda_projection
from stepgraph.ops.fused.operation_set import FusedOperations
from stepgraph.ops.fused.tiling import OneTile, Tile
from stepgraph.ops.layer import inverse_frequencies, rotary_tables
from stepgraph.ops.operations import DecoderShape, Hidden, LayerWeights, Places

_POOL_BYTES = 3 << 29  # of weights: many times the L2 cache
_GRAPH_BYTES = 1 << 30  # that one graph reads, at least
_MOST_LAUNCHES = 128
_POSITION = 5


class Projections:
    """Random weights and rows, and one projection of them with a tile, alone or in a graph of many."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._config, self._device, self._dtype = config, device, dtype
        cos, sin = rotary_tables(inverse_frequencies(config.head_dim, 1e4), 16, dtype, device)
        self._shape = DecoderShape(config.num_heads, config.num_kv_heads, config.head_dim, 1e-5, cos, sin)
        heads, hidden = config.num_heads * config.head_dim, config.hidden_size
        self._sizes = {
            "qkv": (heads + 2 * config.num_kv_heads * config.head_dim, hidden),
            "attention_out": (hidden, heads),
            "gate_up": (2 * config.intermediate_size, hidden),
            "down": (hidden, config.intermediate_size),
            "lm_head": (config.vocab_size, hidden),
        }
        most = max(out * width for out, width in self._sizes.values())
        noise = torch.Generator(device).manual_seed(0)
        elements = max(_POOL_BYTES // dtype.itemsize, most + (1 << 25))
        self._pool = torch.empty(elements, dtype=dtype, device=device).normal_(generator=noise)

    def size(self, operation: str) -> tuple[int, int]:
        """(out, in) of the weight."""
        return self._sizes[operation]

    def weight_bytes(self, operation: str) -> int:
        out, width = self._sizes[operation]
        return out * width * self._dtype.itemsize

    def works(self, operation: str, rows: int, tile: Tile) -> bool:
        """Whether a tile's kernel can be built for it."""
        pairs = {"qkv": self._config.head_dim // 2, "gate_up": self._config.intermediate_size}.get(operation)
        if operation == "qkv" and self._config.qk_norm:
            pairs = None
        if tile.kernel == "cuda":
            return cuda_projection.supports(tile, rows, self._weight(operation, 0), pairs)
        return rows == 1 or tile.outputs * max(16, rows) <= 64 * 64

    def compile_ahead(self, wanted: Sequence[tuple[str, int, Tile]]) -> None:
        """Fill the cache of compiled CUDA kernels, on all cores at once."""
        modes = {"qkv": "QKV", "attention_out": "ADD", "gate_up": "SWIGLU", "down": "ADD", "lm_head": "STORE"}
        jobs = set()
        for operation, rows, tile in wanted:
            if tile.kernel == "cuda" and self.works(operation, rows, tile):
                normed = operation in ("qkv", "gate_up", "lm_head")
                bias = operation == "qkv" and self._config.qkv_bias
                mode = "STORE" if operation == "qkv" and self._config.qk_norm else modes[operation]
                jobs.add((mode, normed, bias, tile, rows))
        with ThreadPoolExecutor() as pool:
            for done in [pool.submit(cuda_projection.compile_ahead, *job, self._dtype, self._device) for job in jobs]:
                done.result()

    def result(self, operation: str, rows: int, tile: Tile | None) -> torch.Tensor:
        """What it gives for the same rows and the same weights at every call, as one tensor."""
        state = _State(self, rows)
        found = state.run(self._made(tile), operation, self._weight(operation, 0))
        return torch.cat((found.flatten(), state.written())) if operation == "qkv" else found

    def error(self, operation: str, rows: int, tile: Tile | None) -> float:
        """Of `result`, relative to that of the library's."""
        want, got = (self.result(operation, rows, one).float() for one in (None, tile))
        return float((got - want).norm() / want.norm())

    def graph(self, operation: str, rows: int, tile: Tile | None) -> tuple[CallGraph, int]:
        """A graph of it with one weight after the other, and how many."""
        operations, state = self._made(tile), _State(self, rows)
        launches = min(_MOST_LAUNCHES, max(4, -(-_GRAPH_BYTES // self.weight_bytes(operation))))
        weights = [self._weight(operation, index / launches) for index in range(launches)]

        def all_of_them() -> None:
            for weight in weights:
                state.run(operations, operation, weight)

        return CallGraph(all_of_them, warm=lambda: state.run(operations, operation, weights[0])), launches

    def _made(self, tile: Tile | None) -> FusedOperations:
        return FusedOperations(self._shape, OneTile(tile))

    def _weight(self, operation: str, share: float) -> torch.Tensor:
        """From this share of the pool on, [out, in]."""
        out, width = self._sizes[operation]
        first = int((self._pool.numel() - out * width) * share) // 64 * 64
        return self._pool[first : first + out * width].view(out, width)


class _State:
    """What a projection reads and writes besides its weight."""

    def __init__(self, projections: Projections, rows: int) -> None:
        config, device, dtype = projections._config, projections._device, projections._dtype

        def noise(*size: int) -> torch.Tensor:
            drawn = torch.Generator(device).manual_seed(rows)
            return torch.randn(size, generator=drawn, device=device, dtype=torch.float32).to(dtype)

        self._hidden, self._attended = noise(rows, config.hidden_size), noise(rows, config.num_heads * config.head_dim)
        self._activated = noise(rows, config.intermediate_size)
        self._norm = torch.ones(config.hidden_size, device=device, dtype=dtype)
        self._bias = noise(projections.size("qkv")[0]) if config.qkv_bias else None
        self._head_norm = torch.ones(config.head_dim, device=device, dtype=dtype) if config.qk_norm else None
        positions = torch.full((rows,), _POSITION, device=device)
        tables = torch.arange(1, rows + 1, dtype=torch.int32, device=device)[:, None].contiguous()
        self._places = Places(positions, tables)
        self._kv = torch.zeros(rows + 1, 2, 16, config.num_kv_heads, config.head_dim, dtype=dtype, device=device)

    def run(self, operations: FusedOperations, operation: str, weight: torch.Tensor) -> torch.Tensor:
        """One projection; returns its result."""
        if operation == "lm_head":
            return operations.head(Hidden(self._hidden), self._norm, weight)
        if operation in ("attention_out", "down"):
            values = self._attended if operation == "attention_out" else self._activated
            operations.add(operation, values, weight, self._hidden)
            return self._hidden
        layer = LayerWeights(
            input_norm=self._norm, qkv=weight, attention_out=weight, post_norm=self._norm, gate_up=weight, down=weight,
            qkv_bias=self._bias, q_norm=self._head_norm, k_norm=self._head_norm,
        )  # fmt: skip
        if operation == "gate_up":
            return operations.activated(self._hidden, layer)
        return operations.queries(self._hidden, layer, self._places, self._kv)

    def written(self) -> torch.Tensor:
        """The keys and values of the step, in one row."""
        return self._kv[1:, :, _POSITION].flatten()
