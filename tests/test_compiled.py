"""The compiled decode step against the plain one: the same answer, the same tokens kept, and nothing compiled twice."""

import pytest
import torch
from conftest import MODES, small, tiny

from nanokv.engine import Engine
from nanokv.policy import REGISTRY


def side_by_side(policy, model, prompt: int = 30, steps: int = 40) -> list[Engine]:
    """A plain and a compiled engine after the same text; every step's answer was compared."""
    text = torch.randint(0, 97, (prompt + steps,), generator=torch.Generator().manual_seed(3)).tolist()
    engines = [Engine(model, policy), Engine(model, policy, compile=True)]
    for engine in engines:
        engine.reset(prompt, steps)
        engine.extend(text[:prompt])
    for t in text[prompt:]:
        plain, compiled = (engine.decode([t]) for engine in engines)
        assert (plain - compiled).norm() < 1e-4 * plain.norm()
    for kv, other in zip(*(engine.slots for engine in engines)):
        assert torch.equal(kv.pos, other.pos) and torch.equal(kv.now, other.now)
    return engines


def test_a_compiled_step_is_the_step():
    plain, compiled = side_by_side(small("h2o"), tiny(n_layers=2))
    assert plain.compile_s == 0 < compiled.compile_s
    before, graphs = compiled.compile_s, torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled.reset(30, 40)  # the same memory again: nothing to compile
    compiled.extend([5] * 30)
    for _ in range(40):
        compiled.decode([7])
    assert compiled.compile_s == before and torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_compiling_leaves_the_memory_empty():
    engine = Engine(tiny(n_layers=1), small("window"), compile=True)
    engine.reset(8, 8)
    assert engine.seen == 0 and engine.compile_s > 0
    assert all(not kv.live.any() and not kv.k.any() and kv.room == 12 for kv in engine.slots)


def test_what_cannot_be_compiled_is_told(monkeypatch):
    def fail(*_, **__):
        raise KeyError("no compiler\nand much more")

    engine = Engine(tiny(n_layers=1), small("window"), compile=True)
    monkeypatch.setattr(engine._compiled, "_graph", fail)
    with pytest.raises(RuntimeError, match="could not be compiled .*--compile"):
        engine.reset(8, 8)


@pytest.mark.slow
@pytest.mark.parametrize("name, dials", [*((name, {}) for name in sorted(REGISTRY)), *((n, m) for n, modes in MODES.items() for m in modes)])
def test_every_policy_compiles_to_one_full_graph(name, dials):
    policy = REGISTRY[name]() if name == "full" else small(name, **dials)
    side_by_side(policy, tiny(n_layers=2))
