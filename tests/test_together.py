"""Engines that decode together: each is left as its own decode would leave it, and one that fails fails alone."""

import pytest
import torch
from conftest import REGISTRY, small, tiny, variants

from nanokv.bench._together import answer, answer_together, decode_together
from nanokv.engine import Engine
from nanokv.policies.h2o import H2O

EVERY = [small(v.values[0], (12, 20)[i % 2], **v.values[1]) for i, v in enumerate(variants())]


def pair(model: torch.nn.Module, policies: list, room: int = 60) -> tuple[list[Engine], list[Engine], list, list]:
    """Engines of these policies, twice, and the logits of each after texts of 1 to 40 tokens."""
    together, alone = ([Engine(model, p) for p in policies] for _ in range(2))
    heard: tuple[list, list] = [], []
    for i in range(len(policies)):
        n = 1 + 7 * i % 40
        text = torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(i))
        for engines, logits in zip((together, alone), heard):
            engines[i].reset(n, room)
            logits.append(engines[i].extend(text))
    return together, alone, *heard


def same_memory(a: Engine, b: Engine) -> None:
    for x, y in zip(a.slots, b.slots):
        assert torch.equal(x.pos, y.pos) and x.shares == y.shares and x.room == y.room and torch.equal(x.now, y.now), a.policy
        for mine, theirs in ((x.k, y.k), (x.v, y.v), *((x.marks[n], y.marks[n]) for n in x.marks), *((x.state[n], y.state[n]) for n in x.state)):
            assert torch.allclose(mine.double(), theirs.double(), rtol=0, atol=1e-10), a.policy


def test_every_engine_is_left_as_its_own_decode_leaves_it():
    """All policies and splits, two budgets, positions of their own: 20 steps in float64."""
    together, alone, _, _ = pair(tiny().double(), EVERY)
    draw = torch.Generator().manual_seed(1)
    for _ in range(20):
        tokens = torch.randint(0, 97, (len(EVERY),), generator=draw)
        logits, failed = decode_together(together, tokens)
        assert not failed and logits.shape == (len(EVERY), 97)
        own = torch.stack([engine.decode(tokens[i : i + 1]) for i, engine in enumerate(alone)])
        assert (logits - own).abs().max() < 1e-10
    for a, b in zip(together, alone):
        same_memory(a, b)


def test_answers_are_those_of_each_engine_alone():
    together, alone, heard, own = pair(tiny().double(), EVERY)
    stop = {int(own[0].argmax()), 5, 6, 7, 8, 9}
    found = answer_together(together, torch.stack(heard), 9, stop)
    assert found == [answer(engine, logits, 9, stop) for engine, logits in zip(alone, own)]
    assert len(found[0]) == 1 and len({len(ids) for ids in found}) > 2, "some end early and step aside"
    for a, b in zip(together, alone):
        same_memory(a, b)


def test_an_engine_without_room_fails_alone():
    together, alone, heard, own = pair(tiny(), [small("h2o"), small("full"), small("window")], room=3)
    found = answer_together(together, torch.stack(heard), 9, ())
    assert isinstance(found[1], ValueError) and "used up" in str(found[1])
    assert [found[0], found[2]] == [answer(alone[i], own[i], 9, ()) for i in (0, 2)]
    with pytest.raises(ValueError, match="used up"):
        answer(alone[1], own[1], 9, ())


def test_an_engine_that_fails_between_layers_fails_alone(monkeypatch):
    together, alone, heard, own = pair(tiny(), [small("window"), small("h2o"), small("snapkv")])
    real = H2O.observe

    def broken(self, kv, q, pos, probs):
        if kv.layer == 1:
            raise RuntimeError("no more memory")
        real(self, kv, q, pos, probs)

    expected = [answer(alone[i], own[i], 5, ()) for i in (0, 2)]
    monkeypatch.setattr(H2O, "observe", broken)
    found = answer_together(together, torch.stack(heard), 5, ())
    assert str(found[1]) == "no more memory" and [found[0], found[2]] == expected


def test_every_policy_is_tried():
    assert {p.name for p in EVERY} == set(REGISTRY)
