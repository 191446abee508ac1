"""SnapKV, PyramidKV and Ada-KV: the worked example, and the papers again as a naive oracle on lists and floats.

The oracle shares nothing with nanokv: it is told the post-RoPE queries and keys, re-tells what
every layer and head would hold after each text and each decoded token, and is compared with what the
engine's slots hold.
"""

import json
import math
import random
from pathlib import Path

import torch
from split_oracle import head_shares, pyramid_shares
from torch import Tensor
from worked import kept, replay, step

from nanokv.engine import Engine
from nanokv.policy import Policy

EXAMPLE: list[dict] = json.loads((Path(__file__).parent / "snapkv_worked.json").read_text())  # expectations, by layer


def table(seed: int, heads: int, tokens: int, channels: int) -> Tensor:
    """Numbers of the worked example: a linear congruential generator, row by row."""
    x, out = seed, []
    for _ in range(heads * tokens * channels):
        x = (1103515245 * x + 12345) % 2**31
        out.append(round(x / 2**31 * 4 - 2, 3))
    return torch.tensor(out).view(heads, tokens, channels)


def example(policy: Policy, per_query_head: bool = False) -> Engine:
    """Both layers of the worked example, read: 12 tokens, 4 query heads on 2 KV heads (or each on its own)."""
    Q = torch.stack([table(101 + layer, 4, 12, 4) for layer in range(2)])
    K = torch.stack([table(201 + layer, 2, 12, 4) for layer in range(2)])
    V = torch.zeros_like(K)
    V[..., 0] = torch.arange(12)  # a kept row of V tells its position, and its head
    V[..., 1] = torch.arange(2)[:, None]
    if per_query_head:
        K, V = K.repeat_interleave(2, 1), V.repeat_interleave(2, 1)
    engine = replay(policy, Q, K, V)
    engine.extend(range(12))
    return engine


def picks(engine: Engine, layer: int) -> list[list[int]]:
    """What each head kept of the prefix; the window, tokens 10 and 11, must be there as well."""
    heads = kept(engine, layer)
    assert all(head[-2:] == [10, 11] for head in heads)
    return [head[:-2] for head in heads]


# ---- the oracle ----


def layer_rows(p: Policy, n_layers: int, tokens: int) -> list[int]:
    """Rows of every layer: the budget, or the pyramid that conserves it."""
    if p.layers == "uniform" or tokens <= p.budget:
        return [p.budget] * n_layers
    always = p.window + p.interval
    shares = pyramid_shares(p.budget - always, n_layers, tokens + 1 - always, p.beta, p.sink)
    return [always + n for n in shares]


class NearTie(Exception):
    """Two scores differ by less than float32 can be trusted to tell."""


def check_cut(ranks: list[tuple], cut: int) -> None:
    """Sorted ranks (class, number, ...): NearTie if the cut falls between numbers that are almost equal.

    Equal means of other terms are one too: float32 rounds a sum by the order in which it is taken.
    """
    if 0 < cut < len(ranks):
        (a, x), (b, y) = ranks[cut - 1][:2], ranks[cut][:2]
        if a == b and abs(x - y) < 1e-6 and (x != y or getattr(x, "terms", 0) != getattr(y, "terms", 0)):
            raise NearTie


class Mean(float):
    """A mean that knows what it is the mean of."""

    terms: list[float]


class Layer:
    """What one layer holds: for each head its tokens in time order, as [position, vote or None if generated]."""

    def __init__(self, p: Policy, rows: int, Q: list, K: list):
        self.p, self.rows, self.Q, self.K = p, rows, Q, K
        self.H, self.G = len(K), len(Q) // len(K)
        self.held: list[list[list]] = [[] for _ in K]
        self.shares, self.divided, self.seen = [rows] * len(K), False, 0

    def read(self, text: list[int]) -> None:
        """A prompt, a chunk or a later turn: its last rows vote over all that is there."""
        voters, self.seen = text[-self.p.window :], text[-1] + 1
        for h in range(self.H):
            tokens = self.held[h] + [[t, None] for t in text]
            prefix = [t for t in tokens if t[0] < voters[0]]
            pooled = self.pool(self.votes(h, [t[0] for t in tokens], voters)[: len(prefix)])
            self.held[h] = [[t, v] for (t, _), v in zip(prefix, pooled)] + [[t, 2.0] for t in voters]
        if len(self.held[0]) > self.shares[0]:
            self.shrink()

    def decode(self, t: int) -> None:
        """One token: make room if there is none, then move in."""
        if len(self.held[0]) == self.shares[0]:
            self.shrink()
        for tokens in self.held:
            tokens.append([t, None])
        self.seen = t + 1

    def votes(self, h: int, tokens: list[int], voters: list[int]) -> list[float]:
        by_query_head = []
        for head in range(h * self.G, (h + 1) * self.G):
            total = [0.0] * len(tokens)
            for i in voters:
                logits = [sum(a * b for a, b in zip(self.Q[head][i], self.K[h][j])) / math.sqrt(len(self.K[h][j]))
                          for j in tokens if j <= i]
                weights = [math.exp(x - max(logits)) for x in logits]
                for n, x in enumerate(weights):
                    total[n] += x / sum(weights)
            by_query_head.append([x / len(voters) for x in total])
        columns = list(zip(*by_query_head))
        return [max(c) if self.p.group == "max" else sum(c) / len(c) for c in columns]

    def pool(self, votes: list[float]) -> list[float]:
        r, out = self.p.kernel // 2, []
        for n in range(len(votes)):
            near = votes[max(n - r, 0) : n + r + 1]
            out.append(max(near) if self.p.pooling == "max" else Mean(sum(near) / self.p.kernel))
            if self.p.pooling == "avg":
                out[-1].terms = near
        return out

    def ranks(self, h: int) -> list[tuple]:
        """(class, number) of each token of a head: the higher stays. A protected one is in the highest class."""
        tokens, ranks = self.held[h], []
        voted = sum(vote is not None for _, vote in tokens)
        crowded = voted > self.p.prompt_share * self.shares[h]
        for t, vote in tokens:
            if t < self.p.sink or t >= self.seen - self.p.recent:
                ranks.append((9, 0))
            elif vote is None:
                ranks.append((2 if crowded else 0, t))
            else:
                ranks.append((1, vote))
        return ranks

    def keep(self, h: int, n: int, ranks: list[tuple]) -> None:
        """Keep the n best of a head; of equals the older."""
        order = sorted(range(len(ranks)), key=lambda i: (-ranks[i][0], -ranks[i][1], i))
        check_cut([ranks[i] for i in order], n)
        self.held[h] = [self.held[h][i] for i in sorted(order[:n])]

    def shrink(self) -> None:
        """The rows do not suffice: keep all but an interval; the first time, share them out."""
        ranks = [self.ranks(h) for h in range(self.H)]
        if self.p.heads == "adaptive" and not self.divided:
            self.shares, self.divided = self.needs(ranks), True
        for h in range(self.H):
            self.keep(h, self.shares[h] - self.p.interval, ranks[h])

    def needs(self, ranks: list[list[tuple]]) -> list[int]:
        """Ada-KV's conserving allocation."""
        safe = sum(rank[0] == 9 for rank in ranks[0])
        b = self.rows - self.p.interval - safe
        loose = [[rank for rank in head if rank[0] != 9] for head in ranks]
        check_cut(sorted(sum(loose, []), reverse=True), self.H * b)
        return [self.p.interval + safe + n for n in head_shares(loose, b, self.p.floor_ratio)]


# ---- random cases ----

Event = tuple[str, list[int]]


def events(rng: random.Random, budget: int) -> list[Event]:
    """One to three turns: a text, whole or in chunks, then decoded tokens."""
    out, t = [], 0
    for turn in range(rng.randint(1, 3)):
        n = rng.randint(1, budget + 14) if turn == 0 else rng.randint(1, 9)
        chunk = rng.choice((n, n, rng.randint(1, n)))
        out += [("text", list(range(a, min(a + chunk, t + n)))) for a in range(t, t + n, chunk)]
        t += n
        for _ in range(rng.randint(0, 12)):
            out.append(("step", [t]))
            t += 1
    return out


def dials(rng: random.Random) -> dict:
    """Any setting of SnapKV, tight budgets above all."""
    window, sink, interval = rng.randint(1, 4), rng.choice((0, 0, 1, 2)), rng.choice((1, 1, 1, 2, 3))
    return dict(
        window=window, recent=rng.randint(0, window), sink=sink, interval=interval,
        budget=window + sink + interval + rng.randint(0, 10), kernel=rng.choice((1, 3, 5)),
        pooling=rng.choice(("max", "max", "avg")), group=rng.choice(("mean", "max")),
        prompt_share=rng.choice((0.0, 0.25, 0.5, 0.5, 0.75, 1.0)),
        beta=rng.choice((1.0, 2.0, 7.5, 20.0)), floor_ratio=rng.choice((0.0, 0.2, 0.5, 1.0)),
    )


def vectors(rng: random.Random, *shape: int) -> Tensor:
    """Multiples of 1/4, so logits are exact and tokens with the same key tie exactly."""
    D = shape[-1]
    distinct = [[rng.randint(-8, 8) / 4 for _ in range(D)] for _ in range(math.prod(shape[:-1]))]
    return torch.tensor([rng.choice(distinct) if rng.random() < 0.3 else row for row in distinct]).view(shape)


def agree(kind: type[Policy], seed: int, **splits: str) -> bool:
    """Does the engine hold what the oracle holds, after every event? False: a near tie, so nobody can say."""
    rng = random.Random(f"{kind.__name__} {splits} {seed}")
    policy = kind(**dials(rng), **splits)
    story = events(rng, policy.budget)
    L, H, G, T = rng.randint(1, 3), rng.randint(1, 3), 1 + seed % 4, story[-1][1][-1] + 1
    Q, K = vectors(rng, L, H * G, T, 4), vectors(rng, L, H, T, 4)
    engine = replay(policy, Q, K, K)
    rows = layer_rows(policy, L, T)
    layers = [Layer(policy, n, q, k) for n, q, k in zip(rows, Q.tolist(), K.tolist())]
    assert sum(rows) == L * policy.budget
    for what, tokens in story:
        try:
            for layer in layers:
                layer.read(tokens) if what == "text" else layer.decode(tokens[0])
        except NearTie:
            return False
        engine.extend(tokens) if what == "text" else step(engine, tokens[0])
        for i, layer in enumerate(layers):
            want = [[t for t, _ in tokens] for tokens in layer.held]
            assert kept(engine, i) == want, f"seed {seed}, layer {i} after {what} {tokens}: {policy}"
            assert engine.slots[i].shares == layer.shares, f"seed {seed}, layer {i} after {what} {tokens}: {policy}"
    return True


def agree_often(kind: type[Policy], **splits: str) -> None:
    """300 cases that can be told; near ties must be rare."""
    told, seed = 0, 0
    while told < 300:
        told += agree(kind, seed, **splits)
        seed += 1
    assert seed <= 315, f"{seed - 300} near ties: the inputs are no good"
