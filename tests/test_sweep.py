"""The loops of a compiled step against torch's own products and attention."""

import pytest
import torch
import torch.nn.functional as F

from nanokv import sweep
from nanokv.attention import attend_slots

DTYPES = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("shape", [(48,), (1, 48)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product(dtype, shape):
    torch.manual_seed(1)
    x, w = torch.randn(shape, dtype=dtype), torch.randn(65, 48, dtype=dtype)
    found = sweep.product(x, w)
    assert found.dtype == torch.float32 and found.shape == (*shape[:-1], 65)
    assert apart(found, F.linear(x.double(), w.double())) < 1e-6  # no rounding on the way, whatever is read


def test_a_product_of_codes():
    x, codes = torch.randn(1, 48), torch.randint(-127, 128, (65, 48), dtype=torch.int8)
    assert apart(sweep.product(x, codes), F.linear(x, codes.float())) < 1e-6


@pytest.mark.parametrize("N", [1, 7, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(dtype, N):
    torch.manual_seed(2)
    q, k, v = torch.randn(2, 3, 1, 16, dtype=dtype), torch.randn(2, N, 16, dtype=dtype), torch.randn(2, N, 16, dtype=dtype)
    mask = torch.rand(2, 1, N) < 0.6
    mask[:, :, 0] = True
    q[0] *= 40  # logits that a careless exponential would overflow at
    found, exact = sweep.attend(q, k, v, mask, 0.25), attend_slots(q.double(), k.double(), v.double(), mask, 0.25)
    assert found.dtype == dtype and found.shape == q.shape and apart(found, exact) < DTYPES[dtype]


def test_nothing_sweeps_outside_of_compiling():
    assert not sweep.wanted(torch.ones(1, 8))
