"""A step for both phases: each request adds up what its tokens look up in a table."""

import torch

from stepgraph.runtime import GraphConfig, GraphRunner, PaddingPolicy, Slot, StaticBuffers, graph_break

MAX_REQUESTS, MAX_TOKENS = 8, 32
SLOTS = [
    Slot("ids", torch.int64, "token", PaddingPolicy.ZERO),
    Slot("query_lens", torch.int32, "request", PaddingPolicy.ZERO, mixed_only=True),
    Slot("total", torch.float32, "request", PaddingPolicy.ZERO, owner="device"),
]


def add_rows(total: torch.Tensor, looked_up: torch.Tensor, query_lens: torch.Tensor) -> torch.Tensor:
    """total[r] += the sum of request r's rows; what lies behind the last request's rows is nobody's."""
    ends = query_lens.cumsum(0)
    place = torch.arange(len(looked_up), device=total.device)
    row = torch.searchsorted(ends, place, right=True).clamp(max=len(total) - 1)
    return total.index_add_(0, row, looked_up * (place < ends[-1]))


class Sums:
    """Returns `total` (where it lies), `sums` (a row a request) and `looked_up` (a row a token)."""

    def __init__(self, device: torch.device | str, add=add_rows) -> None:
        self.table = torch.arange(100, device=device).float() / 8  # token 0, which pads, adds nothing
        self.add = add

    def __call__(
        self, ids: torch.Tensor, total: torch.Tensor, query_lens: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        looked_up = self.table[ids]
        if query_lens is None:
            total.add_(looked_up.view(len(total), -1).sum(1))
        else:
            self.add(total, looked_up, query_lens)
        return {"total": total, "sums": total * 2, "looked_up": looked_up * 1}


def sums_runner(config: GraphConfig, device: torch.device | str = "cpu", breaks: bool = True) -> GraphRunner:
    """breaks: adding rows in a mixed batch is a break."""
    buffers = StaticBuffers(max_requests=MAX_REQUESTS, max_tokens=MAX_TOKENS, slots=SLOTS, device=device)
    step = Sums(device, graph_break(add_rows) if breaks else add_rows)
    runner = GraphRunner(step, buffers, config)
    runner.capture()
    return runner
