"""The CUDA backend: decode in CUDA C++, the rest as in the Triton backend."""

from collections.abc import Mapping

import torch

from stepgraph.ops.attention.contract import AttentionShape, LiveTensors
from stepgraph.ops.attention.cuda_decode import CudaDecode
from stepgraph.ops.attention.triton_backend import TritonAttention


class CudaAttention(TritonAttention):
    """As `TritonAttention`, with a decode kernel of its own for bfloat16 and float16; float32 takes Triton's.

    Raises ConfigError at the first decode where the kernel cannot be compiled.
    """

    name = "cuda"

    def __init__(self, shape: AttentionShape, device: torch.device, *, max_rows: int, max_len: int) -> None:
        super().__init__(shape, device, max_rows=max_rows, max_len=max_len)
        overlap, num_sms = self.decode_plan.config.pdl, self.decode_plan.num_sms
        self.kernel = CudaDecode(shape, device, num_sms=num_sms, max_rows=max_rows, max_len=max_len, overlap=overlap)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        own = ("kernel.parts", "kernel.levels", "kernel.arrived")
        return LiveTensors(self, *super().tensors(), *own)  # float32 takes Triton's

    def splits(self, rows: int) -> int:
        return self.kernel.splits(rows)

    def decode(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        if q.dtype == torch.float32 or q.shape[0] > self.decode_plan.max_rows:  # the latter is refused there
            super().decode(q, kv, block_tables, seq_lens, out)
        else:
            self.kernel(q, kv, block_tables, seq_lens, out)
