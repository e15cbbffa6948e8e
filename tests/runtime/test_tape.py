"""What only the tape shows: opaque records, and refusals that CUDA words differently."""

import numpy as np
import pytest
import torch

from stepgraph.runtime import CaptureError, opaque
from stepgraph.runtime.platforms.tape import TapePlatform

TAPE = TapePlatform()


def record(step):
    with torch.no_grad():
        return TAPE.record(step, None)


def test_a_compiled_function_is_one_record() -> None:
    x = torch.ones(4)
    compiled = opaque(torch.compile(lambda t: (t * 2 + 1).sin(), backend="aot_eager"))
    compiled(x)
    recording, out = record(lambda: compiled(x) + 1)
    assert recording.num_nodes == 2
    x.fill_(3)
    recording.replay()
    torch.testing.assert_close(out, (x * 2 + 1).sin() + 1)


def test_a_compiled_function_left_bare_is_recorded_operator_by_operator() -> None:
    x = torch.ones(4)
    compiled = torch.compile(lambda t: (t * 2 + 1).sin(), backend="aot_eager")
    compiled(x)
    recording, out = record(lambda: compiled(x))
    x.fill_(3)
    recording.replay()
    torch.testing.assert_close(out, (x * 2 + 1).sin())


def test_an_opaque_function_may_read_values_and_write_its_arguments() -> None:
    @opaque
    def add_count(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        out.numpy()[:] = x.tolist()
        return torch.tensor([float(len(x.tolist()))])

    x, out = torch.zeros(3), torch.zeros(3)
    recording, count = record(lambda: add_count(x, out))
    x.fill_(4)
    recording.replay()
    assert out.tolist() == [4, 4, 4] and count.tolist() == [3]
    assert add_count(x, out).tolist() == [3]  # outside a tape it is a plain call


def test_views_cost_no_record() -> None:
    x = torch.ones(4, 4)
    recording, _ = record(lambda: (x + 1).view(2, 8).t()[0].unsqueeze(0).expand(3, 2))
    assert recording.num_nodes == 1


def test_functional_results_are_written_in_place() -> None:
    x = torch.ones(4)
    recording, out = record(lambda: x + 1)
    address = out.data_ptr()
    x.fill_(6)
    recording.replay()
    assert out.data_ptr() == address and out.tolist() == [7] * 4


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.numpy(),
        lambda x: np.asarray(x),
        lambda x: x.data_ptr(),
        lambda x: torch.as_tensor([1.0]),
        lambda x: torch.asarray([1.0]),
        lambda x: x.new_tensor([1.0]),
        lambda x: torch.equal(x, x),
        lambda x: torch.unique(x),
        lambda x: x.masked_select(x > 0),
        lambda x: torch.repeat_interleave(torch.ones(2, dtype=torch.int64)),
        lambda x: f"{x[0]:.1f}",
    ],
)
def test_host_reads_are_refused(step) -> None:
    x = torch.ones(3)
    with pytest.raises(CaptureError, match=r"capture refused: .* \(at test_tape.py:"):
        record(lambda: step(x))


def test_a_released_recording_holds_nothing() -> None:
    x = torch.ones(3)
    recording, out = record(lambda: x + 1)
    recording.release()
    x.fill_(9)
    recording.replay()
    assert out.tolist() == [2, 2, 2]
