"""The needle bench: its prompts, engines that read together, cells that fail alone, and (slow) the oracle's kept sets."""

import json
import math
from argparse import Namespace
from itertools import islice
from random import Random

import pytest
import torch
from conftest import REGISTRY, small, tiny, variants

from nanokv import make
from nanokv.bench import _cells, _policies, needle
from nanokv.bench.__main__ import main
from nanokv.bench._cells import ask, cells
from nanokv.bench._haystack import HIDDEN, KINDS, prompts, sentences
from nanokv.bench._output import Finished
from nanokv.bench._together import answer, apart, read_together
from nanokv.engine import Engine
from nanokv.policies.window import Window


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
    """Rows of a random model on two prompts of about 100 tokens."""
    words = Words(97)
    every, asked = list(cells(tiny(), policies.split(","), budgets, dials)), prompts(words, 2, (100,))
    ask(every, asked, words, Finished("needle", Namespace(resume=None)))
    return {(c.policy, c.budget): needle.row(c, asked) for c in every}


def test_a_policy_that_cannot_is_reported_in_its_cell_and_ends_nothing():
    rows = measured("full,snapkv,triattention,window", (16, 64), snapkv={"window": 32})
    assert len(rows[("full", None)]["hits"]) == 2 and len(rows[("window", 16)]["hits"]) == 2
    assert "16 slots cannot hold" in rows[("snapkv", 16)]["failed"] and rows[("snapkv", 16)]["found"] is None
    one = rows[("snapkv", 64)]
    assert (one["policy"], one["budget"], one["found"], one["hits"]) == ("snapkv", 64, 0, "00") and "failed" not in one
    assert one["kv_bytes"] == one["kv_bytes_planned"] == 2 * 3 * 2 * 8 * 64 * 4  # K and V, layers, heads, D, slots, bytes


def test_a_policy_that_fails_while_it_works_is_out_too():
    rows = measured("full,triattention", (16, 64), triattention={"stats": "nowhere.safetensors"})
    assert all("nowhere" in rows[("triattention", b)]["failed"] for b in (16, 64))
    assert len(rows[("full", None)]["hits"]) == 2


def test_one_that_gets_no_memory_is_out_and_the_others_read_on(monkeypatch):
    real = Window.settle

    def hungry(self, kv):
        if self.budget == 16 and kv.layer == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        real(self, kv)

    monkeypatch.setattr(Window, "settle", hungry)
    rows = measured("full,window", (16, 64))
    assert "can't allocate" in rows[("window", 16)]["failed"] and rows[("window", 16)]["found"] is None
    monkeypatch.undo()
    fresh = measured("full,window", (16, 64))
    assert all(rows[c] == fresh[c] for c in (("full", None), ("window", 64)))


def test_layers_that_share_their_tokens_read_alone():
    words = Words(97)
    cell, window = cells(tiny(), ["triattention", "window"], (32,), {"triattention": {"scope": "model"}})
    asked = prompts(words, 2, (100,))
    ask([cell, window], asked, words, Finished("needle", Namespace(resume=None)))
    assert len(cell.answers) == 2 and apart(cell.engine, 33) and not apart(window.engine, 33)
    assert len({kv.pos.sort().values.numpy().tobytes() for kv in cell.engine.slots}) == 1


# ---- the command line ----

ARGV = "--budgets 8,32 --prompts 3 --lengths 60,100 --policies full,window,snapkv --set snapkv.pooling=avg --set snapkv.window=9".split()


@pytest.fixture
def words(monkeypatch):
    """The bench, with a tiny model whose tokens are words."""
    words = Words(97)
    monkeypatch.setattr(_policies, "load", lambda *_: (tiny(), words))


def run(capsys, *argv: str) -> tuple[list[str], dict]:
    assert main(["needle", *argv]) == 0
    lines = capsys.readouterr().out.splitlines()
    return lines, json.loads(lines[-1])


def test_the_command_line(words, capsys):
    lines, got = run(capsys, *ARGV)
    assert got["bench"] == "needle" and got["complete"] and [(r["policy"], r["budget"]) for r in got["rows"]] == [
        ("full", None), ("window", 8), ("window", 32), ("snapkv", 8), ("snapkv", 32)]
    assert [len(r["hits"]) for r in got["rows"]] == [3, 3, 3, 0, 3] and "cannot hold" in got["rows"][3]["failed"]
    assert [length for length, _ in got["prompts"]] == [60, 60, 100]
    assert any(line.split() == ["snapkv", "-", "0"] for line in lines) and any(line.split() == ["full", "0", "0"] for line in lines)


def test_every_form_of_the_weights_is_asked_the_same(words, capsys, monkeypatch, tmp_path):
    asked = []

    def answers(every, question, tokenizer):
        asked.append((every[0].form, every[0].engine.model.like.dtype, question.tokens))
        return [{"answer": every[0].form, "held": {}} for _ in every]

    monkeypatch.setattr(_policies, "load", lambda name, dtype, device, weights: (tiny().to(getattr(torch, dtype)), Words(97)))
    monkeypatch.setattr(_cells, "answers", answers)
    monkeypatch.setattr(needle, "hits", lambda cell, asked: f"{cell.answers}")
    argv = [*ARGV, "--forms", "float32,int8", "--resume", str(tmp_path / "run")]
    _, got = run(capsys, *argv)
    assert [dtype for _, dtype, _ in asked] == [torch.float32] * 3 + [torch.bfloat16] * 3 and [t for *_, t in asked[:3]] == [t for *_, t in asked[3:]]
    assert {r["form"]: r["hits"] for r in got["rows"]} == {form: str([form] * 3) for form in ("float32", "int8")}
    assert run(capsys, *argv)[1]["rows"] == got["rows"] and len(asked) == 6, "what is finished is read, each form's own"


def test_a_second_run_says_the_same(words, capsys):
    assert run(capsys, *ARGV) == run(capsys, *ARGV)


@pytest.mark.parametrize("wrong", ("--policies windows", "--set windows.sink=1", "--budgets 12,x", "--budgets 0", "--prompts 0", "--lengths 9"))
def test_mistakes_are_the_users(words, capsys, wrong):
    assert main(["needle", *wrong.split()]) == 2 and capsys.readouterr().err.startswith("error: ")


def test_an_interrupted_run_says_what_it_had_and_can_be_resumed(words, capsys, monkeypatch, tmp_path):
    real, calls = _cells.answers, []

    def interrupted(every, question, tokenizer):
        calls.append(question)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(every, question, tokenizer)

    monkeypatch.setattr(_cells, "answers", interrupted)
    resume = ["--resume", str(tmp_path / "run")]
    assert main(["needle", *ARGV, *resume]) == 130
    out, err = capsys.readouterr()
    found = json.loads(out.splitlines()[-1])
    assert not found["complete"] and [len(r["hits"]) for r in found["rows"]] == [2, 2, 2, 0, 2] and "interrupted" in err
    resumed = run(capsys, *ARGV, *resume)
    assert len(calls) == 4 and resumed == run(capsys, *ARGV)


def test_a_heat_map_has_a_square_for_each_length_and_band_of_depth(words):
    asked = prompts(Words(), 20, (300, 500))
    hits = "".join(str(int(p.length == 300 or p.depth > 0.8)) for p in asked)
    assert needle.heat({"hits": hits}, asked) == [[1, 0]] * 4 + [[1, 1]]
    few = needle.heat({"hits": "1"}, asked)
    assert few[0][0] == 1 and math.isnan(few[0][1]) and math.isnan(few[4][0])


def test_a_heat_map_is_drawn_of_any_rows(words, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    run(capsys, *ARGV, "--plot", str(tmp_path / "map.svg"))
    drawn = (tmp_path / "map.svg").read_text()
    assert all(f"<!-- {title} -->" in drawn for title in ("full: 0", "window 8: 0", "snapkv 8: failed", "snapkv 32: 0"))
    needle.draw([], str(tmp_path / "none.png"), [])


@pytest.mark.slow
def test_kept_sets_and_answers_are_those_of_the_oracle(smollm2):
    """Every policy on the real model: what it keeps of two prompts is, but for near-ties, what the papers' formulas keep."""
    from needle_oracle import METHODS, Oracle

    from nanokv import load

    model, tokenizer = load(str(smollm2), "float32", "cpu")
    every = list(cells(model, list(METHODS), (96, 256), {}))
    agree = dict.fromkeys(map(id, every), 0)
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
            agree[id(cell)] += prompt.found(tokenizer.decode(mine)) == prompt.found(tokenizer.decode(theirs[i]))
    assert sum(n < 2 for n in agree.values()) <= 2, list(zip(names, agree.values()))
