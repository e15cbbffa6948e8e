"""Who is in a group: what torchrun, or our own launcher, has put into the environment of a process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stepgraph.comm.errors import CommError

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ranks:
    """This process among those of a group.

    local_rank, local_world: among those of its node; the local rank is the number of its GPU.
    host, port: where rank 0's node listens.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    host: str
    port: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Ranks | None:
        """None where no launcher has set anything.

        Raises:
            CommError: some of the variables without the others, one that is no number, or numbers that cannot be.
        """
        if "RANK" not in environment and "WORLD_SIZE" not in environment:
            return None
        absent = [name for name in _NAMES if name not in environment]
        if absent:
            raise CommError(f"ranks: {', '.join(absent)} not set beside RANK or WORLD_SIZE; use torchrun or --tp")
        try:
            rank, world, local_rank, local_world, port = (
                int(environment[name]) for name in _NAMES if name != "MASTER_ADDR"
            )
        except ValueError as error:
            raise CommError(f"ranks: of {', '.join(_NAMES)} one is no number: {error}") from None
        for name, number, among in (("", rank, world), ("LOCAL_", local_rank, local_world)):
            if not 0 <= number < among <= world:  # it would wait for the others forever
                raise CommError(f"ranks: {name}RANK is {number} and {name}WORLD_SIZE {among}; ranks count from 0")
        return cls(rank, world, local_rank, local_world, environment["MASTER_ADDR"], port)

    @property
    def spans_nodes(self) -> bool:
        return self.world > self.local_world

    def environment(self) -> dict[str, str]:
        """The variables that `of` reads."""
        values = (self.rank, self.world, self.local_rank, self.local_world, self.host, self.port)
        return dict(zip(_NAMES, map(str, values), strict=True))
