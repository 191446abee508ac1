"""The two splits: exact totals, floors and order for any size, and no dial that breaks the engine."""

import random

import pytest
import torch
from conftest import fields, small, tiny
from split_oracle import head_shares, pyramid_shares

from nanokv.budget import adaptive, pyramid
from nanokv.engine import Engine
from nanokv.policy import REGISTRY

CASES = 600


def test_a_pyramid_conserves_its_total_and_falls():
    for seed in range(CASES):
        rng = random.Random(seed)
        n_layers, mean = rng.randint(1, 80), rng.choice((rng.randint(0, 12), rng.randint(0, 3000)))
        least, most = rng.randint(0, min(mean, 12)), mean + rng.choice((0, 1, rng.randint(0, 40), 10**6))
        beta = rng.choice((1, 1.5, 2, 7.3, 20, 1e9))
        rows = pyramid(mean, n_layers, most, beta, least)
        assert rows == pyramid_shares(mean, n_layers, most, beta, least), f"seed {seed}"
        assert len(rows) == n_layers and sum(rows) == n_layers * mean
        assert least <= min(rows) and max(rows) <= min(2 * mean, most)
        assert all(b <= a + 1 for a, b in zip(rows, rows[1:])), "rounding may be off by one row, no more"
        assert beta > 1 or max(rows) == min(rows)


def test_a_pyramid_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="mean of 3 rows .* give every layer 4"):
        pyramid(3, 8, 100, 20, 4)
    for beta in (0.5, float("nan")):
        with pytest.raises(ValueError, match=f"beta must be at least 1 .* not {beta}"):
            pyramid(3, 8, 100, beta)


def test_shares_of_heads_conserve_their_total_and_have_a_floor():
    for seed in range(CASES):
        rng = random.Random(seed)
        H, P = rng.randint(1, 9), rng.randint(1, 30)
        mean, floor_ratio = rng.randint(0, P), rng.choice((0, 0.05, 0.2, 0.3, 0.5, 0.7, 1))
        steepness = [rng.choice((0.1, 1, 4)) for _ in range(H)]
        scores = [[round(rng.random() ** s, rng.choice((1, 6))) for _ in range(P)] for s in steepness]
        shares = adaptive(torch.tensor(scores), mean, floor_ratio)
        assert shares == head_shares(scores, mean, floor_ratio), f"seed {seed}"
        assert sum(shares) == H * mean and max(shares) <= P
        assert all(n >= int(floor_ratio * mean + 1e-9) for n in shares)
        assert floor_ratio < 1 or max(shares) == min(shares)
        more = [[x + 1 for x in scores[0]], *scores[1:]]
        assert adaptive(torch.tensor(more), mean, floor_ratio)[0] >= shares[0], "who needs more gets no less"


splits = [dict(layers=a, heads=b) for a in ("uniform", "pyramid") for b in ("uniform", "adaptive")]
scoring = sorted(name for name in REGISTRY if {"layers", "heads"} <= fields(name))


@pytest.mark.parametrize("split", splits, ids=lambda s: "-".join(s.values()))
@pytest.mark.parametrize("name", scoring)
def test_the_tightest_budgets_and_the_wildest_dials_keep_every_promise(name, split):
    for seed in range(8):
        rng = random.Random(f"{name} {split} {seed}")
        dials = dict(sink=rng.randint(0, 3), window=rng.randint(1, 4), interval=rng.randint(1, 4))
        dials |= dict(recent=rng.choice((0, dials["window"])), history=rng.randint(1, 5))
        dials |= dict(beta=rng.choice((1.0, 2.0, 1e6)), floor_ratio=rng.choice((0.0, 0.2, 1.0)))
        least = sum(n for dial, n in dials.items() if dial in ("sink", "window", "interval") and dial in fields(name))
        policy = small(name, least + rng.choice((0, 0, 1, 3)), **dials, **split)
        L, H = rng.randint(1, 4), rng.choice((1, 2, 3))
        engine = Engine(tiny(n_layers=L, n_heads=H, n_kv_heads=H, max_context=160), policy, chunk=rng.choice((None, 1, 3)))
        engine.reset(12, rng.choice((0, 20, None)))
        for _ in range(2):
            engine.extend([rng.randrange(97) for _ in range(rng.randint(1, 12))])
            for _ in range(rng.randint(0, 8)):
                engine.decode(torch.tensor([rng.randrange(97)]))
        assert sum(len(kv.k) for kv in engine.slots) == L * H * policy.budget
        for kv in engine.slots:
            always = policy.sink + policy.recent + policy.interval
            assert sum(kv.shares) == len(kv.k) and min(kv.shares) >= always
            for pos in kv.pos.tolist():
                assert set(range(min(policy.sink, engine.seen))) <= set(pos) and engine.seen - 1 in pos
