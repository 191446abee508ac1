"""Reading, decoding, turns and generation; what the slots hold meanwhile is the business of test_laws.py."""

import random

import pytest
import torch
from conftest import REGISTRY, fields, small, tiny
from oracle import Witness, causal, dense_logits

from nanokv.engine import Engine
from nanokv.policy import make

VOCAB = 97


def tokens(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=n)


def read(engine: Engine, text: list[int], prompt: int) -> torch.Tensor:
    """Logits after the prompt and after every later token [1 + later, vocab]."""
    return torch.stack([engine.extend(text[:prompt])] + [engine.decode(torch.tensor([t])) for t in text[prompt:]])


@pytest.mark.parametrize("policy", (make("window", budget=9), make("streaming_llm", budget=9, sink=3),
                                    make("streaming_llm", budget=9, sink=3, interval=4), make("window", budget=9, interval=2)))
def test_with_one_layer_forgetting_is_never_having_read(policy):
    """K and V of a first layer do not depend on what came before: only the tokens still held, and where they stand, matter."""
    model, text, engine = tiny(n_layers=1), tokens(40), Engine(tiny(n_layers=1), policy)
    logits = read(engine, text[:25], 25)
    for t in range(25, 40):
        logits = engine.decode(torch.tensor([text[t]]))
        held = sorted(p for p in engine.slots[0].pos[0].tolist() if p >= 0)
        assert held == [*range(policy.sink), *range(t + 1 - (len(held) - policy.sink), t + 1)]
        suffix = [text[p] for p in held]  # streaming_llm counts inside the cache: the suffix is a text of its own
        want = dense_logits(model, suffix, causal(1, 2, len(suffix)))[-1]
        assert (logits - want).abs().max() < 1e-5


@pytest.mark.parametrize("sink, budget", ((0, 7), (2, 7), (3, 4), (0, 1)))
def test_the_ring_appears(sink, budget):
    """Token t stands where a ring behind the sinks would write it, up to a rotation."""
    engine, ring = Engine(tiny(n_layers=1), make("window", budget=budget, sink=sink)), budget - sink
    for prompt in (1, sink + 1, budget - 1, budget, budget + 1, 3 * budget):
        if prompt < 1:
            continue
        engine.reset(prompt, 5 * budget)
        text, rotations = tokens(5 * budget, prompt), set()
        engine.extend(text[:prompt])
        for t in range(prompt, 5 * budget):
            engine.decode(torch.tensor([text[t]]))
            for pos in engine.slots[0].pos.tolist():
                assert pos[:sink] == [p if p <= t else -1 for p in range(sink)]
                behind = [(slot, p - sink) for slot, p in enumerate(pos[sink:]) if p >= 0]
                assert len(behind) == min(max(t + 1 - sink, 0), ring)
                if t >= budget:
                    (turn,) = {(slot - p) % ring for slot, p in behind}
                    rotations.add(turn)
        assert len(rotations) == 1, "and the rotation never changes"


@pytest.mark.parametrize("name", sorted(REGISTRY))
@pytest.mark.parametrize("beyond", (-1, 0, 1))
def test_prompts_that_just_fit_and_just_do_not(name, beyond):
    policy = small(name, 12, layers="uniform")
    engine, length = Engine(tiny(), policy), 12 + beyond
    text = tokens(length + 5)
    with Witness(engine).watching() as witness:
        engine.reset(length, 5)
        got = read(engine, text, length)
        if beyond <= 0 or "budget" not in fields(name):
            assert witness.mask()[:, :, :12, :12].equal(causal(3, 2, 12)), "what fits is kept whole"
    want = dense_logits(engine.model, text, witness.mask(), getattr(policy, "positions", "text"))
    assert (got - want[length - 1 :]).abs().max() < 1e-4


def test_positions_far_beyond_the_trained_context_are_as_exact_as_the_first():
    """Only distances matter: a text read from position 4,000,000 on has the logits of one read from 0."""
    text, model = tokens(30), tiny(max_context=16)
    for name in ("window", "h2o"):
        near, far = Engine(model, small(name, 12, sink=0)), Engine(model, small(name, 12, sink=0))
        far.reset(20, 10)
        for kv in far.slots:
            kv.now.fill_(4_000_000)
        assert (read(near, text, 20) - read(far, text, 20)).abs().max() < 1e-4
        assert (far.slots[0].pos - 4_000_000 == near.slots[0].pos).all()


def test_chunks_of_any_size_are_the_whole_while_everything_fits():
    text, model = tokens(24), tiny()
    whole = read(Engine(model, small("window", 40)), text, 20)
    for chunk in (1, 2, 7, 19, 20, 99):
        assert (read(Engine(model, small("window", 40), chunk=chunk), text, 20) - whole).abs().max() < 1e-5


def test_several_tokens_decode_as_one_by_one():
    text, model = tokens(40), tiny()
    for name in ("window", "streaming_llm"):
        engines = [Engine(model, small(name, 12, interval=3)) for _ in range(2)]
        for engine in engines:
            engine.extend(text[:16])
        for a in range(16, 40, 3):
            for t in text[a : a + 3]:
                one = engines[0].decode(torch.tensor([t]))
            many = engines[1].decode(torch.tensor(text[a : a + 3]))
            assert (one - many).abs().max() < 1e-5
            assert all(torch.equal(x.pos, y.pos) for x, y in zip(engines[0].slots, engines[1].slots))


def test_the_first_overflow_divides_the_heads_wherever_it_happens():
    """In the prompt, in a later chunk, or while decoding: with heads=adaptive the shares follow need from then on."""
    adaptive = [n for n in sorted(REGISTRY) if "heads" in fields(n)]
    for name in adaptive:
        for prompt, chunk in ((30, None), (30, 7), (6, None)):
            engine = Engine(tiny(), small(name, 16, layers="uniform", heads="adaptive", sink=1, window=2, floor_ratio=0.0), chunk)
            engine.extend(tokens(prompt))
            for t in tokens(20, 1):
                engine.decode(torch.tensor([t]))
            assert all(sum(kv.shares) == 32 for kv in engine.slots)
            assert all(kv.allotted for kv in engine.slots), f"{name}, a prompt of {prompt}, chunk {chunk}"
            if prompt > 16 or name == "h2o":  # while decoding, snapkv has too few votes to prefer a head
                assert any(kv.shares != [16, 16] for kv in engine.slots), f"{name}, a prompt of {prompt}, chunk {chunk}"


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_keys_and_values_may_be_shorter_than_the_rest(name):
    """float32 all through, with bfloat16 slots: near the float32 answer, and not equal to it."""
    model, text = tiny(), tokens(40)
    policy = REGISTRY[name]() if name == "full" else small(name, 64)
    plain, short = (read(Engine(model, policy, kv_dtype=d), text, 20) for d in ("auto", "bfloat16"))
    assert short.dtype == torch.float32 and 0 < (short - plain).norm() < 0.02 * plain.norm()


def test_an_unknown_kv_dtype_is_named():
    with pytest.raises(ValueError, match="kv_dtype must be auto, .* not 'int8'"):
        Engine(tiny(), small("window"), kv_dtype="int8")


# ---- generation ----


def test_a_generation_is_greedy_stops_and_counts():
    engine = Engine(tiny(), small("full"))
    ids = list(engine.generate(tokens(9), 12))
    assert len(ids) == 12 and engine.stats.finish_reason == "length"
    text = tokens(9) + ids
    want = dense_logits(engine.model, text, causal(3, 2, len(text)))
    assert ids == want[8:-1].argmax(-1).tolist()
    stop = next(t for i, t in enumerate(ids) if i >= 3)
    first = ids.index(stop)
    assert list(engine.generate(tokens(9), 12, stop={stop})) == ids[: first + 1]
    stats = engine.stats
    assert (stats.prompt_tokens, stats.new_tokens, stats.finish_reason) == (9, first + 1, "stop")
    assert stats.prefill_s > 0 and (stats.decode_s > 0) == (first > 0)


def test_a_turn_goes_on_where_the_last_one_ended():
    """The last token of an answer is read at the start of the next turn, also when the listener left early."""
    model, first, second = tiny(max_context=200), tokens(9), tokens(6, 1)
    for listened in (1, 5, 12):
        engine = Engine(model, small("full"))
        answer = []
        for token in engine.generate(first, 12, fresh=False):
            answer.append(token)
            if len(answer) == listened:
                break
        more = list(engine.generate(second, 5, fresh=False))
        text = first + answer + second + more
        want = dense_logits(model, text, causal(3, 2, len(text))).argmax(-1).tolist()
        assert more == want[len(text) - len(more) - 1 : -1]
        assert engine.seen == len(text) - 1


def test_memory_is_taken_once():
    engine = Engine(tiny(), small("window", 12))
    list(engine.generate(tokens(30), 9))
    before = [kv.k.data_ptr() for kv in engine.slots]
    list(engine.generate(tokens(5), 20))
    assert [kv.k.data_ptr() for kv in engine.slots] == before


def test_a_full_cache_ends_with_a_sentence():
    engine = Engine(tiny(max_context=20), small("full"))
    with pytest.raises(ValueError, match="used up"):
        for token in engine.generate(tokens(15), 99, fresh=False):
            pass
    with pytest.raises(ValueError, match="used up"):
        engine.reset(4, 2)
        engine.extend(tokens(7))


@pytest.mark.parametrize(
    "ask, said",
    (
        (lambda e: e.extend([]), "no token to read"),
        (lambda e: list(e.generate([], 3)), "no token to read"),
        (lambda e: list(e.generate([1], 0)), "at least 1 new token"),
        (lambda e: list(e.generate([1], 1.5)), "a whole number of them, not 1.5"),
        (lambda e: list(e.generate([1], 3, stop=5)), "stop must be a collection of token ids, not 5"),
        (lambda e: e.extend([1, 97]), "tokens are 0 to 96: there is no token 97"),
        (lambda e: e.extend([-1, 1]), "there is no token -1"),
        (lambda e: e.extend([[1, 2], [3, 4]]), r"one sequence of ids, not a tensor of shape \[2, 2\]"),
        (lambda e: e.decode([1]), "after a text was read"),
        (lambda e: Engine(e.model, e.policy, chunk=0), "a chunk must hold at least 1 token, not 0"),
    ),
)
def test_a_users_mistake_is_told(ask, said):
    with pytest.raises(ValueError, match=said):
        ask(Engine(tiny(), small("window")))


def test_a_token_that_there_is_not_loses_nothing():
    engine, text = Engine(tiny(), small("window", 40)), tokens(9)
    engine.extend(text)
    for read in (engine.extend, lambda ids: next(engine.generate(ids))):
        with pytest.raises(ValueError, match="no token 97"):
            read([3, 97])
    want = dense_logits(engine.model, [*text, 3], causal(3, 2, 10))[-1]
    assert (engine.decode([3]) - want).abs().max() < 1e-5


def test_a_generation_ends_where_the_next_one_begins():
    engine = Engine(tiny(), small("window", 40))
    first, second = engine.generate(tokens(9), 12), engine.generate(tokens(6, 1), 12)
    next(first)
    answer = [next(second)]
    with pytest.raises(RuntimeError, match="another one has begun"):
        next(first)
    assert [*answer, *second] == list(Engine(engine.model, engine.policy).generate(tokens(6, 1), 12))


def test_after_an_interrupted_step_no_turn_goes_on_as_if_nothing_had_happened():
    """A step cut short leaves layers that saw different tokens: going on is refused, or exact; never wrong."""
    model, first, second = tiny(max_context=200), tokens(9), tokens(6, 1)
    engine, calls = Engine(model, small("window", 40)), iter(range(7))
    original = engine.policy.read

    def read_or_fail(kv, q):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return original(kv, q)

    object.__setattr__(engine.policy, "read", read_or_fail)
    answer = []
    with pytest.raises(KeyboardInterrupt):
        for token in engine.generate(first, 12, fresh=False):
            answer.append(token)
    calls = iter(range(10**6))
    try:
        more = list(engine.generate(second, 5, fresh=False))
    except ValueError:
        return
    text = first + answer + second + more
    want = dense_logits(model, text, causal(3, 2, len(text))).argmax(-1).tolist()
    assert more == want[len(text) - len(more) - 1 : -1]
