import pytest
import torch

from stepgraph.ops.linear import linear


@pytest.mark.parametrize("rows", [1, 13, 16, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equals_a_product_in_float64(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 48, dtype=dtype), torch.randn(80, 48, dtype=dtype)
    expected = x.double() @ weight.double().t()
    error = (linear(x, weight).double() - expected).norm() / expected.norm()
    assert error < {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2}[dtype]


def test_inputs_may_be_views() -> None:
    x, weight = torch.randn(4, 96)[:, ::2], torch.randn(80, 96)[:, ::2]
    torch.testing.assert_close(linear(x, weight), x.double().matmul(weight.double().t()).float())
