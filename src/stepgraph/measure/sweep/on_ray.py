"""The same cells over a Ray cluster: a GPU each, a process each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from stepgraph.measure.sweep.cells import Cell, Work
from stepgraph.measure.sweep.measure_cell import failed_row, reason_of
from stepgraph.measure.sweep.processes import Measure
from stepgraph.runtime.errors import ConfigError

RETRIES = 2
"""How often a cell is run again whose worker was killed."""


def require_ray() -> None:
    """Raises ConfigError where Ray is not installed."""
    try:
        import ray  # noqa: F401
    except ImportError:
        raise ConfigError("sweep: Ray is not installed; pip install 'stepgraph[ray]', or leave out --ray") from None


def run_on_ray(work: Work, cells: Sequence[Cell], measure: Measure, *, address: str) -> Iterator[dict[str, Any]]:
    """A row for each cell, as they come. A cell takes a whole GPU, or without one a CPU.

    address: of a cluster, `auto` for the one that this machine belongs to, `local` to start one here. Its machines
    have stepgraph installed.

    Raises:
        ConfigError: no cluster at the address, or none with a GPU where cells need one.
    """
    import ray

    ours = not ray.is_initialized()
    if ours:
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(f"sweep: no Ray cluster at {address!r}: {error}") from None
    try:
        gpus = 1 if work.device == "cuda" else 0
        if ray.cluster_resources().get("GPU", 0) < gpus:
            raise ConfigError("sweep: the Ray cluster has no GPU; add a machine with one, or measure with --device cpu")
        # A process that lived on would hold memory of a GPU that the next cell is given.
        remote = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=RETRIES, max_calls=1)(_row)
        waiting = {remote.remote(work, cell, measure): cell for cell in cells}
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=1)
            cell = waiting.pop(done[0])
            try:
                yield ray.get(done[0])
            except ray.exceptions.RayError as error:
                yield failed_row(work, cell, str(error))
    finally:
        if ours:
            ray.shutdown()


def _row(work: Work, cell: Cell, measure: Measure) -> dict[str, Any]:
    """On a worker."""
    try:
        return measure(work, cell)
    except Exception as error:
        return failed_row(work, cell, reason_of(error))
