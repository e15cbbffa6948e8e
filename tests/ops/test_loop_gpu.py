"""Programmatic launches inside a WHILE node: the waits hold within a run, and from one run to the next."""

import pytest
import torch

from stepgraph.runtime.platforms import platform_for
from stepgraph.runtime.platforms.base import LoopTerms

pytestmark = pytest.mark.gpu
RUNS = 20


def test_kernels_that_write_late_are_waited_for_in_a_loop() -> None:
    """Each kernel lets the next one start at once and writes late; a missing wait would read what was there before."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch needs compute capability 9.0")
    pytest.importorskip("triton")
    from ops.late_writer import write_late

    platform = platform_for("cuda")
    terms, mark = LoopTerms.on(platform, RUNS), platform.mark(asleep=True)
    first, second, third = (torch.zeros(8, 64, device="cuda") for _ in range(3))
    seen = torch.zeros(8, 64, device="cuda")

    def step() -> None:
        write_late(first, second)
        write_late(second, third)
        seen.add_(third)
        first.add_(1)

    with torch.no_grad():
        platform.warm_up(step)
        recording, _ = platform.record(step, platform.new_pool())
    programmatic = sum(edge.programmatic for node in recording.nodes() for edge in node.after)
    assert programmatic >= 1, "the second copy is launched programmatically"
    for _ in range(3):
        first.fill_(1), second.zero_(), third.zero_(), seen.zero_()
        recording.loop(terms)()
        mark.set()
        mark.wait()
        assert int(terms.told) == RUNS and first.eq(1 + RUNS).all()
        assert seen.eq(sum(range(1, RUNS + 1))).all()
