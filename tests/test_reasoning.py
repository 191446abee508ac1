"""bench reasoning: its puzzles, how they are judged, and its command line."""

import json
from random import Random

import pytest
from conftest import tiny

from nanokv.bench import _cells, reasoning
from nanokv.bench.__main__ import main
from nanokv.bench.reasoning import EASY, KINDS, Puzzle, puzzle
from nanokv.loading import Bytes
from nanokv.tokenizer import Tokenizer

BYTES = Tokenizer(Bytes())


def made(kind: str, length: int = 600, seed: int = 0) -> tuple[Puzzle, str]:
    found = puzzle(BYTES, kind, length, Random(seed))
    return found, BYTES.decode(found.tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_puzzle_is_as_long_as_asked_and_its_answer_is_all_right(kind):
    p, text = made(kind)
    answer = "\n".join(p.lines)
    assert p.max_new == len(answer) and 600 <= len(answer) < 600 + len(p.lines[-1]) + 2 and text.endswith("\n")
    assert p.right(answer) == p.right(f"{answer}\nand more") == len(p.lines)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_is_a_puzzle(kind):
    assert made(kind) == made(kind) and made(kind)[0].lines != made(kind, seed=1)[0].lines


def test_an_answer_counts_up_to_its_first_error():
    p = Puzzle("copy", [], ["2. b", "3. c", "4. d"], 9)
    assert [p.right(a) for a in ("", "2. b", "2. b\n", "2. b\n3. x\n4. d", " 2. b \n3. c\n", "2. b\n\n3. c", "1. a\n2. b", "2. bb")] == [0, 1, 1, 1, 2, 1, 0, 0]


def test_a_line_that_is_said_late_is_said():
    p = Puzzle("copy", [], ["2. b", "3. c", "4. d"], 9)
    assert [p.said(a) for a in ("", "3. c\n2. b", "2. b\n2. b", "3. cc\n4. d ")] == [0, 2, 1, 1]


def test_copying_shows_the_whole_list_and_begins_it_again():
    p, text = made("copy")
    story, again = text.split("\nThe same story again, sentence by sentence:\n\n")
    assert all(line in story for line in p.lines) and again.startswith("1. ") and again.count("\n") == 1 and again.strip() in story


def test_a_chain_is_right_sums():
    p, text = made("chain")
    values = {"x0": int(text.split("\n")[0].removeprefix("x0 = "))}
    for line in text.strip().split("\n")[1:] + p.lines:
        name, sum_, value = line.split(" = ")
        before, step = sum_.split(" + ")
        values[name] = values[before] + int(step)
        assert values[name] == int(value)
    assert len(values) == 7 + len(p.lines)


# ---- the command line ----

ARGV = "--budgets 16,48 --policies full,window,snapkv --set snapkv.window=16 --prompts 2 --tokens 20".split()


@pytest.fixture
def small(monkeypatch):
    """The bench, with a tiny model that reads bytes."""
    monkeypatch.setattr(reasoning, "load", lambda *_: (tiny(vocab_size=256, n_layers=1), BYTES))


def run(capsys, *argv: str, code: int = 0) -> dict:
    assert main(["reasoning", *argv]) == code
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_every_kind_policy_and_budget_has_its_row(small, capsys):
    found = run(capsys, *ARGV)
    assert [(r["policy"], r["budget"]) for r in found["rows"] if r["measure"] == "copy"] == [
        ("full", None), ("window", 16), ("window", 48), ("snapkv", 16), ("snapkv", 48)]
    assert [r["measure"] for r in found["rows"]] == [kind for kind in EASY for _ in range(5)]
    failed = [r for r in found["rows"] if "failed" in r]
    assert [(r["policy"], r["budget"]) for r in failed] == [("snapkv", 16)] * len(EASY) and failed[0]["right"] is None
    assert all(r["lines"] == [0, 0] and r["share"] == 0 for r in found["rows"] if r not in failed), "a random model says nothing right"
    assert all(r["kv_bytes"] == r["kv_bytes_planned"] for r in found["rows"] if r not in failed)
    assert run(capsys, *ARGV) == found


def test_what_is_right_is_counted(small, capsys, monkeypatch):
    def answers(every, question, tokenizer):
        said = ["\n".join(question.lines), question.lines[0], "", "", ""]
        return [{"answer": a, "held": {}} for a in said]

    monkeypatch.setattr(_cells, "answers", answers)
    full, window, *_ = run(capsys, *ARGV, "--kinds", "copy", "--tokens", "90")["rows"]
    assert full["share"] == 1 and window["lines"] == [1, 1] and window["right"] == 2 < full["right"]
    assert full["anywhere"] == 1 and window["anywhere"] == window["share"] == pytest.approx(2 / full["right"])


def test_an_interrupted_run_says_what_it_had_and_can_be_resumed(small, capsys, monkeypatch, tmp_path):
    real, calls = _cells.answers, []

    def interrupted(every, question, tokenizer):
        calls.append(question.kind)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(every, question, tokenizer)

    monkeypatch.setattr(_cells, "answers", interrupted)
    resume = ["--resume", str(tmp_path / "run")]
    found = run(capsys, *ARGV, *resume, code=130)
    assert not found["complete"] and [len(r["lines"]) for r in found["rows"] if r["policy"] == "full"] == [1] + [0] * (len(EASY) - 1)
    whole = run(capsys, *ARGV, *resume)
    assert whole["complete"] and calls == ["counter"] * 3 + ["rota"] * 2 + ["copy"] * 2
    assert all(len(r["lines"]) == 2 for r in whole["rows"] if r["policy"] == "full")


@pytest.mark.parametrize("wrong, said", (("--kinds copy,poem", "'poem'"), ("--prompts 0", "--prompts"), ("--tokens 0", "--tokens")))
def test_mistakes_are_the_users(small, capsys, wrong, said):
    assert main(["reasoning", *wrong.split()]) == 2 and said in capsys.readouterr().err


def test_shares_are_drawn(small, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    run(capsys, *ARGV, "--prompts", "1", "--plot", str(tmp_path / "shares.svg"))
    assert (tmp_path / "shares.svg").read_text().count("<!-- snapkv -->") == len(EASY)
