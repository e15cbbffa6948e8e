"""Tensors that do not keep their memory."""

from __future__ import annotations

import torch


def borrow(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same memory, shape and strides that does not keep the memory alive.

    For memory of a graph's pool, which stays where it is for as long as the graphs do: their tensors may come and go.
    """
    storage = tensor.untyped_storage()
    unowned = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    borrowed = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return borrowed.set_(unowned, tensor.storage_offset(), tensor.size(), tensor.stride())
