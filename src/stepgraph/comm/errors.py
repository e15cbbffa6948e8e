"""What can go wrong between ranks."""

from stepgraph.runtime.errors import StepgraphError


class CommError(StepgraphError):
    """Ranks that disagree, one that is gone, or a collective that cannot run as asked. Says which rank, and why."""
