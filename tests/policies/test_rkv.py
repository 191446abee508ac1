"""R-KV: the worked example of its official code, and the algorithm once more with lists."""

import math
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from worked import Delicate, Turn, agree, by_position, conversation, kept, replay, step

from nanokv.engine import Engine
from nanokv.policies.rkv import RKV, redundancy

# ---- the worked example: 8 tokens, 2 KV heads, the last 2 queries watch ----


def example() -> tuple[Tensor, Tensor, Tensor]:
    """Q [4, 9, 4], K and V [2, 9, 4]; only the queries of tokens 6 and 7 are looked at, and token 8 is what comes next."""
    K = torch.tensor([[[((31 * h + 17 * s + 7 * d) % 11 - 5) / 4 for d in range(4)] for s in range(9)] for h in range(2)])
    K[:, 3] = K[:, 1] + torch.tensor([0.125, 0, 0, 0])
    K[:, 5] = K[:, 1] - torch.tensor([0, 0, 0, 0.125])
    Q = torch.full((4, 9, 4), 99.0)
    for j in (0, 1):
        Q[:, 6 + j] = torch.tensor([[((19 * h + 23 * j + 5 * d) % 13 - 6) / 4 for d in range(4)] for h in range(4)])
    return Q, K, torch.arange(72.0).view(2, 9, 4)


def read_example(**dials: object) -> Engine:
    """The 8 tokens in as many slots, when 2 of them have to go."""
    engine = replay(RKV(budget=8, window=2, interval=2, **dials), *example())
    engine.extend(range(8))
    return engine


def scores(engine: Engine) -> list[list[float]]:
    return [list(head.values()) for head in by_position(engine, engine.policy.score(engine.slots[0]))]


ATTENTION = [[.182746, .136762, .228937, .136299, .181451, .133805], [.179307, .157037, .190036, .161662, .145876, .166082]]
POOLED = [[.182746, .228937, .228937, .228937, .181451, .181451], [.179307, .190036, .190036, .190036, .166082, .166082]]
REDUNDANCY = [[.122755, .142635, .144145, .124675, .130515, .112285, .118861, .104130],
              [.113912, .157025, .104051, .130575, .114196, .137516, .109430, .133295]]
ALGORITHM_1 = [[.151192, .179940, .154935, .176125, .155708, .182101], [.155605, .179879, .148307, .181121, .157959, .177128]]
Z_10 = [[-.092204, -.105478, -.106837, -.089314, -.099318, -.082911], [-.084590, -.122319, -.074642, -.098514, -.086168, -.107156]]
Z_07 = [[-.101369, -.116625, -.118030, -.099922, -.108677, -.091724], [-.093387, -.132731, -.083464, -.108133, -.094577, -.116264]]


@pytest.mark.parametrize("want, dials", [
    (ATTENTION, dict(mix=1.0, kernel=1)), (POOLED, dict(mix=1.0, kernel=3)),
    (Z_10, dict(mix=0.1, kernel=3)), (Z_07, dict(mix=0.07, kernel=3)),
])  # fmt: skip
def test_the_worked_example(want, dials):
    got = [head[:6] for head in scores(read_example(**dials))]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), atol=1e-5, rtol=0)


def test_redundancy_of_the_worked_example():
    """By the code's rule: the newest copy, slot 5, is spared. Algorithm 1 of the paper punishes it most."""
    got = -torch.tensor(scores(read_example(mix=0.0)))
    torch.testing.assert_close(got, torch.tensor(REDUNDANCY), atol=1e-5, rtol=0)
    assert got[0, :6].argmin() == 5 and torch.tensor(ALGORITHM_1)[0].argmax() == 5


KEPT = {3: [[0, 3, 4, 5, 6, 7], [0, 2, 3, 4, 6, 7]], 7: [[0, 3, 4, 5, 6, 7], [0, 2, 3, 4, 6, 7]]}


@pytest.mark.parametrize("kernel", KEPT)
@pytest.mark.parametrize("mix", (0.1, 0.07))
def test_what_the_worked_example_keeps(kernel, mix):
    """While decoding, and as a prompt one token too long."""
    engine = read_example(kernel=kernel, mix=mix)
    step(engine, 8)
    assert kept(engine) == [head + [8] for head in KEPT[kernel]]
    engine = replay(RKV(budget=7, window=2, interval=1, kernel=kernel, mix=mix), *example())
    engine.extend(range(8))
    assert kept(engine) == KEPT[kernel]


# ---- the order of time, memory, dials ----


def test_it_goes_by_the_order_of_time_whatever_the_slots_hold():
    """Window, pooling and forgiveness depend on the order; where a token stands is an accident."""
    engine = read_example(kernel=3)
    kv = engine.slots[0]
    want = by_position(engine, engine.policy.score(kv))
    for seed in range(10):
        order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
        kv.pos.copy_(kv.pos[:, order])
        kv.k.view(2, 8, 4).copy_(kv.k.view(2, 8, 4)[:, order])
        assert by_position(engine, engine.policy.score(kv)) == want


@pytest.mark.parametrize("block", (1, 3, 64))
def test_redundancy_in_blocks_is_that_of_the_whole_matrix(block):
    k = torch.randn(2, 37, 8, generator=torch.Generator().manual_seed(0)).double()
    k[:, 30:] = k[:, 11] = 0
    u = torch.nn.functional.normalize(k[:, :30], dim=-1)
    matrix = u @ u.mT * (1 - torch.eye(30, dtype=k.dtype))
    for head in matrix:
        for row in head:
            similar = (row > 0.3).nonzero()
            row[similar[-1] if len(similar) else 0] = 0
    live = (torch.arange(37) < 30).expand(2, -1)
    got = redundancy(k, live, 0.3, block)
    torch.testing.assert_close(got[:, :30], matrix.mean(1).softmax(-1), atol=1e-7, rtol=0)
    assert not got[:, 30:].any()


def test_redundancy_of_a_long_text_takes_linear_memory():
    """4,096 tokens: no tensor as large as 1 % of tokens x tokens."""
    biggest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal biggest
            out = function(*args, **(kwargs or {}))
            biggest = max(biggest, out.numel() if isinstance(out, Tensor) else 0)
            return out

    with Watch():
        redundancy(torch.randn(1, 4096, 8), torch.ones(1, 4096, dtype=torch.bool), 0.5, block=32)
    assert 4096 * 8 <= biggest <= 4096 * 32


@pytest.mark.parametrize("dials", (
    dict(kernel=4), dict(kernel=0), dict(mix=1.5), dict(mix=-0.1), dict(alike=-0.5), dict(window=0), dict(budget=0),
    dict(budget=9, window=8, interval=2),
))  # fmt: skip
def test_dials_that_make_no_sense(dials):
    with pytest.raises(ValueError):
        RKV(**dials)


def test_the_interval_follows_the_budget():
    assert [RKV(budget=b).interval for b in (16, 64, 1000, 1024, 9000)] == [2, 8, 125, 128, 128]


# ---- once more, with lists ----


class Naive:
    """One KV head: it holds positions, and forgets those of least worth. keys[p]; queries[g][p]."""

    def __init__(self, policy: RKV, keys: list, queries: list, exact: bool):
        self.policy, self.keys, self.queries, self.exact = policy, keys, queries, exact
        self.held: list[int] = []
        self.ties = 0

    def importance(self, now: int) -> list[float]:
        """What the last queries pay to the tokens before the window, pooled."""
        p, keys = self.policy, self.keys
        older = [t for t in self.held if t < now - p.window]
        paid = [0.0] * len(older)
        askers = range(max(now - p.window, 0), now)
        for a in askers:
            each = [[sum(x * y for x, y in zip(q[a], keys[t])) / len(keys[t]) ** 0.5 for q in self.queries] for t in older]
            powers = [math.exp(max(logits)) for logits in each]
            paid = [x + y / sum(powers) / len(askers) for x, y in zip(paid, powers)]
        reach = p.kernel // 2
        return [max(paid[max(i - reach, 0) : i + reach + 1]) for i in range(len(older))]

    def redundancy(self) -> list[float]:
        """How much all tokens resemble the others, when each has forgiven its newest look-alike, or else the first token."""
        unit = []
        for t in self.held:
            length = math.sqrt(sum(x * x for x in self.keys[t])) + 1e-8
            unit.append([x / length for x in self.keys[t]])
        columns = [0.0] * len(unit)
        for i, a in enumerate(unit):
            row = [sum(x * y for x, y in zip(a, b)) if i != j else 0.0 for j, b in enumerate(unit)]
            if not self.exact and any(abs(x - self.policy.alike) < 1e-6 for x in row):
                raise Delicate
            similar = [j for j, x in enumerate(row) if x > self.policy.alike]
            row[similar[-1] if similar else 0] = 0.0
            columns = [c + x for c, x in zip(columns, row)]
        powers = [math.exp(c / len(unit)) for c in columns]
        return [x / sum(powers) for x in powers]

    def keep(self, n: int, now: int) -> None:
        p = self.policy
        worth = {t: -(1 - p.mix) * r for t, r in zip(self.held, self.redundancy())}
        for t, i in zip(self.held, self.importance(now)):
            worth[t] += p.mix * i
        safe = [t for t in self.held if t < p.sink or t >= now - p.window]
        rest = sorted((t for t in self.held if t not in safe), key=lambda t: (-round(worth[t], 11), t))
        n -= len(safe)
        if 0 < n < len(rest):
            gap = worth[rest[n - 1]] - worth[rest[n]]
            if gap and gap < 1e-6 and not (self.exact and gap < 1e-11):
                raise Delicate
            self.ties += gap < 1e-11
        self.held = sorted(safe + rest[:n])

    def after(self, turns: list[Turn], rows: int, share: int) -> Iterator[list[int]]:
        """Who is held after every turn. share: the rows it has from the first overflow on (how many is the budget's affair)."""
        stay = share - self.policy.interval
        for turn in turns:
            for start, stop in turn.pieces():
                if not turn.chunk and len(self.held) == rows:  # room is made before a decoded token comes
                    self.keep(stay, start)
                    rows = share
                self.held = [*self.held, *range(start, stop)]
                if len(self.held) > rows:  # a text comes first and is chosen from
                    self.keep(stay, stop)
                    rows = share
            yield self.held


def vectors(rng: random.Random, L: int, H: int, G: int, T: int, exact: bool) -> tuple[Tensor, Tensor]:
    """Q and K with many equal keys. exact: keys of length 2, so that every sum is, and ties are ties."""
    generator = torch.Generator().manual_seed(rng.randrange(10**9))
    Q, K = (torch.randn(L, n, T, 4, generator=generator) for n in (H * G, H))
    if exact:
        Q, K = (Q * 2).round() / 2, K.sign()
    for t in range(1, T):
        if rng.random() < 0.3:
            K[:, :, t] = K[:, :, rng.randrange(t)]
    return Q, K


def test_it_keeps_what_naive_lists_keep():
    ties = 0

    def case(rng: random.Random) -> None:
        nonlocal ties
        L, H, G, T, exact = rng.randint(1, 2), rng.randint(1, 3), rng.randint(1, 4), rng.randint(12, 45), rng.random() < 0.4
        dials = dict(sink=rng.choice((0, 0, 2)), window=rng.randint(1, 5), interval=rng.choice((1, 1, 2, 4)))
        dials |= dict(budget=sum(dials.values()) + rng.randint(2, 8), kernel=rng.choice((1, 3, 5, 7)))
        dials |= dict(mix=rng.choice((0.07, 0.1, 0.5, 1.0)), alike=rng.choice((0.2, 0.5, 0.8)))
        policy = RKV(**dials, heads=rng.choice(("uniform", "adaptive")), layers=rng.choice(("uniform", "pyramid")))
        Q, K = vectors(rng, L, H, G, T, exact)
        engine = replay(policy, Q, K, torch.ones_like(K))
        turns, rows = conversation(rng, T), [kv.shares[0] for kv in engine.slots]
        got = [[kept(engine, layer) for layer in range(L)] for turn in turns if turn.play(engine) is None]
        for kv, keys, queries in zip(engine.slots, K.tolist(), Q.unflatten(1, (H, G)).tolist()):
            for h in range(H):
                naive = Naive(policy, keys[h], queries[h], exact)
                want = list(naive.after(turns, rows[kv.layer], kv.shares[h]))
                assert [layers[kv.layer][h] for layers in got] == want, f"layer {kv.layer}, head {h}, {policy}, {turns}"
                ties += naive.ties

    agree(case)
    assert ties > 100, f"only {ties} ties"
