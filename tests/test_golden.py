"""What came out once must come out again: greedy ids of a seeded tiny model under each policy, and a real model's words.

A change here is not a bug by itself, but it is never an accident: whoever changes what a policy keeps says
so, and refreshes the table with `python tests/test_golden.py`.
"""

import random

import pytest
from conftest import REGISTRY, small, tiny

from nanokv import Engine, load

PROMPT = random.Random(0).choices(range(97), k=40)

GOLDEN = {
}

STORY = "Once upon a time, in a village at the foot of a mountain, there lived"
TOLD = ""


def greedy_ids(name: str) -> list[int]:
    return list(Engine(tiny(), small(name, 12)).generate(PROMPT, 16))


@pytest.mark.parametrize("name", GOLDEN)
def test_a_seeded_model_says_what_it_said(name):
    assert greedy_ids(name) == GOLDEN[name]


def test_a_real_model_says_what_it_said(smollm2):
    model, tokenizer = load(str(smollm2), dtype="float32", device="cpu")
    ids = tokenizer.encode(STORY)
    for policy in (small("full"), small("streaming_llm", 1024), small("window", 1024)):  # a budget that suffices
        assert tokenizer.decode(list(Engine(model, policy).generate(ids, 32))) == TOLD


if __name__ == "__main__":
    for name in sorted(REGISTRY):
        print(f'    "{name}": {greedy_ids(name)},')
