"""Which groups can have our kernels, and which can exchange addresses: asked once, with one answer for all ranks."""

from __future__ import annotations

import torch

from stepgraph.comm.cuda_ipc import CudaIpc
from stepgraph.comm.errors import CommError
from stepgraph.comm.group import Group
from stepgraph.ops import nvrtc

MOST_RANKS = 8
"""Ranks that the kernels' parameters have room for."""
_PROBE = 256  # bytes


def why_no_kernels(group: Group) -> str | None:
    """Why a group sums through its library only: the same answer on every rank. None: it need not."""
    reasons = [reason for reason in group.exchange(_why_not_here(group)) if reason is not None]
    return reasons[0] if reasons else None


def _why_not_here(group: Group) -> str | None:
    if group.device.type != "cuda":
        return "the group is on CPUs"
    if group.ranks.spans_nodes:
        return "the group spans nodes, and peers' memory is read within one"
    if not 2 <= group.world <= MOST_RANKS:
        return f"{group.world} ranks; the kernels are for 2 to {MOST_RANKS}"
    if not nvrtc.available():
        return "cuda-bindings is not installed"
    here = group.device.index
    far = [i for i in range(group.world) if i != here and not torch.cuda.can_device_access_peer(here, i)]
    return f"GPU {here} cannot read the memory of GPU {far[0]}" if far else None


def why_no_rows(group: Group, ipc: CudaIpc) -> str | None:
    """Why addresses of captured inputs cannot be exchanged: tried once, on all ranks alike."""
    probe = torch.zeros(_PROBE, dtype=torch.uint8, device=group.device)
    reason, handle = None, b""
    try:
        handle, _ = ipc.export(probe.data_ptr())
    except CommError as error:
        reason = str(error)
    everyone = group.exchange((reason, handle))
    reasons = [why for why, _ in everyone if why is not None]
    if not reasons:
        try:
            for rank, (_, theirs) in enumerate(everyone):
                if rank != group.rank:
                    ipc.open(theirs)
        except CommError as error:
            reason = str(error)
        reasons = [why for why in group.exchange(reason) if why is not None]
    return f"the allocator's memory cannot be shared ({reasons[0]})" if reasons else None
