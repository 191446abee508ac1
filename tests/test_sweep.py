"""The loop of a compiled step against torch's own product."""

import pytest
import torch
import torch.nn.functional as F

from nanokv import sweep


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("shape", [(48,), (1, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_product(dtype, shape):
    torch.manual_seed(1)
    x, w = torch.randn(shape, dtype=dtype), torch.randn(65, 48, dtype=dtype)
    found = sweep.product(x, w)
    assert found.dtype == torch.float32 and found.shape == (*shape[:-1], 65)
    assert apart(found, F.linear(x.double(), w.double())) < 1e-6  # no rounding on the way, whatever is read


def test_a_product_of_codes():
    x, codes = torch.randn(1, 48), torch.randint(-127, 128, (65, 48), dtype=torch.int8)
    assert apart(sweep.product(x, codes), F.linear(x, codes.float())) < 1e-6


def test_nothing_sweeps_outside_of_compiling():
    assert not sweep.wanted(torch.ones(1, 8))
