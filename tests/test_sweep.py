"""The loop of a compiled step against torch's own product."""

import pytest
import torch
import torch.nn.functional as F

from nanokv import sweep
from nanokv.attention import attend_slots, watch_slots


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("shape, rows", [((48,), 65), ((1, 48), 65), ((1, 48), 16 * sweep.STREAMS)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_product(dtype, shape, rows):
    torch.manual_seed(1)
    x, w = torch.randn(shape, dtype=dtype), torch.randn(rows, 48, dtype=dtype)
    found = sweep.product(x, w)
    assert found.dtype == torch.float32 and found.shape == (*shape[:-1], rows)
    assert apart(found, F.linear(x.double(), w.double())) < 1e-6  # no rounding on the way, whatever is read


def test_a_matrix_may_be_stored_by_columns():  # slowly; whoever compiles a model by himself has not called by_rows
    x, w = torch.randn(1, 48), torch.randn(48, 4 * sweep.STREAMS).t()
    assert apart(sweep.product(x, w), F.linear(x, w)) < 1e-6


def test_a_product_of_codes():
    x, codes = torch.randn(1, 48), torch.randint(-127, 128, (65, 48), dtype=torch.int8)
    assert apart(sweep.product(x, codes), F.linear(x, codes.float())) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_products_of_queries_and_keys(dtype):
    torch.manual_seed(2)
    q, k = torch.randn(2, 3, 16, dtype=dtype), torch.randn(2, 11, 16, dtype=dtype)
    found = sweep.products(q, k)
    assert found.dtype == torch.float32 and found.shape == (2, 3, 11)
    assert apart(found, q.double() @ k.double().mT) < 1e-6


@pytest.mark.parametrize("slots", [11, sweep.RUN, 2 * sweep.RUN, 3 * sweep.RUN + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_sum_of_weighted_values(dtype, slots):
    torch.manual_seed(2)
    probs, v = torch.rand(2, 3, slots), torch.randn(2, slots, 16, dtype=dtype)
    found = sweep.weighted(probs, v)
    assert found.dtype == torch.float32 and found.shape == (2, 3, 16)
    assert apart(found, probs.double() @ v.double()) < 1e-6


def test_parting_changes_nothing():
    x = torch.randn(2, 3, 16)
    assert torch.equal(sweep.parted(x), x) and sweep.parted(x).data_ptr() == x.data_ptr()


def test_nothing_sweeps_outside_of_compiling():
    assert not sweep.wanted(torch.ones(1, 8))
    assert not sweep.wanted_for_slots(torch.ones(2, 3, 1, 8).bfloat16(), torch.ones(2, 5, 8).bfloat16())


@pytest.mark.parametrize("dtype, S, ragged, better", [
    (torch.bfloat16, 1, False, True), (torch.float32, 1, False, True), (torch.bfloat16, 2, False, False), (torch.bfloat16, 1, True, False),
])  # fmt: skip
def test_slots_that_meet_one_query_are_swept(monkeypatch, dtype, S, ragged, better):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    q, k = torch.randn(2, 3, S, 8).to(dtype), torch.randn(2, 5, 8).to(dtype)
    assert sweep.wanted_for_slots(q, k.view(-1, 8) if ragged else k) == better


def test_logits_of_short_keys_are_not_rounded(monkeypatch):
    """The answer and its probabilities, as the compiled step has them, against float64; the plain step's logits are bfloat16."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(*shape).bfloat16() for shape in ((2, 3, 1, 64), (2, 40, 64), (2, 40, 64)))
    mask = torch.rand(2, 1, 40) < 0.7
    logits = (q.double() * 0.5 @ k.double()[:, None].mT).masked_fill(~mask[:, None], -torch.inf)
    right = logits.softmax(-1)
    rounded = apart(watch_slots(q, k, v, mask, 0.5)[1], right)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    out, probs = watch_slots(q, k, v, mask, 0.5)
    assert apart(probs, right) < 1e-6 < 1e-3 < rounded
    assert torch.equal(attend_slots(q, k, v, mask, 0.5), out) and apart(out, right @ v.double()[:, None]) < 3e-3  # rounded once
