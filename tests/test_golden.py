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
    "adakv": [58, 12, 24, 72, 1, 23, 94, 39, 89, 54, 5, 23, 11, 42, 23, 67],
    "full": [58, 39, 86, 45, 67, 75, 24, 91, 5, 5, 27, 60, 39, 94, 39, 11],
    "h2o": [58, 94, 94, 94, 94, 23, 49, 74, 54, 96, 5, 5, 91, 79, 90, 94],
    "pyramidkv": [58, 12, 89, 89, 72, 23, 5, 15, 27, 66, 32, 96, 66, 32, 23, 24],
    "quest": [58, 39, 32, 42, 70, 94, 32, 83, 39, 59, 89, 93, 93, 93, 93, 93],
    "rkv": [58, 60, 27, 6, 77, 39, 93, 71, 89, 14, 2, 91, 66, 33, 94, 52],
    "scissorhands": [58, 27, 24, 6, 67, 89, 66, 22, 79, 13, 19, 93, 74, 54, 89, 85],
    "snapkv": [58, 12, 24, 44, 32, 77, 39, 54, 46, 24, 14, 14, 85, 10, 96, 71],
    "streaming_llm": [58, 88, 72, 84, 40, 89, 54, 14, 72, 96, 38, 17, 50, 16, 24, 2],
    "triattention": [58, 79, 94, 94, 10, 81, 94, 14, 30, 40, 40, 54, 5, 91, 20, 89],
    "window": [58, 44, 67, 94, 18, 27, 21, 42, 48, 23, 82, 24, 23, 2, 23, 85],
}

STORY = "Once upon a time, in a village at the foot of a mountain, there lived"
TOLD = (
    " a wise old wizard named Thorold. He was known for his magical abilities and his love for the land.\n\n"
    "One day, a young apprentice,"
)


def greedy_ids(name: str) -> list[int]:
    return list(Engine(tiny(), small(name, 12)).generate(PROMPT, 16))


@pytest.mark.parametrize("name", GOLDEN)
def test_a_seeded_model_says_what_it_said(name):
    assert greedy_ids(name) == GOLDEN[name]


def test_a_real_model_says_what_it_said(smollm2):
    model, tokenizer = load(str(smollm2), dtype="float32", device="cpu")
    ids = tokenizer.encode(STORY)
    assert tokenizer.decode(list(Engine(model, small("full")).generate(ids, 32))) == TOLD


if __name__ == "__main__":
    for name in sorted(REGISTRY):
        print(f'    "{name}": {greedy_ids(name)},')
