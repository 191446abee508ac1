"""Bytes: the formula against figures that the field quotes, and the plan against what torch really allocates."""

import gc
import weakref

import pytest
import torch
from conftest import small, tiny, variants
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanokv import processor
from nanokv.engine import Engine
from nanokv.memory import ITEMSIZE, bookkeeping_bytes, kv_bytes, plan_prefill, pool_bytes, remade
from nanokv.model import ModelConfig
from nanokv.policy import make
from nanokv.quantize import Codes, bits_of, coded_places, put
from nanokv.slots import Slots

GIB = 2**30


class Allocations(TorchDispatchMode):
    """Bytes of all storages that come to life in here: now, and at most. Knows nothing of who asked for them."""

    def __init__(self, *known: torch.Tensor):
        super().__init__()
        self.now = self.peak = 0
        self._seen = {t.untyped_storage()._cdata: None for t in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._seen:
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                self._seen[key] = weakref.ref(storage, lambda _, key=key, size=size: self._gone(key, size))
                self.now += size
                self.peak = max(self.peak, self.now)
        return out

    def _gone(self, key: int, size: int) -> None:
        self.now -= size
        del self._seen[key]


def shape(layers: int, heads: int, kv_heads: int) -> ModelConfig:
    return ModelConfig(32000, 128 * heads, layers, heads, kv_heads, 128, 11008)


@pytest.mark.parametrize(
    "c, tokens, itemsize, expected",
    [
        (shape(32, 32, 32), 1, 2, 0.5 * 2**20),  # Llama-2-7B: half a MiB a token
        (shape(32, 32, 32), 8192, 2, 4 * GIB),
        (shape(32, 32, 32), 32768, 2, 16 * GIB),
        (shape(40, 40, 40), 8192, 2, 6.25 * GIB),  # Llama-2-13B
        (shape(32, 32, 8), 8192, 2, 1 * GIB),  # Llama-3-8B: grouped queries
        (shape(32, 32, 8), 8192, 4, 2 * GIB),
    ],
)
def test_the_formula_gives_the_figures_people_quote(c, tokens, itemsize, expected):
    assert kv_bytes(c, tokens, itemsize) == expected


def pools_of(engine):
    """References to the engine's pools that do not keep them."""
    return [weakref.ref(x.untyped_storage()) for kv in engine.slots for x in (kv.k, kv.v)]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name, splits", variants())
def test_an_engine_that_is_dropped_gives_its_memory_back_at_once(name, splits, compiled):
    """Not when Python next looks for cycles: who opens a second engine would hold two memories till then."""
    gc.collect()
    gc.disable()
    try:
        engine = Engine(tiny(n_layers=1 if compiled else 3), small(name, 12, **splits), chunk=8, compile=compiled)
        for _ in engine.generate(range(30), 4):
            pass
        pools = pools_of(engine)
        assert all(pool() is not None for pool in pools)
        del engine, _
        assert all(pool() is None for pool in pools)
    finally:
        gc.enable()


def test_the_old_memory_goes_before_a_compiled_engine_takes_another(monkeypatch):
    engine = Engine(tiny(n_layers=1), make("full"), compile=True)
    engine.reset(8, 8)
    pools, empty = pools_of(engine), Slots.empty
    monkeypatch.setattr(Slots, "empty", lambda *a, **k: (gone.append([pool() for pool in pools]), empty(*a, **k))[1])
    gone = []
    engine.reset(9, 9)
    assert gone == [[None, None]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name, splits", variants())
def test_what_stands_is_what_was_counted(name, splits, dtype):
    model = tiny()
    budget = {} if name == "full" else {"budget": 64}
    policy = make(name, **budget, **splits)
    engine = Engine(model, policy, kv_dtype=str(dtype).removeprefix("torch."))
    engine.reset(100, 20)
    c, rows = model.config, policy.plan(model.config.n_layers, 100, 20)
    pools = [x for kv in engine.slots for x in (kv.k, kv.v)]
    assert pool_bytes(c, rows, dtype.itemsize) == sum(x.untyped_storage().nbytes() for x in pools)
    beside = {
        id(x): x.untyped_storage().nbytes()
        for kv in engine.slots
        for x in [*vars(kv).values(), *kv.marks.values(), *kv.state.values()]
        if isinstance(x, torch.Tensor) and x is not kv.freqs and not any(x is pool for pool in pools)
    }
    counted, real = bookkeeping_bytes(c, policy, rows, dtype.itemsize), sum(beside.values())
    assert counted == real


@pytest.mark.parametrize("features", [{"avx512_bf16"}, set()])
@pytest.mark.parametrize("form, dtype", [("native", "bfloat16"), ("int8", "bfloat16"), ("int4", "bfloat16"), ("int8", "float32"), ("int4", "float32")])
def test_matrices_made_for_a_long_text_are_planned(form, dtype, features, monkeypatch):
    monkeypatch.setattr(processor, "features", lambda: features)
    model = tiny(dim=256, n_heads=2, n_kv_heads=1, head_dim=32, ffn_dim=2048).to(getattr(torch, dtype))
    if form != "native":
        for place in coded_places(model):
            put(model, place, Codes.of(model.get_parameter(place), bits_of(place, form)), form, model.like.dtype)
    policy, prompt = make("streaming_llm", budget=64), [5] * 200
    next(Engine(model, policy).generate(prompt, 8))  # in what order int4 codes are packed is found out once
    engine = Engine(model, policy)
    with Allocations(engine.freqs, *model.parameters(), *model.buffers()) as memory:
        next(engine.generate(prompt, 8))
    made = remade(form, dtype)
    assert made.weight == (4 if dtype == "float32" or not features else 0 if form == "native" else 2)
    planned = plan_prefill(model.config, policy, len(prompt), 8, None, ITEMSIZE[dtype], made=made)
    assert 0.95 < planned.peak / memory.peak < 1.05


@pytest.mark.parametrize("chunk", [None, 300])
@pytest.mark.parametrize("dtype, kv", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("name, dials", [("full", {}), ("window", {"budget": 256}), ("streaming_llm", {"budget": 256}), ("snapkv", {"budget": 256}), ("h2o", {"budget": 256})])
def test_the_peak_of_a_prompt_is_the_planned_one(name, dials, dtype, kv, chunk):
    model = tiny(dim=192, n_heads=6, n_kv_heads=2, head_dim=32, ffn_dim=512).to(getattr(torch, dtype))
    policy, prompt = make(name, **dials), [5] * 1500
    engine = Engine(model, policy, chunk, kv_dtype=kv)
    with Allocations(engine.freqs, *model.parameters()) as memory:
        next(engine.generate(prompt, 8))
    planned = plan_prefill(model.config, policy, len(prompt), 8, chunk, ITEMSIZE[dtype], ITEMSIZE[kv], remade("native", dtype))
    assert 0.95 < planned.peak / memory.peak < 1.05
    assert planned.pools + planned.bookkeeping <= memory.now < 1.02 * (planned.pools + planned.bookkeeping)


def test_chunks_bound_the_scratch_whatever_the_length():
    c, policy = tiny().config, make("window", budget=256)
    plans = [plan_prefill(c, policy, n, 8, 128, 4).peak for n in (1000, 10_000, 1_000_000)]
    assert max(plans) < 1.05 * min(plans)  # pieces are of equal size: a few tokens more or less
    assert plan_prefill(c, policy, 10_000, 8, None, 4).peak > 5 * plans[0]


@pytest.mark.slow
@pytest.mark.parametrize("name, splits", variants())
def test_the_pools_are_the_plan_before_and_after_2000_tokens(name, splits):
    model = tiny(n_layers=2)
    policy = make(name, **({} if name == "full" else {"budget": 256}), **splits)
    engine = Engine(model, policy)
    tokens = torch.randint(0, 97, (2000,)).tolist()
    engine.reset(1000, 1000)
    promised = pool_bytes(model.config, policy.plan(2, 1000, 1000), 4)
    storages = [{x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for kv in engine.slots for x in (kv.k, kv.v)}]
    engine.extend(tokens[:1000])
    for token in tokens[1000:]:
        engine.decode(torch.tensor([token]))
    storages.append({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for kv in engine.slots for x in (kv.k, kv.v)})
    assert storages[0] == storages[1] and sum(storages[0].values()) == promised
    assert engine.seen == 2000
