"""The three attentions against loops over single queries and keys."""

import math

import pytest
import torch

from nanokv import attention
from nanokv.attention import attend_prompt, attend_slots, watch_prompt, watch_slots

SHAPES = [(1, 1, 1, 1), (2, 2, 7, 7), (1, 4, 5, 12), (3, 1, 9, 10), (2, 3, 1, 6)]  # H, G, S, T


def inputs(H: int, G: int, S: int, T: int, D: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(H + 10 * G + 100 * S + 1000 * T)
    return (torch.randn(*s, D, generator=g) for s in ((H, G, S), (H, T), (H, T)))


def row(q: torch.Tensor, keys: torch.Tensor, scale: float) -> list[float]:
    """Softmax weights of one query [D] on keys [n, D], in Python floats."""
    logits = [scale * sum(a * b for a, b in zip(q.tolist(), k)) for k in keys.tolist()]
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / sum(weights) for w in weights]


@pytest.mark.parametrize("H, G, S, T", SHAPES)
@pytest.mark.parametrize("rows", (None, 128, 2))
def test_a_prompt_attends_causally_behind_what_came_before(H, G, S, T, rows, monkeypatch):
    if rows:  # as on other devices
        monkeypatch.setattr(attention, "ROWS", rows)
        monkeypatch.setattr(attention, "_joined", attention._masked)
    q, k, v = inputs(H, G, S, T)
    out = attend_prompt(q, k, v, 0.3)
    for h in range(H):
        for g in range(G):
            for i in range(S):
                n = T - S + i + 1
                want = torch.tensor(row(q[h, g, i], k[h, :n], 0.3)) @ v[h, :n]
                assert (out[h, g, i] - want).abs().max() < 1e-6


@pytest.mark.parametrize("H, G, S, T", SHAPES)
@pytest.mark.parametrize("last, block", ((1, 1), (3, 2), (1 << 60, 2), (4, 128)))
def test_the_watched_rows_are_the_last_ones_in_order(H, G, S, T, last, block):
    q, k, _ = inputs(H, G, S, T)
    shown = []
    for rows, probs in watch_prompt(q, k, last, 0.3, block):
        shown += range(rows.start, rows.stop)
        seen = T - S + rows.stop
        assert probs.shape == (H, G, rows.stop - rows.start, seen) and probs.dtype == torch.float32
        for i in range(rows.start, rows.stop):
            for h in range(H):
                for g in range(G):
                    n = T - S + i + 1
                    want = row(q[h, g, i], k[h, :n], 0.3) + [0.0] * (seen - n)
                    assert (probs[h, g, i - rows.start] - torch.tensor(want)).abs().max() < 1e-6
    assert shown == list(range(max(S - last, 0), S))


@pytest.mark.parametrize("H, G, S, N", SHAPES)
def test_slots_attend_where_the_mask_says(H, G, S, N):
    q, k, v = inputs(H, G, S, N)
    mask = torch.rand(H, S, N, generator=torch.Generator().manual_seed(N)) < 0.6
    mask[..., 0] = True
    out, probs = watch_slots(q, k, v, mask, 0.3)
    assert (attend_slots(q, k, v, mask, 0.3) - out).abs().max() < 1e-6, "the answer alone is the same answer"
    for h in range(H):
        for g in range(G):
            for i in range(S):
                at = mask[h, i].nonzero().flatten()
                want = torch.tensor(row(q[h, g, i], k[h, at], 0.3))
                assert (probs[h, g, i, at] - want).abs().max() < 1e-6
                assert not probs[h, g, i, ~mask[h, i]].any(), "masked: exactly 0"
                assert (out[h, g, i] - want @ v[h, at]).abs().max() < 1e-6


def test_softmax_is_taken_in_float32_whatever_the_models_dtype():
    q, k, v = (x.to(torch.bfloat16) for x in inputs(2, 2, 1, 300))
    out, probs = watch_slots(q, k, v, torch.ones(2, 1, 300, dtype=torch.bool), 0.5)
    assert out.dtype == torch.bfloat16 and probs.dtype == torch.float32
    assert (probs.sum(-1) - 1).abs().max() < 1e-6, "bfloat16 would miss by a hundredth"
