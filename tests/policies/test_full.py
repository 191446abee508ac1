"""full: everything stays, slot n holds token n, and there is an end."""

import pytest
import torch
from conftest import tiny

from nanokv.engine import Engine
from nanokv.policy import make


def test_slot_n_holds_token_n_for_ever():
    engine = Engine(tiny(), make("full"))
    assert len(list(engine.generate(range(11), 9))) == 9
    for kv in engine.slots:
        assert kv.pos.tolist() == [[*range(19), -1]] * 2, "the last token was sampled, and never read"


def test_rows_are_the_prompt_and_the_tokens_asked_for():
    engine = Engine(tiny(), make("full"))
    engine.reset(11, 9)
    assert [kv.shares for kv in engine.slots] == [[20, 20]] * 3
    engine.reset(11)  # no end in sight: what the model was trained for
    assert [kv.shares for kv in engine.slots] == [[4096, 4096]] * 3


def test_it_ends_with_a_sentence_and_holds_what_it_held():
    engine = Engine(tiny(), make("full"))
    engine.reset(4, 2)
    engine.extend([1, 2, 3, 4])
    engine.decode(torch.tensor([5]))
    engine.decode(torch.tensor([6]))
    for too_much in (lambda: engine.decode(torch.tensor([7])), lambda: engine.extend([7])):
        with pytest.raises(ValueError, match="the full cache is used up.*announce more"):
            too_much()
        assert [kv.pos.tolist() for kv in engine.slots] == [[[0, 1, 2, 3, 4, 5]] * 2] * 3
