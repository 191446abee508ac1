"""The compiled decode step against the plain one: the same answer, the same tokens kept, and nothing compiled twice."""

import re

import pytest
import torch
from conftest import MODES, small, tiny

from nanokv import compiled, sweep
from nanokv.compiled import Compiled, threads
from nanokv.engine import Engine
from nanokv.policy import REGISTRY
from nanokv.quantize import Codes, bits_of, coded_places, put


def side_by_side(policy, model, prompt: int = 30, steps: int = 40, within: float = 1e-4) -> list[Engine]:
    """A plain and a compiled engine after the same text; every step's answer was compared."""
    text = torch.randint(0, 97, (prompt + steps,), generator=torch.Generator().manual_seed(3)).tolist()
    engines = [Engine(model, policy), Engine(model, policy, compile=True)]
    for engine in engines:
        engine.reset(prompt, steps)
        engine.extend(text[:prompt])
    for t in text[prompt:]:
        plain, compiled = (engine.decode([t]) for engine in engines)
        assert (plain - compiled).float().norm() < within * plain.float().norm()
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


@pytest.mark.parametrize("name", ["full", "window", "h2o"])
def test_a_compiled_step_over_several_runs_of_slots_is_the_step(name):
    policy = REGISTRY[name](**{} if name == "full" else {"budget": 2 * sweep.RUN + 5})
    side_by_side(policy, tiny(n_layers=2), prompt=2 * sweep.RUN, steps=20)


def test_a_compiled_step_that_chooses_what_to_read_is_the_step():
    side_by_side(small("quest"), tiny(n_layers=2))  # what it does with the queries decides how they are laid out


@pytest.mark.parametrize("form", ["bfloat16", "int8", "int4"])
def test_a_compiled_step_in_fewer_bits_is_the_step(form):
    model = tiny(n_layers=1, vocab_size=128, dim=64, ffn_dim=64, n_heads=4, n_kv_heads=2, head_dim=16, tied=form == "int8", qkv_bias=True)
    if form == "bfloat16":
        model.bfloat16()
    else:
        weights = dict(model.named_parameters())
        for place in coded_places(model):
            put(model, place, Codes.of(weights[place], bits_of(place, form)), form, torch.float32)
    side_by_side(small("window"), model, steps=20, within=5e-2)


def test_a_step_runs_on_one_thread_where_that_is_faster(monkeypatch):
    def slow_on(n):
        def attempt(self, memory):
            return 2.0 if self.threads == n else 1.0

        monkeypatch.setattr(Compiled, "_try", attempt)
        engine = Engine(tiny(n_layers=1), small("window"), compile=True)
        with threads(3):
            engine.reset(8, 8)
        return engine.threads

    before = torch.get_num_threads()
    assert slow_on(3) == 1 and slow_on(1) == 3
    assert torch.get_num_threads() == before
    with threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_a_compiled_engine_stores_its_models_matrices_row_by_row():
    model = tiny(n_layers=1, tied=True)
    for p in model.parameters():
        if p.dim() == 2:
            p.data = p.t().contiguous().t()
    before = {name: p.clone() for name, p in model.named_parameters()}
    Engine(model, small("window"), compile=True)
    assert all(p.is_contiguous() and torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("alone", [compiled.ALONE, False])
def test_memory_may_change_more_often_than_torch_compiles_one_function(monkeypatch, alone):
    monkeypatch.setattr(compiled, "ALONE", alone)
    engine = Engine(tiny(n_layers=1), REGISTRY["full"](), compile=True)
    with torch._dynamo.config.patch(recompile_limit=2):
        for prompt in (8, 9, 10, 11, 8):
            engine.reset(prompt, 8)
    engine.extend([5] * 8)
    assert engine.decode([3]).isfinite().all()


def test_compiled_engines_do_not_meet_each_others_graphs():
    model, text = tiny(n_layers=1), list(range(30))
    settings = [(small("window", 12), 8), (small("window", 16), 8), (REGISTRY["full"](), 8), (REGISTRY["full"](), 15)]
    engines = [[Engine(model, policy, compile=c) for policy, _ in settings] for c in (False, True)]
    for every in engines:
        for engine, (_, prompt) in zip(every, settings):
            engine.reset(prompt, 20)
            engine.extend(text[:prompt])
    for t in text[:15]:
        for plain, fast in zip(*engines):
            assert (plain.decode([t]) - fast.decode([t])).abs().max() < 1e-4
    for every in engines:  # and one engine, other memory
        every[2].reset(20, 10)
        every[2].extend(text[:20])
    assert (engines[0][2].decode([3]) - engines[1][2].decode([3])).abs().max() < 1e-4
    for every in engines:  # and memory as it was before
        every[2].reset(8, 20)
        every[2].extend(text[:8])
    assert (engines[0][2].decode([3]) - engines[1][2].decode([3])).abs().max() < 1e-4


def test_compiling_leaves_the_memory_empty():
    engine = Engine(tiny(n_layers=1), small("window"), compile=True)
    engine.reset(8, 8)
    assert engine.seen == 0 and engine.compile_s > 0
    assert all(not kv.live.any() and not kv.k.any() and kv.room == 12 for kv in engine.slots)


def test_what_cannot_be_compiled_is_told(monkeypatch):
    def fail(*_, **__):
        raise KeyError("no compiler\nand much more")

    engine = Engine(tiny(n_layers=1), small("window"), compile=True)
    monkeypatch.setattr(torch, "compile", lambda *_, **__: fail)
    with pytest.raises(RuntimeError, match="could not be compiled .*--compile"):
        engine.reset(8, 8)


@pytest.mark.slow
@pytest.mark.parametrize("between, calls", [(sweep.parted, 3), (lambda x: x, 1)])
def test_what_is_parted_is_another_function(between, calls):
    from torch._inductor.utils import run_and_get_cpp_code

    def layers(x, matrices):
        for w in matrices:
            x = between(sweep.product(x, w))
        return x

    x, matrices = torch.randn(16), list(torch.randn(3, 16, 16))
    want = layers(x, matrices)
    found, code = run_and_get_cpp_code(torch.compile(layers, fullgraph=True, dynamic=False, options=compiled.CPU), x, matrices)
    assert torch.allclose(found, want, atol=1e-4)
    assert len(re.findall(r"\bcpp_fused\w*\(\(", code)) == calls, "one function, called for every layer; or all layers in one"


@pytest.mark.slow
@pytest.mark.parametrize("name, dials", [*((name, {}) for name in sorted(REGISTRY)), *((n, m) for n, modes in MODES.items() for m in modes)])
def test_every_policy_compiles_to_one_full_graph(name, dials):
    policy = REGISTRY[name]() if name == "full" else small(name, **dials)
    side_by_side(policy, tiny(n_layers=2))
