"""The laws of KV memory, held by every registered policy; a new file in nanokv/policies is covered when it appears.

Where a policy scores, all four ways of splitting its budget over layers and heads are tried.
"""

import random
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import fields, forgets, small, tiny, variants
from oracle import Witness, causal, dense_logits
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import nanokv.engine
import nanokv.reading
from nanokv.engine import Engine
from nanokv.model import Transformer
from nanokv.policy import REGISTRY, Policy, victims
from nanokv.slots import EMPTY, Slots

VOCAB = 97
SETTINGS = 72  # of law 2, for each policy, or 24 over all its splits
every_policy = pytest.mark.parametrize("name, splits", variants())
Check = Callable[[Engine, bool], None]  # after each read: the engine, and whether it was a decode step


def converse(engine: Engine, rng: random.Random, check: Check | None = None) -> tuple[list[int], dict[int, Tensor]]:
    """Turns of random tokens, read whole or in chunks, and answered -> the text, and the logits heard at its positions."""
    text, heard = [], {}
    turns, by_generate = rng.randint(1, 3), rng.random() < 0.5

    def hear(logits: Tensor, decoded: bool) -> Tensor:
        if check:
            check(engine, decoded)
        heard[len(text) - 1] = logits
        text.append(rng.randrange(VOCAB))
        return torch.tensor(text[-1:])

    for turn in range(turns):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, rng.randint(3, 25))))]
        engine.chunk = rng.choice((None, None, 1, rng.randint(2, 9)))
        new, start = rng.randint(1, 11), len(text)
        text += prompt
        if by_generate:
            fresh = turn == 0 and (turns == 1 or forgets(engine.policy))
            for _ in engine.generate(prompt, new, lambda x: hear(x, len(text) > start + len(prompt)), fresh=fresh):
                pass
        else:
            token = hear(engine.extend(text[engine.seen :]), False)
            for _ in range(new):
                token = hear(engine.decode(token), True)
    return text[: engine.seen], heard


def random_setting(name: str, splits: dict, rng: random.Random) -> tuple[Transformer, Policy]:
    H, G = rng.choice(((1, 1), (2, 1), (3, 1), (2, 2), (1, 3), (3, 2), (2, 4)))
    shape = dict(n_layers=rng.randint(1, 3), n_heads=H * G, n_kv_heads=H, max_context=160)
    model = tiny(rng.randrange(4), **shape, qkv_bias=rng.random() < 0.3, qk_norm=rng.random() < 0.3)
    dials = dict(sink=rng.randint(0, 3), window=rng.randint(1, 4), interval=rng.choice((1, 1, 2, 4)))
    dials |= dict(recent=rng.randint(0, dials["window"]), page=rng.randint(1, 4))
    least = max(sum(dials[d] for d in ("sink", "window", "interval") if d in fields(name)), dials["page"])
    return model, small(name, least + rng.randint(2 if splits else 0, 9), **dials, **splits)


def generation(engine: Engine, prompt: list[int], new: int) -> Tensor:
    """The logits of a greedy generation [new, vocab]."""
    logits = []
    for _ in engine.generate(prompt, new, lambda x: (logits.append(x), x.argmax(-1, keepdim=True))[1]):
        pass
    return torch.stack(logits)


@every_policy
@pytest.mark.parametrize("length", (1, 2, 5, 40))
def test_1_a_budget_that_suffices_changes_nothing(name, splits, length):
    model, rng = tiny(max_context=160), random.Random(length)  # the budget: whole pages, for a policy that reads by pages
    text = [rng.randrange(VOCAB) for _ in range(length + 9)]
    engine = Engine(model, small(name, length + 12, **splits))
    engine.reset(length, 9)
    got = [engine.extend(text[:length])] + [engine.decode(torch.tensor([t])) for t in text[length:]]
    want = dense_logits(model, text, causal(3, 2, len(text)))[length - 1 :]
    assert (torch.stack(got) - want).abs().max() < 1e-5


@every_policy
def test_2_logits_are_those_of_a_dense_oracle(name, splits):
    for seed in range(6 if splits else SETTINGS):
        rng = random.Random(f"{name} {seed}")
        model, policy = random_setting(name, splits, rng)
        engine, positions = Engine(model, policy), getattr(policy, "positions", "text")
        with Witness(engine).watching() as witness:
            text, heard = converse(engine, rng)
        want = dense_logits(model, text, witness.mask(), positions)
        for p, logits in heard.items():
            assert (logits - want[p]).abs().max() < 1e-4, f"seed {seed}, {policy}: token {p} of {len(text)}"


def hold(engine: Engine, decoded: bool) -> None:
    """Laws 3 and 4 for the memory as it stands."""
    policy, seen, shape = engine.policy, engine.seen, engine.model.config
    H, pools = shape.n_kv_heads, [len(kv.k) for kv in engine.slots]
    if forgets(policy):
        assert sum(pools) == shape.n_layers * H * policy.budget, "the split over layers spends the budget, no more, no less"
    stored = sum(x.untyped_storage().nbytes() for kv in engine.slots for x in (kv.k, kv.v))
    assert stored == sum(kv.bytes for kv in engine.slots) == 2 * sum(pools) * shape.head_dim * engine.like.element_size()
    for kv, rows in zip(engine.slots, pools):
        assert sum(kv.shares) == rows and kv.shares == kv.caps.tolist(), "nor does the split over heads"
        for share, pos in zip(kv.shares, kv.pos.tolist()):
            live = sorted(p for p in pos if p != EMPTY)
            assert all(p == EMPTY for p in pos[share:]), "a slot beyond the head's share is used"
            assert len(live) == share - kv.room and len(live) == len(set(live)) and live[-1:] <= [seen - 1]
            if seen <= rows // H:
                assert live == list(range(seen)), "evicted before the slots were full"
            else:
                assert share - policy.interval + decoded <= len(live) <= share
            kept = set(live)
            assert kept.issuperset(range(min(policy.sink, seen))), "a sink is gone"
            assert kept.issuperset(range(max(seen - policy.recent - decoded, 0), seen)), "the window is broken"


@every_policy
def test_3_and_4_the_budget_is_hard_and_what_is_protected_stays(name, splits):
    for seed in range(4 if splits else 15):
        rng = random.Random(f"budget {name} {seed}")
        model, policy = random_setting(name, splits, rng)
        converse(Engine(model, policy), rng, hold)


def permuted(kv: Slots, seed: int) -> Slots:
    """The same memory with every head's slots in another order."""
    other = Slots.empty(len(kv.k) // len(kv.shares), len(kv.shares), kv.k.shape[1], kv.k, kv.width)
    other.share(kv.shares)
    other.state, other.freqs, other.scale, other.room = kv.state, kv.freqs, kv.scale, kv.room
    other.marks = {n: m.clone() for n, m in kv.marks.items()}
    other.now.copy_(kv.now)
    generator = torch.Generator().manual_seed(seed)
    for h, (share, base) in enumerate(zip(kv.shares, kv.base.tolist())):
        order = torch.randperm(share, generator=generator)
        other.pos[h, :share] = kv.pos[h, order]
        other.k[base : base + share], other.v[base : base + share] = kv.k[base + order], kv.v[base + order]
        for n, mark in other.marks.items():
            mark[h, :share] = kv.marks[n][h, order]
    return other


@every_policy
def test_5_a_score_looks_and_does_not_touch_and_slots_have_no_order(name, splits):
    policy = small(name, 12, **splits)
    if not forgets(policy):
        pytest.skip("it never evicts, so it does not score")
    engine, rng = Engine(tiny(), policy), random.Random(5)
    for _ in engine.generate([rng.randrange(VOCAB) for _ in range(30)], 9):
        pass
    before = [[x.clone() for x in tensors(kv)] for kv in engine.slots]
    for kv, was in zip(engine.slots, before):
        score = policy.score(kv)
        assert score.shape == kv.pos.shape and score[kv.live].isfinite().all()
        assert all(torch.equal(a, b) for a, b in zip(tensors(kv), was)), "score changed its argument"
    for n in (1, 2, 4):
        mine = gone(policy, engine.slots, n)
        for seed in range(4):
            assert gone(policy, [permuted(kv, seed) for kv in engine.slots], n) == mine


def tensors(kv: Slots) -> list[Tensor]:
    return [kv.k, kv.v, kv.pos, kv.now, kv.caps, *kv.marks.values(), *kv.state.values()]


def gone(policy: Policy, layers: list[Slots], n: int) -> list:
    return [kv.pos.gather(1, v).sort(1).values.tolist() for kv, v in zip(layers, victims(policy, layers, n))]


INTERRUPTIBLE = (
    (nanokv.engine, ("attend_slots", "watch_slots", "victims")),
    (nanokv.reading, ("attend_prompt", "select")),
    (Slots, ("beside", "append", "fill", "write", "evict")),
)


@every_policy
def test_6_nothing_leaks_into_the_next_generation(name, splits):
    model, rng = tiny(n_layers=2), random.Random(6)
    policy = small(name, 12, **splits)
    a, b = [rng.randrange(VOCAB) for _ in range(20)], [rng.randrange(VOCAB) for _ in range(15)]
    want = generation(Engine(model, policy), a, 6)
    engine = Engine(model, policy)
    generation(engine, b, 11)  # as many tokens in all as `want`: the same memory is used again
    assert torch.equal(generation(engine, a, 6), want)
    hit = 0
    for place, function in ((place, f) for place, functions in INTERRUPTIBLE for f in functions):
        error, calls = rng.choice((RuntimeError, KeyboardInterrupt)), rng.randint(1, 3)
        hit += interrupted(engine, b, place, function, calls, error)
        assert torch.equal(generation(engine, a, 6), want), f"after {error.__name__} in {function}"
    assert hit >= 3


def interrupted(engine: Engine, prompt: list[int], place: object, function: str, calls: int, error: type) -> bool:
    """Did a generation end in `error`, raised by the calls-th call of a function?"""
    original, left = getattr(place, function), iter(range(calls))

    def fail(*args, **options):
        if next(left, None) is None:
            raise error
        return original(*args, **options)

    with mock.patch.object(place, function, fail):
        try:
            generation(engine, prompt, 11)
        except error:
            return True
    return False


def poison(engine: Engine, decoded: bool) -> None:
    """1e4 wherever no token lives: K, V and marks. (A NaN would spread through 0 x NaN.)"""
    for kv in engine.slots:
        for h, (share, base) in enumerate(zip(kv.shares, kv.base.tolist())):
            dead = ~kv.live[h]
            for pool in (kv.k, kv.v):
                pool[base : base + share][dead[:share]] = 1e4
            for mark in kv.marks.values():
                mark[h, dead] = torch.full((), 100).to(mark.dtype)


@every_policy
def test_7_what_stands_in_unused_slots_never_matters(name, splits):
    for seed in range(2 if splits else 8):
        runs = []
        for check in (None, poison):
            rng = random.Random(f"poison {name} {seed}")
            model, policy = random_setting(name, splits, rng)
            runs.append(converse(Engine(model, policy), rng, check)[1])
        assert runs[0].keys() == runs[1].keys()
        for p, logits in runs[0].items():
            assert (logits - runs[1][p]).abs().max() < 1e-5, f"seed {seed}, {policy}: token {p}"


@pytest.mark.parametrize("name, splits", [
    pytest.param(*v.values, id=v.id, marks=[pytest.mark.slow] * v.id.endswith(("uniform-adaptive", "pyramid-uniform")))
    for v in variants()
])  # fmt: skip
def test_8_decode_is_at_most_two_graphs(name, splits):
    torch._dynamo.reset()
    model, policy, counter, rng = tiny(n_layers=2 if splits.get("layers") == "pyramid" else 1), small(name, 12, **splits), CompileCounter(), random.Random(8)
    plain, engine = Engine(model, policy), Engine(model, policy)
    engine._step = torch.compile(engine._forward, fullgraph=True, backend=counter)
    for length in (3, 12, 30):
        prompt = [rng.randrange(VOCAB) for _ in range(length)]
        assert (generation(engine, prompt, 4) - generation(plain, prompt, 4)).abs().max() < 1e-5
    assert 1 <= counter.frame_count <= 2, f"{counter.frame_count} graphs"


def test_every_policy_is_here():
    """A registered name is the name of its file, and every file registers one."""
    files = {p.stem for p in (Path(nanokv.__file__).parent / "policies").glob("[!_]*.py")}
    assert files == set(REGISTRY)
