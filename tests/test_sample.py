"""The sampler against naive lists, and against the distribution it promises."""

import math

import pytest
import torch

from nanokv.sample import Sampler


def naive(logits, temperature, top_k, top_p, min_p) -> list[float]:
    """The same distribution with Python lists: probabilities by id, zero where filtered."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weight = [math.exp((logits[i] - max(logits)) / temperature) for i in order]
    if top_k:
        order, weight = order[:top_k], weight[:top_k]
    total, held, n = sum(weight), 0.0, 0
    while n < len(order) and (held < top_p * total or top_p == 1):
        held += weight[n]
        n += 1
    kept = [(i, w) for i, w in zip(order[:n], weight[:n]) if w >= min_p * weight[0]]
    total = sum(w for _, w in kept)
    probabilities = [0.0] * len(logits)
    for i, w in kept:
        probabilities[i] = w / total
    return probabilities


def test_filters_keep_exactly_the_naive_sets():
    torch.manual_seed(0)
    seen = set()
    for trial in range(300):
        logits = torch.randn(40) * 3
        if trial % 3 == 0:
            logits = logits.round()  # many ties, as half precision makes them
        pick = lambda *values: values[torch.randint(len(values), ()).item()]  # noqa: E731
        dials = dict(temperature=pick(0.3, 0.7, 1.0, 2.0), top_k=pick(0, 1, 5, 39, 100), top_p=pick(1.0, 0.93, 0.51, 0.01))
        dials["min_p"] = pick(0.0, 0.053, 0.47)
        expected = torch.tensor(naive(logits.double().tolist(), **dials))
        got = Sampler(**dials).probabilities(logits)
        assert got.gt(0).tolist() == expected.gt(0).tolist(), dials
        assert torch.allclose(got / got.sum(), expected, atol=1e-5), dials
        seen.add(int(got.gt(0).sum()))
    assert len(seen) > 10  # the settings really cut at different places


@pytest.mark.parametrize("dials", [dict(), dict(top_k=6), dict(top_p=0.9), dict(min_p=0.1), dict(top_k=9, top_p=0.8)])
def test_draws_follow_the_distribution(dials):
    torch.manual_seed(1)
    logits, n = torch.randn(12), 4000
    sampler = Sampler(temperature=0.8, seed=5, **dials)
    counts = torch.bincount(torch.cat([sampler(logits) for _ in range(n)]), minlength=12)
    expected = n * torch.tensor(naive(logits.double().tolist(), 0.8, *(dials.get(d, 0) for d in ("top_k",)),
                                      dials.get("top_p", 1.0), dials.get("min_p", 0.0)))  # fmt: skip
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    assert chi_square < 35  # 11 degrees of freedom exceed this once in 4,000 times; the seed is fixed


def test_same_seed_same_sequence_and_a_drawn_seed_can_be_repeated():
    logits = torch.zeros(1000)

    def sequence(sampler: Sampler) -> list[int]:
        return [sampler(logits).item() for _ in range(20)]

    drawn = Sampler(temperature=1.0)
    first = sequence(drawn)
    assert first == sequence(Sampler(temperature=1.0, seed=drawn.seed))
    assert first == sequence(Sampler(temperature=1.0, top_k=1000, seed=drawn.seed))  # a filter that keeps all
    assert first != sequence(Sampler(temperature=1.0, seed=drawn.seed + 1))
    assert len(set(first)) > 10
    state = torch.random.get_rng_state()
    sequence(drawn)
    assert torch.equal(state, torch.random.get_rng_state())  # the global generator is left alone


def test_greedy_takes_the_lowest_id_of_the_largest():
    logits = torch.tensor([0.0, 3.0, 1.0, 3.0])
    token = Sampler()(logits)
    assert token.tolist() == [1] and token.dtype == torch.int64 and token.shape == (1,)
    assert Sampler(temperature=1e-45)(logits).item() in (1, 3)  # so low that float32 calls it zero
    assert Sampler(temperature=1e-6, seed=0)(torch.tensor([1e4, 1e4 - 0.1, -1e4])).item() == 0


def test_padded_ids_are_never_chosen():
    logits = torch.tensor([0.0, 1.0, 2.0, 50.0, 60.0])
    assert Sampler(valid_vocab=3)(logits).item() == 2
    sampler = Sampler(temperature=5.0, top_k=4, top_p=0.99, valid_vocab=3, seed=0)
    assert {sampler(logits).item() for _ in range(200)} == {0, 1, 2}


def test_half_precision_logits_are_sampled_in_float32():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(3)).bfloat16()
    p = Sampler(temperature=1.0).probabilities(logits)
    assert p.dtype == torch.float32 and torch.equal(p, Sampler(temperature=1.0).probabilities(logits.float()))
    assert logits.dtype == torch.bfloat16


def test_logits_are_not_modified_and_broken_ones_do_not_raise():
    logits = torch.randn(30)
    before = logits.clone()
    sampler = Sampler(temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, seed=0)
    sampler(logits)
    assert torch.equal(logits, before)
    for broken in (torch.full((30,), math.nan), torch.full((30,), -math.inf)):
        assert 0 <= sampler(broken).item() < 30
        assert 0 <= Sampler()(broken).item() < 30


def test_a_step_never_waits_for_the_device():
    """On the meta device there are no values to look at: asking for one raises."""
    logits = torch.empty(100, device="meta")
    assert Sampler(valid_vocab=90)(logits).shape == (1,)
    dials = Sampler(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=0)
    assert dials.probabilities(logits).shape == (100,)


@pytest.mark.parametrize(
    "dial, value",
    [("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("top_k", -1), ("top_k", 2.5),
     ("top_p", 0.0), ("top_p", 1.1), ("min_p", 1.0), ("min_p", -0.1), ("seed", -1), ("seed", 2**63), ("valid_vocab", 0)],
)  # fmt: skip
def test_impossible_values_are_named(dial, value):
    with pytest.raises(ValueError, match=rf"{dial.replace('_', '.')}.*{value}"):
        Sampler(**{dial: value})
