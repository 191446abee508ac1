"""The needle bench: its prompts, engines that read together, cells that fail alone, and (slow) the oracle's kept sets."""

import json
from itertools import islice
from random import Random

import pytest
import torch
from conftest import REGISTRY, small, tiny, variants

from nanokv import make
from nanokv.bench import needle
from nanokv.bench._haystack import HIDDEN, KINDS, prompts, sentences
from nanokv.bench._together import answer, apart, read_together
from nanokv.engine import Engine


class Words:
    """A tokenizer whose tokens are words; ids beyond `size` wrap around."""

    chat_template, eos_ids = None, frozenset()

    def __init__(self, size: int = 10**9):
        self.size, self.words = size, []

    def encode(self, text: str, bos: bool = True) -> list[int]:
        for word in text.split():
            if word not in self.words:
                self.words.append(word)
        return [self.words.index(word) % self.size for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(self.words[i] for i in ids)


def texts(kind: str = "prose", n: int = 6, lengths: tuple = (300, 500), **options) -> list[tuple]:
    words = Words()
    return [(p, words.decode(p.tokens)) for p in prompts(words, n, lengths, kind, **options)]


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_as_long_as_asked_and_hold_what_is_asked_for(kind):
    made = texts(kind)
    assert [p.length for p, _ in made] == [300] * 3 + [500] * 3
    for p, text in made:
        assert abs(len(p.tokens) - p.length) <= 20
        body, _, ending = text.rpartition("Wh")  # What, or Which: the question is last, but for the answer's beginning
        assert "?" in ending and ending.split()[-1] in ("is", "are")
        assert all(e in body for e in p.expected) and not p.found(ending) and p.found(" ".join(p.expected))
        for missing in p.expected:
            assert not p.found(" ".join({*p.expected} - {missing}))
    assert len({tuple(p.tokens) for p, _ in made}) == len(made)


def test_a_seed_is_a_set_of_prompts():
    first, again, other = (texts(seed=s) for s in (3, 3, 4))
    assert first == again and all(a != b for (_, a), (_, b) in zip(first, other))


def test_keys_stand_where_depth_says_and_every_depth_has_its_turn():
    made = texts(n=20, lengths=(900,))
    assert [int(p.depth * 20) for p, _ in made] == list(range(20))
    for p, text in made:
        body = text[: text.rindex("What")]
        assert body.count(p.expected[0]) == 1
        assert body.index(p.expected[0]) / len(body) == pytest.approx(p.depth, abs=0.05)


def test_prose_repeats_no_sentence_and_repeated_does():
    assert len(set(islice(sentences(Random(0)), 5000))) == 5000
    assert len(set(islice(sentences(Random(0), varied=False), 50))) == 5
    for kind, repeats in (("prose", False), ("repeated", True)):
        for _, text in texts(kind):
            said = text[: text.index("What")].split(". ")
            assert (len(set(said)) < len(said)) == repeats


def test_distractors_name_other_places_and_chains_are_in_order():
    for p, text in texts("multi-key"):
        codes = {s.split()[0]: s.split()[2].strip(".") for s in text.split("code of the ")[1:-2]}
        asked = text.split("code of the ")[-1].split()[0]
        assert len(codes) == 4 and codes[asked] == p.expected[0] and {*codes} <= {*HIDDEN}
    for p, text in texts("variables"):
        first, second, third = (text.index(f"Variable {name} is set to") for name in p.expected)
        assert first < second < third


def test_a_question_before_the_text_is_not_repeated_behind_it():
    for p, text in texts(question="before"):
        assert text.startswith("What is the secret code of the") and text.count("?") - text.count("Answer:") == 0
        assert text.endswith("Answer:")


@pytest.mark.parametrize("options, words", ((dict(kind="hay"), "hay"), (dict(question="never"), "never"), (dict(lengths=(9,)), "9 tokens")))
def test_what_cannot_be_asked_is_said(options, words):
    with pytest.raises(ValueError, match=words):
        texts(**options)


# ---- reading together ----


@pytest.mark.parametrize("n", (9, 40, 150))
def test_engines_that_read_together_hold_what_each_would_have_read_alone(n):
    model, tokens = tiny(), torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    policies = [small(*v.values[:1], **v.values[1]) for v in variants()] + [small(name, 20) for name in sorted(REGISTRY)]
    together, alone = ([Engine(model, p) for p in policies if not p.shared] for _ in range(2))
    for engine in together + alone:
        engine.reset(n, 8)
    logits = read_together(together, tokens)
    for a, b in zip(together, alone):
        own = b.extend(tokens)
        assert torch.allclose(logits, own, atol=1e-5)
        for x, y in zip(a.slots, b.slots):
            assert torch.equal(x.pos, y.pos) and x.shares == y.shares, a.policy
            assert torch.allclose(x.k, y.k, atol=1e-5) and x.room == y.room and int(x.now) == n
        assert answer(a, logits, 6, ()) == answer(b, own, 6, ()), a.policy
        assert torch.allclose(a.extend([1, 2]), b.extend([1, 2]), atol=1e-5), "and the next turn goes on"


def test_answers_end():
    engine = Engine(tiny(), make("full"))
    engine.reset(5, 9)
    logits = engine.extend(range(5))
    first = int(logits.argmax())
    assert answer(engine, logits, 9, {first}) == [first] and engine.seen == 5
    assert len(answer(engine, logits, 9, ())) == 9


# ---- cells ----


def measured(policies: str, budgets: tuple, **dials) -> dict:
    """Counts of a random model on two prompts of about 100 tokens."""
    words = Words(97)
    every = list(needle.cells(tiny(), policies.split(","), budgets, dials))
    for prompt in prompts(words, 2, (100,)):
        needle.ask(every, prompt, words)
    return {(c.policy, c.budget): c for c in every}


def test_a_policy_that_cannot_is_reported_in_its_cell_and_ends_nothing():
    cells = measured("full,snapkv,triattention,window", (16, 64), snapkv={"window": 32})
    assert len(cells[("full", None)].hits) == 2 and len(cells[("window", 16)].hits) == 2
    assert "16 slots cannot hold" in cells[("snapkv", 16)].failed and cells[("snapkv", 16)].row["found"] is None
    assert cells[("snapkv", 64)].row == {"policy": "snapkv", "budget": 64, "found": 0, "hits": "00"}


def test_a_policy_that_fails_while_it_works_is_out_too():
    cells = measured("full,triattention", (16, 64), triattention={"stats": "nowhere.safetensors"})
    assert all("nowhere" in cells[("triattention", b)].failed for b in (16, 64))
    assert len(cells[("full", None)].hits) == 2


def test_layers_that_share_their_tokens_read_alone():
    cell = measured("triattention", (32,), triattention={"scope": "model"})[("triattention", 32)]
    assert len(cell.hits) == 2 and apart(cell.engine, 33)
    assert len({kv.pos.sort().values.numpy().tobytes() for kv in cell.engine.slots}) == 1
    assert not apart(measured("window", (32,))[("window", 32)].engine, 33)


def test_the_command_line(monkeypatch, capsys):
    words = Words(97)
    monkeypatch.setattr(needle, "load", lambda name, dtype: (tiny(), words))
    needle.main("--budgets 8,32 --prompts 3 --lengths 60,100 --policies full,window,snapkv --set snapkv.pooling=avg --set snapkv.window=9".split())
    lines = capsys.readouterr().out.splitlines()
    got = json.loads(lines[-1])
    assert got["bench"] == "needle" and [(r["policy"], r["budget"]) for r in got["rows"]] == [
        ("full", None), ("window", 8), ("window", 32), ("snapkv", 8), ("snapkv", 32)]
    assert [len(r["hits"]) for r in got["rows"]] == [3, 3, 3, 0, 3] and "cannot hold" in got["rows"][3]["failed"]
    assert any(line.split() == ["snapkv", "-", "0"] for line in lines) and any(line.split() == ["full", "0", "0"] for line in lines)
    for wrong in ("--policies windows", "--set windows.sink=1", "--budgets 12,x", "--budgets 0", "--prompts 0"):
        with pytest.raises(ValueError):
            needle.main(wrong.split())


@pytest.mark.slow
def test_kept_sets_and_answers_are_those_of_the_oracle(smollm2):
    """Every policy on the real model: what it keeps of two prompts is, but for near-ties, what the papers' formulas keep."""
    from needle_oracle import METHODS, Oracle

    from nanokv import load

    model, tokenizer = load(str(smollm2), "float32", "cpu")
    every = list(needle.cells(model, list(METHODS), (96, 256), {}))
    oracle, names = Oracle(smollm2), [(c.policy, c.budget or 96) for c in every]
    for prompt in prompts(tokenizer, 2, (500, 700)):
        needle_logits = oracle.read(prompt.tokens, names)
        theirs = oracle.answers(needle_logits, prompt.max_new, tokenizer.eos_ids)
        for cell in every:
            cell.engine.reset(len(prompt.tokens), prompt.max_new)
        logits = read_together([c.engine for c in every], prompt.tokens)
        assert torch.allclose(logits, needle_logits, atol=1e-2)
        for i, (cell, name) in enumerate(zip(every, names)):
            shared = total = 0
            for kv, kept in zip(cell.engine.slots, oracle.kept):
                held = torch.zeros(kept.shape[1], len(prompt.tokens) + 1, dtype=torch.bool)
                held.scatter_(1, kv.pos.long().masked_fill(kv.pos < 0, len(prompt.tokens)), True)
                held = held[:, :-1]
                assert held.sum() == kept[i].sum(), name
                shared, total = shared + int((held & torch.from_numpy(kept[i])).sum()), total + int(held.sum())
            assert shared >= 0.995 * total, (name, shared / total)
            mine = answer(cell.engine, logits, prompt.max_new, tokenizer.eos_ids)
            cell.hits += str(int(prompt.found(tokenizer.decode(mine)) == prompt.found(tokenizer.decode(theirs[i]))))
    assert sum(c.hits != "11" for c in every) <= 2, [c.row for c in every]
