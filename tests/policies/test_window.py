"""window: the oldest goes; against a Python list per head."""

import random

import pytest
import torch
from conftest import tiny

from nanokv.engine import Engine
from nanokv.policy import make


def naive(prompt: int, steps: int, budget: int, sink: int, interval: int) -> list[list[int]]:
    """The tokens held after the prompt and after every step."""
    held = list(range(prompt))
    if prompt > budget:
        held = held[:sink] + held[sink:][-(budget - interval - sink) or prompt :]
    history = [held]
    for t in range(prompt, prompt + steps):
        if len(held) == budget:
            held = held[:sink] + held[sink + interval :]
        held = [*held, t]
        history.append(held)
    return history


@pytest.mark.parametrize("policy", ["window", "streaming_llm"])  # they keep the same tokens
def test_the_oldest_behind_the_sinks_goes(policy):
    models = [tiny(n_layers=2, n_heads=2 * G) for G in (1, 2, 3, 4)]
    for seed in range(300):
        rng = random.Random(seed)
        sink, interval = rng.randint(0, 4), rng.randint(1, 4)
        budget, prompt, steps = sink + interval + rng.randint(0, 8), rng.randint(1, 30), rng.randint(1, 12)
        engine = Engine(rng.choice(models), make(policy, budget=budget, sink=sink, interval=interval))
        engine.extend(list(range(prompt)))
        for held in naive(prompt, steps, budget, sink, interval):
            for kv in engine.slots:
                assert [sorted(p for p in pos if p >= 0) for pos in kv.pos.tolist()] == [held] * 2, (seed, held)
            engine.decode(torch.tensor([7]))


def test_a_prompt_in_chunks_leaves_the_same_window():
    for chunk in (1, 3, 11):
        engine = Engine(tiny(), make("window", budget=8, sink=2), chunk)
        engine.extend(list(range(40)))
        engine.decode(torch.tensor([7]))
        assert [sorted(pos) for pos in engine.slots[2].pos.tolist()] == [[0, 1, 35, 36, 37, 38, 39, 40]] * 2
