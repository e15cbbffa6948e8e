"""The ladders that others capture by default, for comparison."""

from __future__ import annotations

from stepgraph.runtime.ladder import Ladder


def tensorrt_llm(largest: int, *, powers: bool = False) -> Ladder:
    """TensorRT-LLM's rule with padding: 1, 2, 4, every 8 to 128, then every 64; the largest size appended.

    powers: as it was before that, powers of two from 256 on (23 sizes at 2048 instead of 49).
    Source: `CudaGraphConfig._generate_cuda_graph_batch_sizes` in `tensorrt_llm/llmapi/llm_args.py`.
    """
    beyond = [2**power for power in range(8, largest.bit_length())] if powers else range(192, largest + 1, 64)
    sizes = {1, 2, 4, *range(8, 129, 8), *beyond}
    return Ladder.explicit({size for size in sizes if size <= largest} | {largest})


def peers(largest: int) -> dict[str, Ladder]:
    """By name, each with `largest` as its last size."""
    return {
        "vLLM": Ladder.vllm(largest),
        "SGLang": Ladder.sglang(largest),
        "TensorRT-LLM": tensorrt_llm(largest),
        "TensorRT-LLM, before": tensorrt_llm(largest, powers=True),
        "every size": Ladder.explicit(range(1, largest + 1)),
    }
