"""Scissorhands: its worked example, its dials, and the paper again on lists."""

import random
from collections.abc import Iterable
from fractions import Fraction
from unittest import mock

import pytest
from torch import Tensor
from worked import (
    Delicate, Turn, Vectors, agree, attention, by_position, check, conversation, kept, recipe, remembered, replay, step, vectors,
)  # fmt: skip

from nanokv.engine import Engine
from nanokv.policies.scissorhands import Scissorhands
from nanokv.slots import Slots

WORKED = dict(budget=7, window=2, interval=3, history=4)  # the paper's B = 6 and the current token


def read(T: int, prompt: int, **dials: object) -> Engine:
    """The worked example's first T tokens (one query head per KV head): `prompt` of them read, the others decoded."""
    Q, K, V = recipe(T)
    engine = replay(Scissorhands(**(WORKED | dials)), Q[[0, 2]], K, V)
    engine.extend(range(prompt))
    for t in range(prompt, T):
        step(engine, t)
    return engine


def counts(engine: Engine) -> list[dict[int, float]]:
    return by_position(engine, -engine.policy.score(engine.slots[0]))


@pytest.mark.parametrize("prompt", range(1, 8))
def test_worked_example(prompt):
    engine = read(7, prompt)
    assert [list(head.values()) for head in counts(engine)] == [[2, 3, 4, 2, 1, 0, 1], [1, 3, 4, 3, 2, 0, 1]]
    assert kept(read(8, prompt)) == [[0, 4, 5, 6, 7], [0, 4, 5, 6, 7]]  # 1, 2, 3 went to make room for 7
    engine = read(10, prompt)
    assert counts(engine) == [{0: 3, 4: 4, 5: 2, 6: 1, 7: 2, 8: 2, 9: 1}, {0: 3, 4: 4, 5: 2, 6: 2, 7: 1, 8: 1, 9: 1}]
    assert kept(read(11, prompt)) == [[5, 6, 8, 9, 10], [5, 7, 8, 9, 10]]


def test_worked_example_slots():
    """The three freed slots take the next three tokens; nobody else moves."""
    for head in read(10, 6).slots[0].pos.tolist():
        assert sorted(head[1:4]) == [7, 8, 9] and head[:1] + head[4:] == [0, 4, 5, 6]


def test_worked_example_row():
    rows, observe = [], Scissorhands.observe

    def spy(self: Scissorhands, kv: Slots, q: Tensor, pos: Tensor, probs: Tensor) -> None:
        rows.append(probs[:, 0, -1])
        observe(self, kv, q, pos, probs)

    with mock.patch.object(Scissorhands, "observe", spy):
        read(7, 6)
    assert rows[-1][0].tolist() == pytest.approx([0.302216, 0.167619, 0.012687, 0.005735, 0.049699, 0.347405, 0.114639], abs=1e-5)
    assert rows[-1][1].tolist() == pytest.approx([0.314409, 0.164431, 0.006321, 0.002133, 0.030618, 0.380503, 0.101585], abs=1e-5)


def test_norm_divides_by_the_rows_that_saw_the_token():
    seen = [4, 4, 4, 4, 3, 2, 1]
    want = [[n / s for n, s in zip(head.values(), seen)] for head in counts(read(7, 4))]
    assert [list(head.values()) for head in counts(read(7, 4, norm=True))] == [pytest.approx(head) for head in want]


def test_dials():
    assert Scissorhands(budget=1024).interval == 512 and Scissorhands(budget=16).interval == 6
    assert Scissorhands(budget=16, sink=2, window=3).interval == 8 and Scissorhands(budget=16).watch == 400
    wrong = dict(history=0), dict(threshold="mean"), dict(budget=10), dict(budget=20, interval=11), dict(window=-1)
    for dials in wrong:
        with pytest.raises(ValueError):
            Scissorhands(**dials)


# ---- the paper again, on lists ----


def naive(p: Scissorhands, Q: Vectors, K: list[list[float]], turns: list[Turn], share: int, ties: list[int]) -> Iterable[list[int]]:
    """Who is held by one KV head, with the query heads Q and the keys K, after every turn."""
    low: dict[int, list[int]] = {}  # in which rows a token was low; twice, if for two query heads

    def fair(row: list[float], i: int) -> float:
        if p.threshold == "quantile":
            return sorted(row)[(len(row) - 1) * 9 // 10]
        return 1 / len(row) if p.threshold == "visible" else 1 / (i + 1)

    def come(i: int, held: list[int]) -> None:
        low[i] = []
        for q in Q:
            row = attention(q[i], [K[j] for j in held])
            least = fair(row, i)
            for j, x in zip(held, row):
                if 0 < abs(x - least) < 3e-6 * least:
                    raise Delicate
                low[j] += [i] * (x < least)

    def drop(held: list[int], now: int) -> list[int]:
        def count(j: int) -> Fraction:
            times = sum(i >= now - p.history for i in low[j])
            return Fraction(times, min(now - j, p.history) if p.norm else 1)

        safe = [j for j in held if j < p.sink or j >= now - p.window]
        others = sorted((count(j), j) for j in held if j not in safe)  # of equals the older first
        n = share - p.interval - len(safe)
        ties[0] += 0 < n < len(others) and others[n - 1][0] == others[n][0]
        return sorted(safe + [j for _, j in others[:n]])

    return remembered(turns, p.budget, share, come, drop)


def test_oracle():
    ties = [0]

    def case(rng: random.Random) -> None:
        H, G, T = rng.choice((1, 1, 2, 3)), rng.randint(1, 4), rng.randint(12, 40)
        dials = dict(sink=rng.choice((0, 0, 2)), window=rng.randint(0, 5), interval=rng.choice((1, 2, 4, 7)))
        dials["budget"] = sum(dials.values()) + rng.randint(0, 8)
        dials |= dict(history=rng.choice((1, 4, 8, 11, 17, 100)), threshold=rng.choice(("visible", "paper", "quantile")))
        policy = Scissorhands(**dials, norm=rng.random() < 0.3, heads=rng.choice(("uniform", "uniform", "adaptive")))
        check(naive, policy, conversation(rng, T), vectors(rng, H, G, T), ties)

    agree(case)
    assert ties[0] > 300, f"only {ties[0]} ties"


def test_oracle_on_a_prompt_of_several_blocks():
    """More rows than are watched at a time. Without `norm` the young would win whatever the first block says."""
    policy = Scissorhands(budget=60, interval=20, history=200, norm=True)
    turns = [Turn(0, 290, 290), *(Turn(t, t + 1, 0) for t in range(290, 330))]
    agree(lambda rng: check(naive, policy, turns, vectors(rng, 2, 2, 330, "float"), [0]), cases=3)
