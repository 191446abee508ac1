"""The rules that no policy can get wrong: ties, protection, how many stay; against sorted Python lists."""

import random

import pytest
import torch
from conftest import fields, forgets, scratch, small

from nanokv.policies.window import Window
from nanokv.policy import REGISTRY, lowest, make, select, victims, worth
from nanokv.slots import EMPTY, Slots

H, N, D = 3, 9, 4
INF = float("inf")


def memory(rng: random.Random, live: int, now: int, score: torch.Tensor | None = None) -> Slots:
    """H heads of N slots holding `live` random tokens of the first `now`, anywhere."""
    kv = Slots.empty(N, H, D, torch.zeros(1), marks={"worth": ((), "float32")})
    for h in range(H):
        kv.pos[h, rng.sample(range(N), live)] = torch.tensor(rng.sample(range(now), live), dtype=torch.int32)
    kv.now.fill_(now)
    kv.room = N - live
    kv.marks["worth"].copy_(torch.tensor([[rng.randint(0, 3) for _ in range(N)] for _ in range(H)]))
    return kv


class Marked(Window):
    """Scores that a test writes by hand."""

    def score(self, kv: Slots) -> torch.Tensor:
        return kv.marks["worth"]


def marked(budget: int = N, sink: int = 0, window: int = 0, interval: int = 1) -> Marked:
    policy = Marked(budget=budget, sink=sink, interval=interval)
    object.__setattr__(policy, "window", window)
    return policy


def ranking(kv: Slots, h: int, sink: int = 0, window: int = 0) -> list[tuple]:
    """The live tokens of a head, first to go first: protected last, then the lower score, of equals the newer."""
    now = int(kv.now)
    tokens = [(int(p), float(kv.marks["worth"][h, n])) for n, p in enumerate(kv.pos[h]) if p != EMPTY]
    return sorted(tokens, key=lambda t: (t[0] < sink or t[0] >= now - window, t[1], -t[0]))


def test_of_equal_scores_the_newest_goes_whatever_its_slot():
    rng = random.Random(0)
    for _ in range(300):
        sink, window = rng.randint(0, 2), rng.randint(0, 2)
        kv = memory(rng, rng.randint(8, N), 12)
        policy = marked(sink=sink, window=window)
        for n in (1, 2, 4):
            (gone,) = victims(policy, [kv], n)
            assert gone.shape == (H, n)
            for h in range(H):
                assert kv.pos[h, gone[h]].tolist() == [p for p, _ in ranking(kv, h, sink, window)[:n]]


def test_lowest_agrees_with_itself_for_one_and_for_many():
    rng = random.Random(1)
    for _ in range(100):
        kv = memory(rng, N, 20)
        w = worth(marked(), kv, kv.marks["worth"])
        assert torch.equal(lowest(w, kv.pos, 1), lowest(w, kv.pos, 2)[:, :1])


def test_worth_protects_sinks_the_window_and_empty_slots_and_nothing_else():
    kv = memory(random.Random(2), 7, 12)
    kv.pos[0] = torch.tensor([0, 1, 2, 9, 10, 11, EMPTY, 5, EMPTY])
    kv.marks["worth"].fill_(1)
    assert worth(marked(sink=2, window=3), kv, kv.marks["worth"])[0].tolist() == [INF, INF, 1, INF, INF, INF, INF, 1, INF]
    assert worth(marked(), kv, kv.marks["worth"])[0].tolist() == [1, 1, 1, 1, 1, 1, INF, 1, INF]


def test_positions_are_compared_exactly_where_float32_would_not():
    kv = memory(random.Random(3), N, N)
    kv.pos.copy_(torch.arange(N, dtype=torch.int32).flip(0) + (1 << 25))
    kv.now.fill_((1 << 25) + N)
    (gone,) = victims(Window(budget=N), [kv], 1)
    assert gone.tolist() == [[N - 1]] * H
    (gone,) = victims(Window(budget=N), [kv], 4)
    assert gone.tolist() == [[N - 1, N - 2, N - 3, N - 4]] * H


def text_of(rng: random.Random, kv: Slots, S: int) -> Slots:
    text = scratch(kv, torch.randn(H, S, D), torch.randn(H, S, D))
    text.marks["worth"].copy_(torch.tensor([[rng.randint(0, 3) for _ in range(text.width)] for _ in range(H)]))
    return text


def test_a_text_that_fits_stays_whole():
    rng = random.Random(4)
    for S in (1, 3, 5):
        kv = memory(rng, 4, 8)
        text = text_of(rng, kv, S)
        assert select(marked(interval=3), text, kv).tolist() == [list(range(4 + S))] * H


def test_the_best_of_a_longer_text_stay_in_time_order_with_room_for_an_interval():
    rng = random.Random(5)
    for _ in range(200):
        sink, window, interval = rng.randint(0, 2), rng.randint(0, 2), rng.randint(1, 3)
        kv = memory(rng, rng.randint(3, N), 12)
        text = text_of(rng, kv, rng.randint(7, 15))
        kept = select(marked(N, sink, window, interval), text, kv)
        for h in range(H):
            best = ranking(text, h, sink, window)[::-1][: N - interval]
            assert text.pos[h, kept[h]].tolist() == sorted(p for p, _ in best)


@pytest.mark.parametrize("shares", ([3, 14, 10], [9, 9, 9], [14, 5, 8]))
def test_heads_that_own_more_keep_more(shares):
    rng = random.Random(6)

    class Uneven(Marked):
        def allot(self, score, rows):
            assert rows == N and score.shape == (H, 20)
            return shares

    for interval in (1, 3):
        kv = Slots.empty(N, H, D, torch.zeros(1), width=14, marks={"worth": ((), "float32")})
        policy = Uneven(budget=N, interval=interval)
        text = text_of(rng, kv, 20)
        for turn in range(3):  # the first overflow moves the borders; they stay
            order = select(policy, text, kv)
            for h in range(H):
                best = sorted(p for p, _ in ranking(text, h)[::-1][: shares[h] - interval])
                assert text.pos[h, order[h][order[h] >= 0]].tolist() == best
            kv.fill(text, order)
            assert kv.allotted and kv.shares == shares and kv.room == interval
            text = text_of(rng, kv, rng.randint(interval + 1, 9))


def test_victims_of_uneven_heads_are_their_own_slots():
    rng = random.Random(7)
    kv = Slots.empty(4, H, D, torch.zeros(1), width=7, marks={"worth": ((), "float32")})
    kv.share([3, 7, 2])
    for h, share in enumerate(kv.shares):
        kv.pos[h, :share] = torch.tensor(rng.sample(range(20), share), dtype=torch.int32)
    kv.now.fill_(20)
    for n in (1, 2):
        (gone,) = victims(marked(4), [kv], n)
        assert (gone < kv.caps[:, None]).all()
        for h in range(H):
            assert kv.pos[h, gone[h]].tolist() == [p for p, _ in ranking(kv, h)[:n]]


# ---- dials ----


def test_a_policy_is_called_by_its_files_name():
    assert make("window", budget="12", sink=1) == Window(budget=12, sink=1)
    assert make("full").name == "full" and make("streaming_llm").name == "streaming_llm"
    assert "test_policy" not in REGISTRY


@pytest.mark.parametrize(
    "name, dials, said",
    (
        ("nobody", {}, "no policy is called 'nobody'.*full.*window"),
        ("window", {"window": 3}, "window has no dial 'window'; its dials are budget, sink, interval"),
        ("full", {"budget": 3}, "full has no dial 'budget'; it has none"),
        ("window", {"budget": "many"}, "dial budget takes int, not 'many'"),
        ("window", {"budget": "1e3"}, "dial budget takes int, not '1e3'"),
        ("window", {"budget": 0}, "budget must be a whole number of at least 1, not 0"),
        ("window", {"budget": 2.5}, "budget must be a whole number.*2.5"),
        ("window", {"budget": True}, "budget must be a whole number.*True"),
        ("window", {"sink": -1}, "sink must be a whole number of at least 0, not -1"),
        ("window", {"interval": 0}, "interval must be a whole number of at least 1, not 0"),
        ("window", {"budget": 5, "sink": 4, "interval": 2}, "5 slots cannot hold sink 4.*interval 2 = 6"),
        ("window", {"budget": None}, "budget must be a whole number of at least 1, not None"),
        ("window", {"budget": "9" * 400}, r"budget must be below 2\^31, not 9+\.\.\.9+$"),
        ("h2o", {"beta": [1]}, r"beta must be a number from 1 to inf, not \[1\]"),
        ("h2o", {"floor_ratio": "nan"}, "floor_ratio must be a number from 0 to 1, not nan"),
        ("rkv", {"mix": 2}, "mix must be a number from 0 to 1, not 2"),
        ("triattention", {"trig": 5}, "trig must be True or False, not 5"),
        ("triattention", {"reach": 32}, "reach must be a number from 0 to 31, not 32"),
        ("streaming_llm", {"positions": "elsewhere"}, "positions must be cache or text, not 'elsewhere'"),
    ),
)
def test_a_users_mistake_is_told_in_one_sentence(name, dials, said):
    with pytest.raises(ValueError, match=said) as error:
        make(name, **dials)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_what_is_protected_must_fit(name):
    """Whatever is never evicted, plus one interval, is no more than the budget; one slot less is refused."""
    if not forgets(small(name)):
        pytest.skip("it never evicts")
    for dials in ({}, {"sink": 3}, {"interval": 4}, {"window": 7, "recent": 7}, {"window": 6, "recent": 1}):
        dials = {d: v for d, v in dials.items() if d in fields(name)}
        policy = small(name, 40, **dials)
        least = policy.sink + max(policy.window, policy.recent) + policy.interval
        small(name, least, **dials)
        with pytest.raises(ValueError, match="cannot hold|budget|least"):
            small(name, least - 1, **dials)
