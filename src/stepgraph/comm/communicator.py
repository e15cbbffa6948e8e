"""A group's collectives, made for its device."""

from __future__ import annotations

from pathlib import Path

import torch

from stepgraph.comm.all_reduce import AllReduce
from stepgraph.comm.eligible import why_no_kernels
from stepgraph.comm.group import Group
from stepgraph.comm.symmetric import SymmetricKernels
from stepgraph.comm.thresholds import Table, load_table, read_tables


def make_all_reduce(
    group: Group, *, tables: Path | None = None, table: Table | None = None, limit_s: float = 10.0
) -> AllReduce:
    """The group's all-reduce: with our kernels where they run, through the library elsewhere.

    tables: a folder with tuned tables, which must have one for these ranks, instead of the package's own. table: this
    one. limit_s: see `SymmetricKernels`.

    Raises:
        CommError: a table that is not there or cannot be read, even where it would not be used.
    """
    why = why_no_kernels(group)
    if why is not None:
        if tables is not None:
            read_tables(tables, group.world)
        return AllReduce(group, why_library=why)
    table = device_table(group, tables) if table is None else table
    return AllReduce(group, SymmetricKernels(group, table, limit_s=limit_s), table)


def device_table(group: Group, tables: Path | None = None) -> Table:
    """The thresholds of the group's GPUs.

    Raises:
        CommError: none in the folder, a damaged one, or ranks with different ones.
    """
    name, capability = torch.cuda.get_device_name(group.device), torch.cuda.get_device_capability(group.device)
    table = load_table(name, group.world, capability, tables)
    group.agree("the table of thresholds", table.as_dict())
    return table
