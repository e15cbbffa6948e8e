"""Odd sizes of one fused operation, for hypothesis."""

from hypothesis import strategies as st
from ops.fused.cases import Case

from stepgraph.ops.fused.tiling import Tile

_HEADS = [(2, 1, 10), (4, 4, 12), (6, 2, 16), (1, 1, 64), (3, 1, 40)]


def cases(operation: str, *, most_out: int, most_width: int) -> st.SearchStrategy[Case]:
    """Tiles are small, so that few columns are many tiles. At least 16 outputs, which a GPU's dot may want."""
    return st.builds(
        Case,
        operation=st.just(operation),
        rows=st.one_of(st.just(1), st.integers(2, 20)),
        out=st.integers(1, most_out),
        width=st.integers(1, most_width),
        heads=st.sampled_from(_HEADS),
        extra=st.booleans(),
        tile=st.builds(
            Tile,
            outputs=st.sampled_from([16, 32]),
            columns=st.sampled_from([16, 64]),
            warps=st.sampled_from([1, 4]),
            stages=st.sampled_from([1, 3]),
        ),
        seed=st.integers(0, 2**31),
    )
