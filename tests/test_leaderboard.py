"""The leaderboard: what is measured side by side is what each policy would have measured alone, and how it reads."""

import json
import math
from html.parser import HTMLParser

import pytest
import torch
import torch.nn.functional as F
from conftest import REGISTRY, tiny
from test_needle import Words

from nanokv import make
from nanokv.bench import _board, leaderboard, perplexity
from nanokv.bench.__main__ import main
from nanokv.bench._board import MEASURES, Board
from nanokv.bench._cells import cells
from nanokv.bench._policies import ORDER
from nanokv.engine import Engine
from nanokv.policies.h2o import H2O

TEXT = torch.tensor([(7 * i * i + 3 * i) % 97 for i in range(64)])
FOUND, PPL, MIB, MS = MEASURES


def predicted(policies: str, budgets: tuple, first: int, **dials: dict) -> list[dict]:
    """The last that the measure knows."""
    every = list(cells(tiny(), policies.split(","), budgets, dials))
    return [r | {"budget": c.budget} for r, c in zip(list(leaderboard.perplexities(every, TEXT, first))[-1], every)]


def test_perplexities_are_those_of_each_policy_alone():
    names = ",".join(n for n in ORDER if n != "snapkv")
    for name, found in zip(names.split(","), predicted(names, (32,), 40)):
        engine = Engine(tiny(), make(name, **({} if found["budget"] is None else {"budget": 32})))
        engine.reset(40, 24)
        logits = [engine.extend(TEXT[:40])] + [engine.decode(TEXT[i : i + 1]) for i in range(40, 63)]
        assert found["targets"] == 24
        assert found["ppl"] == pytest.approx(math.exp(F.cross_entropy(torch.stack(logits), TEXT[40:])), rel=1e-5), name


def test_the_perplexity_of_full_is_that_of_the_perplexity_bench():
    (found,) = predicted("full", (), 40)
    expected = perplexity.row(perplexity.losses(Engine(tiny(), make("full")), TEXT), 40)
    assert found["ppl"] == pytest.approx(expected["ppl"], rel=1e-5) and found["targets"] == expected["targets"]


def test_every_step_knows_the_perplexity_so_far():
    known = list(leaderboard.perplexities(list(cells(tiny(), ["window"], (16,), {})), TEXT, 60))
    assert [step[0]["targets"] for step in known] == [1, 2, 3, 4]


def test_a_policy_that_fails_is_reported_in_its_cell_and_ends_nothing(monkeypatch):
    alone = predicted("full,window", (16,), 40)
    real = H2O.observe

    def broken(self, kv, q, pos, probs):
        if int(kv.now) == 50 and kv.layer == 1:
            raise RuntimeError("no more\nmemory")
        real(self, kv, q, pos, probs)

    monkeypatch.setattr(H2O, "observe", broken)
    full, h2o, snapkv, window = predicted("full,h2o,snapkv,window", (16,), 40, snapkv={"window": "16"})
    for found, expected in zip((full, window), alone):  # a larger batch may round otherwise
        assert found == pytest.approx(expected)
    assert h2o == {"failed": "no more memory", "budget": 16} and "cannot hold" in snapkv["failed"]


def test_logits_that_are_not_finite_are_not_averaged():
    model = tiny()
    model.norm.weight.fill_(torch.nan)
    (found,) = list(leaderboard.perplexities(list(cells(model, ["full"], (16,), {})), TEXT, 60))[-1]
    assert found == {"failed": "before token 60 the logits are no longer finite"}


def test_costs_are_bytes_and_milliseconds_over_those_of_full():
    every = list(cells(tiny(), ["full", "window", "snapkv"], (16,), {"snapkv": {"window": "16"}}))
    ((full, window, snapkv),) = leaderboard.costs(every, TEXT, 2)
    assert full["kv_bytes"] == full["kv_bytes_planned"] == 2 * 3 * 2 * 8 * 4 * (64 + 2 + leaderboard.WARM)
    assert window["kv_bytes"] == window["kv_bytes_planned"] == 2 * 3 * 2 * 8 * 4 * 16
    assert full["over_full"] == 1 and window["over_full"] == pytest.approx(window["ms"] / full["ms"]) and set(snapkv) == {"failed"}


# ---- the command line ----

ARGV = "--budgets 16,40 --prompts 2 --lengths 60 --tokens 64 --read 40 --rounds 1".split()


@pytest.fixture
def small(monkeypatch):
    """The bench, with a tiny model that reads words."""
    words = Words(97)
    monkeypatch.setattr(leaderboard, "load", lambda name, dtype: (tiny(), words))


def run(capsys, *argv: str) -> tuple[str, dict]:
    """Everything it says, and the last line understood."""
    assert main(["leaderboard", *ARGV, *argv]) == 0
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])


def untimed(rows: list[dict]) -> list[dict]:
    return [{n: x for n, x in row.items() if n not in ("ms", "over_full")} for row in rows]


def test_every_policy_is_measured_at_every_budget_and_a_second_run_says_the_same(small, capsys, tmp_path):
    page, table = tmp_path / "page.html", tmp_path / "table.md"
    out, found = run(capsys, "--html", str(page), "--markdown", str(table))
    assert found["bench"] == "leaderboard" and found["complete"] and found["date"]
    rows = {(r["policy"], r["budget"]): r for r in found["rows"]}
    assert list(dict.fromkeys(p for p, _ in rows)) == [*ORDER] and {*REGISTRY} == {*ORDER} and len(rows) == 21
    for (policy, budget), row in rows.items():
        if "failed" in row:
            assert "cannot hold" in row["failed"] and budget == 16
        else:
            assert len(row["hits"]) == 2 and row["targets"] == 24 and row["ms"] > 0 and row["kv_bytes"] == row["kv_bytes_planned"]
    assert [note.split(":")[0] for note in found["notes"]] == ["window", "triattention"] and all(note in out for note in found["notes"])
    assert table.read_text() in out and out.count("| `h2o` |") == 1 and page.read_text().startswith("<!DOCTYPE html>")
    few, again = (untimed(run(capsys, "--policies", "full,h2o,rkv")[1]["rows"]) for _ in range(2))
    assert few == again and len(few) == 5
    for row in few:  # beside others, in a larger batch, sums may be rounded in another order
        beside = rows[row["policy"], row["budget"]]
        assert row["hits"] == beside["hits"] and abs(row["ppl"] / beside["ppl"] - 1) < 1e-4


def test_an_interrupted_run_says_what_it_had_and_another_resumes_it(small, capsys, monkeypatch, tmp_path):
    whole = run(capsys, "--policies", "full,window")[1]
    argv = ["--policies", "full,window", "--resume", str(tmp_path / "finished")]
    real, calls = leaderboard.decode_together, []

    def interrupted(*given):
        calls.append(given)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(leaderboard, "decode_together", interrupted)
    assert main(["leaderboard", *ARGV, *argv]) == 130
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    assert not found["complete"] and [r["targets"] for r in found["rows"]] == [5] * 3 and "of 5 tokens" in out
    assert [r["hits"] for r in found["rows"]] == [r["hits"] for r in whole["rows"]] and "–" in out
    monkeypatch.setattr(leaderboard, "decode_together", real)
    monkeypatch.setattr("nanokv.bench._cells.answers", None)  # no prompt is asked again
    assert untimed(run(capsys, *argv)[1]["rows"]) == untimed(whole["rows"])


@pytest.mark.parametrize("argv, said", [
    (["--policies", "h3o"], "no policy is called 'h3o'"), (["--read", "64"], "--read must be less than --tokens, 64, not 64"),
    (["--html", "no/such.html"], "there is no directory no"), (["--markdown", "no/such.md"], "there is no directory no"),
    (["--rounds", "0"], "--rounds must be at least 1"), (["--lengths", "1,x"], "--lengths takes whole numbers"), (["--lengths", "9"], "9 tokens"),
])  # fmt: skip
def test_mistakes_are_named_before_anything_is_measured(small, capsys, argv, said):
    assert main(["leaderboard", *ARGV, *argv]) == 2
    assert said in capsys.readouterr().err


def test_quick_is_less_of_what_is_not_given():
    quick = leaderboard.options(["--quick", "--prompts", "3"])
    assert (quick.budgets, quick.prompts, quick.tokens, quick.read) == ([128, 512], 3, 768, 512)
    assert leaderboard.options([]).budgets == [128, 256, 512, 1024]


# ---- how it reads ----


def board() -> Board:
    """Four policies at two budgets; one could not."""
    def row(policy, budget, found, ppl, bytes, ms):
        return {"policy": policy, "budget": budget, "found": found, "hits": "0" * 9, "ppl": ppl, "targets": 7, "kv_bytes": bytes << 20, "ms": ms}

    rows = [
        row("full", None, 9, 10.0, 90, 40.0), row("window", 8, 0, 40.0, 5, 30.0), row("window", 16, 3, 20.0, 10, 30.0),
        row("h2o", 8, 4, 20.0, 5, 35.0), row("h2o", 16, 3, 15.0, 10, 50.0), row("quest", 8, 9, 11.0, 90, 45.0), row("quest", 16, 3, 10.0, 90, 45.0),
        {"policy": "rkv", "budget": 8, "failed": "8 < 9 & more"}, row("rkv", 16, 1, 12.0, 10, 31.0),
    ]  # fmt: skip
    facts = {"model": "a<b", "dtype": "float32", "seed": 0, "machine": "slow", "date": "2020-02-02", "text": "t.txt", "tokens": 99, "read": 50, "lengths": [1, 2]}
    facts["notes"] = ["rkv: so it is"]
    return Board(rows, [8, 16], facts)


def test_cells_are_shaded_from_the_worst_to_the_best():
    b = board()
    assert b.shade(FOUND, "window", 8) == 0 and b.shade(FOUND, "full", 16) == 1 and b.shade(FOUND, "h2o", 16) == pytest.approx(1 / 3)
    assert b.shade(PPL, "full", 8) == 1 and b.shade(PPL, "window", 16) == pytest.approx(0.5), "perplexities by their ratio"
    assert b.shade(MS, "h2o", 16) == 0 and b.shade(MS, "window", 8) == 1 and b.shade(MS, "rkv", 8) is None


def test_the_best_of_a_column_is_bold_unless_half_of_it_are():
    b = board()
    assert [p for p in b.policies if b.best(FOUND, p, 8)] == ["quest"] and not any(b.best(FOUND, p, 16) for p in b.policies)
    assert [p for p in b.policies if b.best(PPL, p, 16)] == ["quest"] and [p for p in b.policies if b.best(MS, p, 16)] == ["window"]


def test_markdown():
    lines = _board.markdown(board()).splitlines()
    assert lines[0] == "|  | found 8 | 16 | ppl 8 | 16 | MiB 16 | ms 16 |"
    assert lines[2:7] == [
        "| `full` | 9 | 9 | 10.00 | 10.00 | 90 | 40 |", "| `window` | 0 | 3 | 40.00 | 20.00 | 10 | **30** |", "| `h2o` | 4 | 3 | 20.00 | 15.00 | 10 | 50 |",
        "| `quest` | **9** | 3 | **11.00** | **10.00** | 90 | 45 |", "| `rkv` | – | 1 | – | 12.00 | 10 | 31 |",
    ]  # fmt: skip
    rest = "\n".join(lines[7:])
    for said in ("of 9, hidden in prose of 1 and 2 tokens", "of 7 tokens of t.txt, after 50 others", "after 99 tokens", "2020-02-02, on slow",
                 "quest keeps every token", "rkv: so it is", "rkv 8: 8 < 9 & more"):
        assert said in rest


class Page(HTMLParser):
    """What a page is made of; every tag must be closed."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.seen, self.links, self.text = [], [], [], ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        self.links += [v for n, v in attrs if n in ("href", "src")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_stands_on_its_own():
    text = _board.html(board())
    page = Page(text)
    assert not page.links and "url(" not in text and "@import" not in text and not any(tag == "script" for tag, _ in page.seen)
    assert any(attrs.get("name") == "viewport" for _, attrs in page.seen)
    shades = [attrs.get("style") for tag, attrs in page.seen if tag == "td"]
    assert len(shades) == 4 * 5 * 2 and shades.count(None) == 4 and {"--v: 0.60", "--v: 0.00"} <= {*shades}
    for said in ("a<b in float32", "2020-02-02", "rkv 8: 8 < 9 & more", "of 9, hidden", "Keep everything"):
        assert said in page.text
