"""streaming_llm: the paper's cache (keys before RoPE, all turned at every step) against ours (only the sinks turn).

The worked example's numbers come from the official cache class: K, Q before RoPE, 2 sinks, a
window of 3, one head of 4 dimensions at a time.
"""

import math

import pytest
import torch
from conftest import scratch, tiny
from torch import Tensor

from nanokv.attention import watch_slots
from nanokv.engine import Engine
from nanokv.policy import Policy, make, select, victims
from nanokv.rope import frequencies, rotate
from nanokv.slots import Slots

FREQS = frequencies({"rope_type": "default", "rope_theta": 10000.0}, 4, 2048)[0]


def example(T: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K, V [2 heads, T, 4] of the worked example; query heads 0 and 2 of four."""
    def table(f) -> Tensor:
        return torch.tensor([[[f(h, t, i) for i in range(4)] for t in range(T)] for h in range(2)])

    return (table(lambda h, t, i: round(1.5 * math.cos(0.5 * (2 * h + 1) + 0.8 * t + 1.1 * i), 2)),
            table(lambda h, t, i: round(1.5 * math.sin(0.7 * (h + 1) + 1.3 * t + 0.9 * i), 2)),
            table(lambda h, t, i: round(math.sin(0.3 * (h + 1) + 0.5 * t - 0.7 * i), 2)))


class Step:
    """One layer driven by hand, as the engine drives it: make room, write, attend."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.kv = Slots.empty(policy.budget, 2, 4, torch.zeros(1), state=policy.state(2, 1, policy.budget, 4))
        self.kv.freqs = FREQS

    def prompt(self, n: int) -> None:
        _, k, v = example()
        text = scratch(self.kv, rotate(k[:, :n], torch.arange(n), FREQS), v[:, :n])
        self.kv.fill(text, select(self.policy, text, self.kv))
        self.policy.settle(self.kv)

    def __call__(self) -> tuple[list[dict[int, float]], Tensor]:
        """The next token -> per head, the weight of every position that it read; and the answer [2, 4]."""
        kv, t = self.kv, int(self.kv.now)
        if kv.room == 0:
            (gone,) = victims(self.policy, [kv], self.policy.interval)
            kv.evict(gone)
            self.policy.settle(kv)
        q, k, v = (x[:, t : t + 1] for x in example())
        pos = torch.tensor([t])
        kv.write(rotate(k, pos, FREQS), v)
        kv.room -= 1
        out, probs = watch_slots(rotate(q, pos, FREQS)[:, None], kv.keys, kv.values, kv.mask(pos), kv.scale)
        weights = [{int(p): float(w) for p, w in zip(kv.pos[h], probs[h, 0, 0]) if p >= 0} for h in range(2)]
        return [dict(sorted(w.items())) for w in weights], out[:, 0, 0]


def test_the_examples_inputs():
    q, k, v = example()
    assert k[0, 0].tolist() == pytest.approx([0.97, 1.5, 0.9, -0.38]) and q[0, 7].tolist() == pytest.approx([1.47, 0.91, -0.65, -1.5])
    assert k[1, 7].tolist() == pytest.approx([-1.32, -1.38, -0.39, 0.89])
    assert rotate(k[0, 1], torch.tensor(1), FREQS).tolist() == pytest.approx([1.508964, 0.374982, 0.647322, -1.496325], abs=1e-6)


@pytest.mark.parametrize(
    "positions, head, want",
    (
        ("cache", 0, (0.082284, 0.123144, 0.117770, 0.362149, 0.276808, 0.037845)),
        ("cache", 1, (0.072937, 0.113735, 0.185187, 0.255303, 0.292505, 0.080334)),
        ("text", 0, (0.227348, 0.407537, 0.054117, 0.166411, 0.127196, 0.017390)),
        ("text", 1, (0.250411, 0.411768, 0.076918, 0.106042, 0.121493, 0.033367)),
    ),
)
def test_the_worked_example(positions, head, want):
    """2 sinks + a window of 3 + the current token: our budget of 6."""
    step = Step(make("streaming_llm", budget=6, sink=2, positions=positions))
    for t, read in enumerate(([0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5], [0, 1, 3, 4, 5, 6])):
        assert [list(w) for w in step()[0]] == [read] * 2, f"token {t}"
    weights, _ = step()
    assert list(weights[head]) == [0, 1, 4, 5, 6, 7]
    assert list(weights[head].values()) == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("prompt", (0, 3, 6, 7))
def test_the_worked_example_with_room_made_first(prompt):
    """E2, where the current token counts: a budget of 5; the prompt's part makes no difference to who is there."""
    step = Step(make("streaming_llm", budget=5, sink=2))
    if prompt:
        step.prompt(prompt)
    for _ in range(prompt, 8):
        weights, out = step()
    assert list(weights[0]) == [0, 1, 5, 6, 7]
    assert list(weights[0].values()) == pytest.approx([0.082842, 0.080107, 0.447896, 0.342348, 0.046806], abs=1e-6)
    assert out[0].tolist() == pytest.approx([0.147008, 0.540786, 0.681887, 0.494116], abs=1e-6)


@pytest.mark.parametrize("interval", (1, 3))
def test_the_sinks_do_not_drift(interval):
    """After a thousand turns each sink key is its pristine self, turned once by the number of tokens forgotten."""
    sink, policy = 3, make("streaming_llm", budget=10, sink=3, interval=interval)
    engine = Engine(tiny(n_layers=1), policy)
    engine.extend(list(range(12)))
    kv = engine.slots[0]
    block, freqs = engine.model.blocks[0], kv.freqs
    k = block.attn.qkv(block.attn_norm(engine.model.embed(torch.arange(sink)))).split((32, 16, 16), -1)[1].view(sink, 2, 8)
    for _ in range(1000):
        engine.decode(torch.tensor([5]))
        live = int(kv.live[0].sum())
        want = rotate(k.transpose(0, 1).double(), torch.arange(sink) + int(kv.now) - live, freqs)
        got = kv.keys[:, :sink]
        assert (got - want).abs().max() < 1e-5
    assert kv.pos[:, :sink].tolist() == [[0, 1, 2]] * 2


def test_a_prompt_is_read_exactly_whatever_its_length():
    """What is forgotten is forgotten afterwards: the first answer does not depend on the budget."""
    text, model = list(range(50)), tiny()
    whole = Engine(model, make("full")).extend(text)
    assert (Engine(model, make("streaming_llm", budget=8, sink=2)).extend(text) - whole).abs().max() < 1e-5
