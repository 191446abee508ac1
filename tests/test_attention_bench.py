"""bench attention: against statistics of transformers' eager weights, and its command line."""

import csv
import json
from contextlib import contextmanager
from importlib.resources import files

import attention_oracle
import foreign
import pytest
import torch
import transformers
from conftest import small as small_policy
from conftest import tiny
from oracle import Witness

from nanokv import make
from nanokv.bench import attention
from nanokv.bench.__main__ import main
from nanokv.bench._text import SAMPLE
from nanokv.bench.attention import Recorded, Replayed, layer_row, statistics
from nanokv.checkpoint import load_model
from nanokv.loading import Bytes
from nanokv.tokenizer import Tokenizer, load_tokenizer

N = 151  # odd, and no multiple of a block
MASKED = [("full", {}), ("window", dict(budget=24)), ("window", dict(budget=24, sink=1)), ("window", dict(budget=24, sink=4)),
          ("streaming_llm", dict(budget=24, sink=4, positions="text"))]  # fmt: skip


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """A text recorded by us, and what transformers says of it."""
    theirs, tokens = foreign.theirs("llama-2"), foreign.tokens(N)
    for layer in theirs.model.layers:  # or the weights are nearly equal: peaked ones make every statistic matter
        layer.self_attn.q_proj.weight.data *= 3
    path = tmp_path_factory.mktemp("model")
    theirs.save_pretrained(path)
    expected = attention_oracle.weights_and_queries(theirs, tokens.tolist())
    with torch.no_grad():
        return Recorded(load_model(path, torch.float32), tokens), expected


def agree(text: Recorded, expected: list, tolerance: float) -> None:
    """Every statistic of every layer, its mean and its deviation over heads."""
    for layer, (weights, queries) in enumerate(expected):
        row, theirs = layer_row(layer, statistics(text, layer)), attention_oracle.statistics(weights, queries)
        assert set(row) - {"measure", "layer", "std", "sink_mass_std"} == set(theirs) == set(row["std"])
        for name, (mean, deviation) in theirs.items():
            assert row[name] == pytest.approx(mean, abs=tolerance), f"{name} of layer {layer}"
            assert row["std"][name] == pytest.approx(deviation, abs=tolerance), f"the deviation of {name} of layer {layer}"
        assert row["sink_mass_std"] == row["std"]["sink_mass"]


def test_layers_agree_with_transformers(read):
    agree(*read, 1e-4)
    rows = [layer_row(i, statistics(read[0], i)) for i in range(3)]
    assert all(0.05 < r[name] < 0.95 for r in rows for name in ("coverage_20", "sparsity", "k95", "persistence", "held")), "a test that says little"


def test_a_block_of_rows_may_be_of_any_size(read, monkeypatch):
    monkeypatch.setattr(attention, "watched_rows", lambda *_: 7)
    agree(*read, 1e-4)


def test_a_text_longer_than_a_block_of_the_model(read, monkeypatch):
    text, expected = read
    monkeypatch.setattr("nanokv.model.ROWS", 64)
    with torch.no_grad():
        agree(Recorded(text.model, text.tokens), expected, 1e-4)


@pytest.mark.parametrize("name, dials", MASKED)
def test_loss_of_a_window_is_what_lies_outside_a_mask(read, name, dials):
    text, expected = read
    mask = attention_oracle.band(N, dials.get("budget"), dials.get("sink", 0)).numpy()
    found = Replayed(text, make(name, **dials)).losses()
    assert found.tolist() == pytest.approx([attention_oracle.lost(weights, mask) for weights, _ in expected], abs=1e-6)
    assert (found == 0).all() if name == "full" else (found > 0.05).all()


@pytest.mark.parametrize("name, dials", [("h2o", dict(heads="adaptive")), ("h2o", dict(layers="pyramid")), ("scissorhands", {}), ("rkv", {}),
                                         ("quest", {}), ("triattention", dict(scope="model"))])  # fmt: skip
def test_loss_of_any_policy_is_what_its_slots_could_not_show(read, name, dials):
    text, expected = read
    replayed = Replayed(text, small_policy(name, 24, **dials))
    with Witness(replayed.engine).watching() as witness:
        found = replayed.losses()
    mask = witness.mask().numpy()  # [L, Hk, n, n]
    for layer, (weights, _) in enumerate(expected):
        each = mask[layer].repeat(len(weights) // mask.shape[1], 0)
        assert float(found[layer]) == pytest.approx(attention_oracle.lost(weights, each), abs=1e-6)
    assert found.max() > 0.01


def test_a_head_that_never_looks_back_is_left_out():
    found = {"sink_mass": torch.tensor([[0.5, 0.7]]), "persistence": torch.tensor([[torch.nan, 0.25]])}
    row = layer_row(3, found)
    assert row["persistence"] == 0.25 and row["sink_mass"] == pytest.approx(0.6) and row["sink_mass_std"] == pytest.approx(0.1)
    assert layer_row(0, {"sink_mass": found["sink_mass"], "persistence": torch.tensor([[torch.nan]])})["persistence"] is None


# ---- the command line ----


@pytest.fixture
def small(monkeypatch):
    """The bench, with a tiny model that reads bytes."""
    model = tiny(vocab_size=256)
    monkeypatch.setattr(attention, "load", lambda name, dtype: (model, Tokenizer(Bytes())))


def run(capsys, *argv: str) -> tuple[str, dict]:
    """Everything it says, and the last line understood."""
    assert main(["attention", *argv]) == 0
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])


def test_layers_and_policies_have_their_rows_and_a_second_run_says_the_same(small, capsys, tmp_path):
    argv = ["--tokens", "140", "--budgets", "24", "--csv", str(tmp_path / "rows.csv")]
    out, found = run(capsys, *argv)
    layers, losses = ([r for r in found["rows"] if r["measure"] == m] for m in ("layer", "loss"))
    assert [r["layer"] for r in layers] == [0, 1, 2] and "failed" not in out
    assert {r["policy"] for r in losses} >= {"full", "window", "h2o", "quest"} and all(len(r["layers"]) == 3 for r in losses)
    held = 2 * 3 * 2 * 8 * 140 * 4  # K and V, layers, heads, D, tokens, bytes
    assert losses[0] == {"measure": "loss", "policy": "full", "budget": None, "sink": 0, "loss": 0.0, "layers": [0.0] * 3,
                         "kv_bytes": held, "kv_bytes_planned": held}
    assert (found["bench"], found["text"], found["tokens"], found["complete"]) == ("attention", SAMPLE, 140, True)
    with open(tmp_path / "rows.csv", newline="") as f:
        assert [json.loads(r["layers"]) for r in csv.DictReader(f) if r["layers"]] == [r["layers"] for r in losses]
    assert run(capsys, *argv)[0] == out


def test_a_policy_that_cannot_run_says_so_in_its_row(small, capsys):
    _, found = run(capsys, "--tokens", "130", "--budgets", "8", "--policies", "h2o,window", "--set", "h2o.window=8")
    assert "cannot hold" in found["rows"][3]["failed"] and found["rows"][4]["loss"] > 0


def test_an_interrupted_run_says_what_it_had(small, capsys, monkeypatch):
    def interrupted(self, title):
        raise KeyboardInterrupt

    monkeypatch.setattr(Replayed, "losses", interrupted)
    assert main(["attention", "--tokens", "130"]) == 130
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [r["measure"] for r in found["rows"]] == ["layer"] * 3 and not found["complete"]


def test_too_short_a_text_is_refused(small, capsys):
    assert main(["attention", "--tokens", "129"]) == 2
    assert "at least 130 tokens must be read, not 129" in capsys.readouterr().err


def test_layers_and_losses_are_drawn(small, capsys, monkeypatch):
    class Axes:
        """Stands in for what matplotlib draws on."""

        def __init__(self):
            self.lines = {}

        def plot(self, *xs, label):
            self.lines[label] = list(xs[-1])

        def set(self, **names):
            pass

        legend = set

    panels = [Axes(), Axes()]
    monkeypatch.setattr(attention, "figure", contextmanager(lambda path, n: iter([panels])))
    _, found = run(capsys, "--tokens", "130", "--budgets", "24", "--policies", "full,window")
    attention.draw("any.svg", found["rows"])
    assert panels[0].lines["sparsity"] == [r["sparsity"] for r in found["rows"][:3]]
    assert panels[1].lines == {"full": [0.0] * 3, "window 24": found["rows"][4]["layers"]}


@pytest.mark.slow
def test_the_real_model_agrees_with_transformers(smollm2):
    sample = (files("nanokv.bench") / SAMPLE).read_text(encoding="utf-8")
    tokens = load_tokenizer(smollm2).encode(sample, bos=False)[:512]  # on 1,024 with budgets of 256 it agreed as well, in minutes more
    theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32).eval()
    expected = attention_oracle.weights_and_queries(theirs, tokens)
    with torch.no_grad():
        text = Recorded(load_model(smollm2, torch.float32), torch.tensor(tokens))
    agree(text, expected, 5e-3)  # two decimals
    for name, dials in MASKED:
        dials = dials | ({"budget": 128} if dials else {})
        mask = attention_oracle.band(512, dials.get("budget"), dials.get("sink", 0)).numpy()
        found = Replayed(text, make(name, **dials)).losses()
        assert found.tolist() == pytest.approx([attention_oracle.lost(weights, mask) for weights, _ in expected], abs=5e-3)
