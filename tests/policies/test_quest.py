"""Quest: its worked example, its dials, the paper again on lists, and what a step touches."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor
from worked import Delicate, Turn, Vectors, agree, conversation, recipe, replay, step, vectors

from nanokv.engine import Engine
from nanokv.policies.quest import Quest
from nanokv.slots import Slots

ALL = [0, 1, 2, 3]  # the worked example's four query heads


def read(policy: Quest, q: list[int], k: list[int], prompt: int = 6) -> Engine:
    """The worked example's 7 tokens, the last decoded, with these query and KV heads."""
    Q, K, V = recipe(7)
    engine = replay(policy, Q[q], K[k], V[k])
    engine.extend(range(prompt))
    for t in range(prompt, 7):
        step(engine, t)
    return engine


def now_asking(engine: Engine) -> Tensor:
    """Token 6's queries [H, G, 1, D]."""
    return engine.model.Q[0][:, 6:7].unflatten(0, (len(engine.slots[0].pos), -1))


@contextmanager
def reads(of: Callable[[Slots], bool] = lambda kv: True) -> Iterator[list[list[set[int]]]]:
    """Collects what each step chose to read: positions by head."""
    seen, original = [], Quest.read

    def spy(self: Quest, kv: Slots, q: Tensor) -> Tensor | None:
        chosen = original(self, kv, q)
        if of(kv):
            pos = kv.pos if chosen is None else kv.held(chosen, self.page)
            seen.append([set(head) - {-1} for head in pos.tolist()])
        return chosen

    with mock.patch.object(Quest, "read", spy):
        yield seen


@pytest.mark.parametrize("prompt", range(1, 7))
def test_worked_example_boxes(prompt):
    kv = read(Quest(budget=4, page=2, dense=0), ALL, [0, 1], prompt).slots[0]
    low = [[0.97, 0.36, -0.92, -1.5], [-1.49, -1.31, -1.39, -0.42], [-0.56, 0.74, 0.62, -0.69], [1.2, 0.04, -1.15, -1.47]]
    high = [[1.36, 1.5, 0.9, -0.38], [-0.24, -1.06, 0.17, 1.28], [1.19, 1.45, 1.48, 1.1], [1.2, 0.04, -1.15, -1.47]]
    box = kv.state["box"][0]  # the smallest k, and the smallest -k
    assert (box[:, :4] - torch.tensor(low)).abs().max() < 1e-5
    assert (box[:, 4:] + torch.tensor(high)).abs().max() < 1e-5


@pytest.mark.parametrize("group", ["sum", "max"])
def test_worked_example_bounds(group):
    bounds = [[5.3618, -1.2618, 4.6216, 1.957], [5.9712, -0.7102, 4.1951, 3.9852],
              [6.1026, -2.062, 5.592, 2.601], [5.4232, -1.1338, 4.0647, 3.6379]]  # fmt: skip
    each = read(Quest(budget=4, page=2, dense=0, group=group), ALL, [0, 0, 1, 1])  # every query head with its own KV head
    assert (each.policy.bound(each.slots[0], now_asking(each)) - torch.tensor(bounds)).abs().max() < 1e-5
    sums = [[11.333, -1.972, 8.8167, 5.9422], [11.5258, -3.1958, 9.6567, 6.2389]]
    most = torch.tensor(bounds).view(2, 2, 4).amax(1)
    both = read(Quest(budget=4, page=2, dense=0, group=group), ALL, [0, 1])
    want = torch.tensor(sums) if group == "sum" else most
    assert (both.policy.bound(both.slots[0], now_asking(both)) - want).abs().max() < 1e-4  # the sums are printed to 4 places


def test_worked_example_answer():
    """Two pages: the best and the one being written, tokens 0, 1 and 6."""
    with reads() as seen:
        engine = read(Quest(budget=4, page=2, dense=0), ALL, [0, 0, 1, 1])
    assert seen[-1] == [{0, 1, 6}] * 4
    assert engine.model.out[0, 0, 6].tolist() == pytest.approx([0.330225, -0.070987, -0.434461, -0.594464], abs=1e-5)
    engine = read(Quest(budget=4, page=2, dense=1), ALL, [0, 0, 1, 1])
    assert engine.model.out[0, 0, 6].tolist() == pytest.approx([0.362668, 0.319187, 0.129733, -0.126024], abs=1e-5)


def test_dials():
    assert Quest(budget=64).plan(3, 50, 15) == [80] * 3 and "stored" in Quest().note
    for wrong in (dict(budget=15), dict(page=0), dict(dense=-1), dict(group="mean"), dict(budget=0)):
        with pytest.raises(ValueError):
            Quest(**wrong)


def test_used_up():
    engine = read(Quest(budget=4, page=2), [0], [0])
    step(engine, 0)  # the eighth row, there because pages are whole
    with pytest.raises(ValueError, match="quest cache is used up"):
        step(engine, 0)


# ---- the paper again, on lists ----


def naive(p: Quest, Q: Vectors, K: list[list[float]], layer: int, n: int, ties: list[int]) -> set[int]:
    """Which of n tokens the newest one reads in one KV head, with the query heads Q and the keys K."""
    pages = [range(a, min(a + p.page, n)) for a in range(0, n, p.page)]
    if layer < p.dense or len(pages) <= p.budget // p.page:
        return set(range(n))
    scores = []
    for b, page in enumerate(pages[:-1]):
        boxes = [(min(K[j][c] for j in page), max(K[j][c] for j in page)) for c in range(4)]
        bounds = [sum(max(x * low, x * high) for x, (low, high) in zip(q[n - 1], boxes)) for q in Q]
        scores.append((-(sum(bounds) if p.group == "sum" else max(bounds)), b))  # of equals the older first
    best, others = sorted(scores), p.budget // p.page - 1
    if 0 < others < len(best):
        gap = best[others][0] - best[others - 1][0]
        if 0 < gap < 1e-5 * max(1.0, abs(best[others][0])):
            raise Delicate
        ties[0] += gap == 0
    return {j for _, b in best[:others] for j in pages[b]} | set(pages[-1])


def rounded(x: Vectors, dtype: torch.dtype) -> tuple[Tensor, Vectors]:
    """Vectors as a model of this dtype has them, and the same as lists."""
    tensor = torch.tensor(x).to(dtype)
    return tensor, tensor.tolist()


def test_oracle():
    ties = [0]

    def case(rng: random.Random) -> None:
        H, G, T = rng.choice((1, 2, 3)), rng.randint(1, 4), rng.randint(12, 40)
        page = rng.randint(1, 4)
        policy = Quest(rng.randint(page, 5 * page), page, rng.randint(0, 2), rng.choice(("sum", "max")))
        dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
        layers, turns = [vectors(rng, H, G, T) for _ in range(2)], conversation(rng, T)
        Q, q = rounded([Q for Q, _ in layers], dtype)
        K, k = rounded([K for _, K in layers], dtype)
        engine = replay(policy, Q, K, torch.ones_like(K))
        for kv in engine.slots:
            kv.k.fill_(1e4)  # what stands in rows not written yet must not widen a box
        with reads() as seen:
            for turn in turns:
                turn.play(engine)
        decoded = [(turn.stop, layer) for turn in turns if not turn.chunk for layer in range(2)]
        assert len(seen) == len(decoded)
        for heads, (n, layer) in zip(seen, decoded):
            for h, got in enumerate(heads):
                want = naive(policy, q[layer][h * G : h * G + G], k[layer][h], layer, n, ties)
                assert got == want, f"{n} tokens, layer {layer}, head {h}, {policy}, {turns}"

    agree(case)
    assert ties[0] > 100, f"only {ties[0]} ties"


def test_what_is_not_chosen_is_not_touched():
    """A NaN in every key and value outside the chosen pages reaches nobody: not even 0 x NaN was computed."""
    original, sparse = Quest.read, [0]

    def spoiled(self: Quest, kv: Slots, q: Tensor) -> Tensor | None:
        chosen = original(self, kv, q)
        if chosen is not None:
            assert chosen.shape == (2, 4), "as many rows as the budget, at any length"
            rest = torch.ones(2, kv.width // 2, dtype=torch.bool).scatter_(1, chosen, False).repeat_interleave(2, 1).view(-1)
            kv.k[rest] = kv.v[rest] = torch.nan
            sparse[0] += int(rest.sum())
        return chosen

    Q, K = (torch.tensor(x) for x in vectors(random.Random(0), 2, 2, 40))
    engine = replay(Quest(budget=8, page=2, dense=0), Q, K, torch.ones_like(K))
    with mock.patch.object(Quest, "read", spoiled):
        for turn in (Turn(0, 30, 30), Turn(30, 31, 0)):
            turn.play(engine)
    assert sparse[0] == 2 * 32 and (engine.model.out[:, :, :31] - 1).abs().max() < 1e-6


def test_nothing_is_gathered_while_the_pages_fit():
    engine = read(Quest(budget=8, page=2, dense=0), ALL, [0, 1])
    assert engine.policy.read(engine.slots[0], now_asking(engine)) is None


def test_the_bound_holds():
    """No key of a page has a larger product with the query than its box allows."""
    for seed in range(20):
        Q, K = (torch.tensor(x) for x in vectors(random.Random(seed), 2, 1, 33))
        engine = replay(Quest(budget=8, page=4), Q, K, K)
        engine.extend(range(30))
        for t in range(30, 33):
            step(engine, t)
        kv = engine.slots[0]
        exact = (Q[:, 32:] @ K.mT)[:, 0, :32].unflatten(1, (8, 4)).amax(2)
        assert (engine.policy.bound(kv, Q[:, None, 32:])[:, :8] >= exact * (1 - 1e-6) - 1e-5).all()
