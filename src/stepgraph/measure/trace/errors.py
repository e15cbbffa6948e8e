"""What goes wrong with traces."""

from __future__ import annotations

from stepgraph.runtime.errors import StepgraphError


class TraceError(StepgraphError):
    """A trace that cannot be read, or that does not hold what is looked for."""
