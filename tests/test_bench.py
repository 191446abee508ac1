"""`python -m nanokv.bench`: how a bench is asked for, how it ends, and what is shared by all of them."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import foreign
import pytest
import torch
from conftest import forgets, tiny

from nanokv.bench import _peers, _policies, memory, speed, start, stream
from nanokv.bench._output import Finished
from nanokv.bench._peers import Peer
from nanokv.bench.__main__ import lessons, main
from nanokv.checkpoint import load_model
from nanokv.engine import Engine
from nanokv.loading import Bytes
from nanokv.model import ModelConfig
from nanokv.noise import random_model
from nanokv.options import UsageError
from nanokv.policy import REGISTRY, make
from nanokv.tokenizer import Tokenizer


def test_help_names_every_bench_with_its_lesson(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: python -m nanokv.bench NAME") and "needle       Does an answer still find a fact" in out
    assert set(lessons()) >= {"attention", "memory", "needle", "perplexity", "speed", "start", "stream"} and not [n for n in lessons() if n[0] == "_"]


@pytest.mark.parametrize("argv, code, said", [
    ([], 2, "which bench? (there are attention, "), (["needles"], 2, "no bench is called 'needles'"), (["needle", "--nope"], 2, "--nope"),
    (["needle", "--model", "nope"], 1, "no model 'nope'"), (["perplexity", "--model", "setup.gguf"], 1, "setup.gguf"),
    (["stream", "--layers", "0"], 2, "--layers: must be a whole number of at least 1"), (["stream", "--pairs", "0"], 2, "--pairs"),
    (["stream", "--tokens", "5"], 2, "--tokens, 5, is how far"), (["stream", "--at", "8"], 2, "--at must be at least 9"),
    (["speed", "--rounds", "0"], 2, "--rounds must be at least 1"), (["speed", "--lengths", "a"], 2, "--lengths takes whole numbers"),
    (["speed", "--peers", "vllm"], 2, "no peer is called 'vllm'"), (["memory", "--lengths", "0"], 2, "--lengths takes whole numbers"),
])  # fmt: skip
def test_mistakes_are_one_sentence_and_a_code(capsys, argv, code, said):
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert said in err and err.startswith("error: ") and err.count("\n") == 1


def test_a_reader_who_leaves_is_no_mistake():
    bench = subprocess.Popen([sys.executable, "-m", "nanokv.bench", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    bench.stdout.close()
    assert bench.wait() == 0 and bench.stderr.read() == b""


# ---- resuming ----


def pieces(file, seed: int = 0) -> Finished:
    return Finished("needle", Namespace(resume=str(file), csv=None, plot=None, seed=seed, budgets=[64]))


def test_what_is_finished_is_measured_once(tmp_path):
    measured = []

    def measure(x):
        measured.append(x)
        return {"ppl": x / 3, "curve": [[1, x]]}

    first = [pieces(tmp_path / "run").once(str(x), lambda x=x: measure(x)) for x in (1, 2, 1)]
    again = pieces(tmp_path / "run")
    assert [again.once(str(x), lambda x=x: measure(x)) for x in (1, 2, 3)][:2] == first[:2]
    assert measured == [1, 2, 3]


def test_what_failed_is_tried_again(tmp_path):
    def failing():
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError):
        pieces(tmp_path / "run").once("a", failing)
    assert pieces(tmp_path / "run").once("a", lambda: 5) == 5


def test_another_question_is_refused_by_its_difference(tmp_path):
    pieces(tmp_path / "run").once("a", lambda: 1)
    with pytest.raises(UsageError, match=r"another question \(seed: 0 there, 1 here\)"):
        pieces(tmp_path / "run", seed=1)


def test_half_a_line_is_measured_again(tmp_path):
    file = tmp_path / "run"
    run = pieces(file)
    run.once("a", lambda: 1), run.once("b", lambda: 2)
    file.write_bytes(file.read_bytes()[:-4])
    run = pieces(file)
    assert [run.once(k, lambda: 7) for k in "ab"] == [1, 7]
    assert [pieces(file).once(k, lambda: 9) for k in "ab"] == [1, 7]


@pytest.mark.parametrize("text", ("", "a story\n", "[1]\n", '{"bench": "needle"}\n3\n'))
def test_a_file_of_something_else_is_left_alone(tmp_path, text):
    (tmp_path / "notes").write_text(text)
    with pytest.raises(UsageError, match="is not what --resume wrote"):
        pieces(tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == text


def test_without_the_option_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Finished("needle", Namespace(resume=None)).once("a", lambda: 3) == 3 and not [*tmp_path.iterdir()]


# ---- benches without a file of tests of their own ----


@pytest.fixture
def tiny_speed(monkeypatch):
    def load(name, dtype, device, weights):
        model = tiny(vocab_size=256).to(getattr(torch, dtype))
        return model if weights == "native" else random_model(model.config, getattr(torch, dtype), form=weights), Tokenizer(Bytes())

    monkeypatch.setattr(_policies, "load", load)
    monkeypatch.setattr(speed, "bandwidth", lambda: 1e9)


def run(capsys, *argv: str, code: int = 0) -> dict:
    assert main(list(argv)) == code
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_speed_has_a_row_for_every_length_and_policy_with_its_floor_and_ratios(tiny_speed, capsys):
    found = run(capsys, *"speed --lengths 20,40 --policies full,window,h2o --budgets 8,24 --rounds 2 --prefill-rounds 1 --attention 32".split())
    rows = found["rows"]
    assert [(r["measure"], r["context"]) for r in rows if r["policy"] == "full"] == [
        ("decode", 20), ("decode", 40), ("prefill", 20), ("prefill", 40), ("attention", 32)]
    assert len(rows) == 5 * 5 and all(r["ms"] > 0 for r in rows) and all(r["over_full"] == 1 for r in rows if r["policy"] == "full")
    decode = {(r["policy"], r["budget"]): r for r in rows if r["measure"] == "decode" and r["context"] == 40}
    window, full = decode[("window", 8)], decode[("full", None)]
    assert window["over_full"] == pytest.approx(window["ms"] / full["ms"]) and window["over_window"] == 1
    row = 2 * 3 * 2 * 8 * 4  # K and V, layers, heads, D, bytes
    assert full["floor_ms"] - window["floor_ms"] == pytest.approx((40 - 8) * row / 1e9 * 1e3)
    assert all(r["kv_bytes"] == r["kv_bytes_planned"] > 0 for r in decode.values())


def test_speed_says_which_policy_cannot_and_goes_on(tiny_speed, capsys):
    found = run(capsys, *"speed --lengths 20 --policies snapkv,window --budgets 8 --set snapkv.window=8 --rounds 1 --attention 16".split())
    failed = [r for r in found["rows"] if "failed" in r]
    assert [r["measure"] for r in failed] == ["decode", "prefill", "attention"] and all("cannot hold" in r["failed"] for r in failed)
    assert all(r["over_full"] is None for r in found["rows"] if r["policy"] == "window"), "full was not run"


@pytest.mark.parametrize("tied", (True, False))
@pytest.mark.parametrize("form, bits", [("native", 16), ("int8", 8), ("int4", 4)])
def test_a_token_reads_every_weight_once_and_its_own_row_of_the_embedding(tied, form, bits):
    c = ModelConfig(vocab_size=192, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=128, qkv_bias=True, tied=tied)
    layer = {(128, 64): 1, (64, 64): 1, (256, 64): 1, (64, 128): 1}  # qkv, o, gate and up, down

    def matrix(rows: int, columns: int, bits: int) -> int:
        scales = {16: 0, 8: 2 * rows, 4: 2 * 2 * rows * columns // 32}[bits]  # a scale a row; a scale and a zero for 32 columns
        return rows * columns * bits // 8 + scales

    rest = 2 * (64 * (2 * 2 + 1) + 128 * 2)  # norms and biases
    ends = max(bits, 8)  # the head has no fewer bits than that
    expected = rest + 2 * sum(matrix(*shape, bits) for shape in layer) + matrix(192, 64, ends)
    expected += 0 if tied else matrix(1, 64, ends)
    assert speed.weight_bytes(random_model(c, torch.bfloat16, form=form)) == expected


def test_speed_puts_forms_side_by_side_each_beside_its_own_full(tiny_speed, capsys):
    rows = run(capsys, *"speed --forms float32,bfloat16,int8 --lengths 20 --policies full,window --budgets 8 --rounds 2 --prefill-rounds 1".split())["rows"]
    decode = {(r["policy"], r["form"]): r for r in rows if r["measure"] == "decode"}
    assert len(rows) == 2 * 6 and [form for _, form in decode] == ["float32"] * 2 + ["bfloat16"] * 2 + ["int8"] * 2
    for form in ("float32", "bfloat16", "int8"):
        assert decode[("window", form)]["over_full"] == pytest.approx(decode[("window", form)]["ms"] / decode[("full", form)]["ms"])
    assert decode[("full", "float32")]["floor_ms"] == pytest.approx(2 * decode[("full", "bfloat16")]["floor_ms"])
    assert decode[("full", "bfloat16")]["floor_ms"] > decode[("full", "int8")]["floor_ms"]


def test_a_form_that_is_none_is_named(capsys):
    assert main(["speed", "--forms", "float32,int2"]) == 2 and "no form of weights is called 'int2'; there are auto, float32" in capsys.readouterr().err


class Echo(Peer):
    """Another engine."""

    def __init__(self, name, dtype=""):
        self.name, self.dtype, self.heard = name, dtype, []

    def read(self, tokens):
        self.heard.append(list(tokens))

    def step(self, token):
        self.heard[-1].append(token)


def test_peers_take_their_turns_and_are_fed_what_the_engines_are(tiny_speed, capsys, monkeypatch):
    echo, fed = Echo("echo"), []

    def decoded(engine, token):
        fed.append(int(token))
        return real(engine, token)

    real = speed.Engine.decode
    monkeypatch.setattr(speed.Engine, "decode", decoded)
    monkeypatch.setattr(speed, "check_peers", lambda names: None)
    monkeypatch.setattr(speed, "peers", lambda *_: [echo])
    found = run(capsys, *"speed --lengths 20 --policies full --rounds 2 --prefill-rounds 1 --peers echo".split())
    answer, warm, prompt = echo.heard
    assert warm == prompt[: len(warm)] and warm
    assert len(prompt) == 20 and answer == prompt + fed and len(fed) == 3 + 2 * 4  # to warm up; two rounds, turns of four
    assert [(r["measure"], r["policy"]) for r in found["rows"]] == [
        ("decode", "full"), ("decode", "echo"), ("prefill", "full"), ("prefill", "echo")]
    for ours, theirs in zip(found["rows"][::2], found["rows"][1::2]):
        assert ours["echo_over"] == pytest.approx(theirs["ms"] / ours["ms"]) and theirs["form"] is None


@pytest.mark.parametrize("turn, done, seconds", [(1, "abab", 5.0), (2, "aabbaabb", 1.0)])
def test_of_a_turn_the_first_step_is_not_timed(monkeypatch, turn, done, seconds):
    """An action that takes 9 seconds after the other's turn and 1 after its own."""
    clock, seen = [0.0], []

    def action(name):
        clock[0] += 1 if seen[-1:] == [name] else 9 if len(seen) > 1 else 1
        seen.append(name)

    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock[0])
    median = speed.in_turn({name: lambda name=name: action(name) for name in "ab"}, 2, "steps", turn)
    assert "".join(seen) == done and median == {"a": seconds, "b": seconds}


def test_a_form_is_compared_with_the_peer_in_its_dtype(tiny_speed, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(speed, "check_peers", lambda names: None)
    monkeypatch.setattr(speed, "peers", lambda names, model, dtypes, length: asked.append(dtypes) or [Echo("echo", d) for d in dtypes])
    rows = run(capsys, *"speed --forms float32,bfloat16,int4 --lengths 20 --policies full --rounds 2 --prefill-rounds 1 --peers echo".split())["rows"]
    assert asked == [["float32", "bfloat16"]]
    for measure in ("decode", "prefill"):
        ms = {(r["policy"], r["form"]): r["ms"] for r in rows if r["measure"] == measure}
        ratio = {r["form"]: r["echo_over"] for r in rows if r["measure"] == measure and r["policy"] == "full"}
        assert len(ms) == 5
        for form, dtype in (("float32", "float32"), ("bfloat16", "bfloat16"), ("int4", "bfloat16")):
            assert ratio[form] == pytest.approx(ms[("echo", dtype)] / ms[("full", form)])


def test_who_is_told_its_dtype_takes_part_once_for_each(monkeypatch):
    made = []

    def named(name):
        return lambda path, dtype, length: made.append((name, path.name, dtype, length)) or Echo(name, dtype)

    monkeypatch.setattr(_peers, "PEERS", {name: ("json", named(name)) for name in ("transformers", "llama.cpp")})
    monkeypatch.setattr(_peers, "locate", Path)
    found = _peers.peers(["llama.cpp", "transformers"], "any.gguf", ["float32", "bfloat16"], 30)
    assert [(p.name, p.dtype) for p in found] == [("llama.cpp", ""), ("transformers", "float32"), ("transformers", "bfloat16")]
    assert made == [(p.name, "any.gguf", p.dtype, 30) for p in found]


@pytest.mark.slow
@pytest.mark.parametrize("name, package", [("transformers", "transformers"), ("llama.cpp", "llama_cpp")])
def test_peers_read_what_they_are_fed(smollm2, name, package):
    """Read twice, so that nothing of the first text may be left; the likeliest next token is then that of our own engine."""
    pytest.importorskip(package)
    (peer,) = _peers.peers([name], str(smollm2), ["float32"], 64)
    engine, text = Engine(load_model(smollm2, torch.float32), make("full")), [int(t) for t in foreign.tokens(30)]
    engine.reset(29, 1)
    engine.extend(text[:29])
    ours = engine.decode(text[29:])
    peer.read(text[5:25])
    peer.read(text[:29])
    theirs = peer.step(text[29])
    if name == "llama.cpp":
        theirs = torch.tensor(peer.llama._ctx.get_logits()[: len(ours)])
    assert theirs.flatten().float().argmax() == ours.argmax() and torch.corrcoef(torch.stack((theirs.flatten().float(), ours)))[0, 1] > 0.99


def test_stream_allocates_what_is_planned_and_no_more(capsys):
    argv = "stream --shape tiny --budgets 32 --tokens 60 --at 40 --pairs 3 --policies window,h2o --set h2o.window=4".split()
    rows = run(capsys, *argv)["rows"]
    assert [(r["policy"], r["budget"], r["tokens"]) for r in rows] == [("window", 32, 60), ("h2o", 32, 60)]
    assert all(r["kv_bytes"] == r["kv_bytes_planned"] <= r["allocated_bytes"] for r in rows) and rows[0]["ratio"] > 0


def test_a_stream_of_all_policies_is_of_those_that_evict():
    asked = stream.options("--shape tiny --policies all".split()).policies
    assert asked == [name for name in _policies.ORDER if forgets(REGISTRY[name]())] and 9 <= len(asked) < len(_policies.ORDER)
    assert stream.options(["--policies", "full"]).policies == ["full"]


def test_a_policy_that_evicts_many_at_a_time_is_timed_in_whole_cycles(capsys, monkeypatch):
    """One step of eight takes 8 seconds, the others none, and once somebody else keeps the machine busy: 1 second a step."""
    real = stream.step

    def step(engine, tokens):
        evicts = engine.slots[0].room == 0
        real(engine, tokens)
        return 8 * evicts + 1000 * (engine.seen == 68)

    monkeypatch.setattr(stream, "step", step)
    argv = "stream --shape tiny --budgets 32 --tokens 60 --at 40 --policies scissorhands --set scissorhands.interval=8".split()
    (row,) = run(capsys, *argv, "--pairs", "5")["rows"]
    assert (row["cycle"], row["pairs"], row["ms_at_40"], row["ms_at_60"], row["ratio"]) == (8, 24, 1000, 1000, 1)
    (row,) = run(capsys, *argv, "--pairs", "25")["rows"]
    assert row["pairs"] == 32


# ---- from the command to the first token ----


@pytest.fixture
def processes(monkeypatch):
    """Processes that end at once: a clock says how long each took, by whose it is and in which form."""
    clock, ran = [0.0], []

    def process(command, **_):
        whose = "nanokv" if command[1:3] == ["-m", "nanokv"] else "transformers"
        dtype = command[command.index("--dtype") + 1] if whose == "nanokv" else command[5]
        weights = command[command.index("--weights") + 1] if whose == "nanokv" else ""
        ran.append((whose, dtype, weights))
        clock[0] += 100 * (ran.count(ran[-1]) == 1) + (8 if whose == "transformers" else 2 if dtype == "float32" else 4)
        return Namespace(returncode=int(weights == "int4"), stdout="Blue\n", stderr="a\nerror: no kernel\n")

    monkeypatch.setattr(start.subprocess, "run", process)
    monkeypatch.setattr(start.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(start, "locate", Path)
    monkeypatch.setattr(start, "check_peers", lambda names: None)
    return ran


def test_commands_take_turns_and_the_first_round_does_not_count(processes, capsys):
    rows = run(capsys, *"start --model any.gguf --forms float32,int8 --rounds 2".split())["rows"]
    turn = [("nanokv", "float32", "native"), ("nanokv", "bfloat16", "int8"), ("transformers", "float32", ""), ("transformers", "bfloat16", "")]
    assert processes == 3 * turn
    assert [(r["command"], r["form"], r["s"], r["transformers_over"], r["said"]) for r in rows] == [
        ("nanokv", "float32", 2, 4, "Blue"), ("nanokv", "int8", 4, 2, "Blue"), ("transformers", "float32", 8, None, "Blue"), ("transformers", "bfloat16", 8, None, "Blue")]


def test_a_command_that_fails_says_why_and_is_not_run_again(processes, capsys):
    rows = run(capsys, *"start --model any.gguf --forms int4 --rounds 2".split(), code=1)["rows"]
    assert rows[0] == {"command": "nanokv", "form": "int4", "s": None, "transformers_over": None, "failed": "error: no kernel"}
    assert rows[1]["s"] == 8 and [whose for whose, *_ in processes] == ["nanokv"] + 3 * ["transformers"]


@pytest.mark.slow
def test_both_commands_say_the_same_token(smollm2, capsys):
    rows = run(capsys, *f"start --model {smollm2} --forms float32 --rounds 1".split())["rows"]
    assert len(rows) == 2 and rows[0]["said"] == rows[1]["said"] != "" and rows[0]["transformers_over"] > 0


def memory_rows(capsys, monkeypatch, peaks, *more, code=0):
    """Rows of the bench whose processes measure these bytes one after another; None: that one fails."""
    left = iter(peaks)

    def process(command, **_):
        peak = next(left)
        return Namespace(returncode=int(peak is None), stdout=f'{{"policy": "full", "measured_bytes": {peak}}}\n', stderr="Traceback\nerror: too long\n")

    monkeypatch.setattr(memory.subprocess, "run", process)
    rows = run(capsys, "memory", "--runs", "full", *more, code=code)["rows"]
    assert next(left, "all ran") == "all ran"
    return rows


def test_memory_says_which_measurement_failed_and_ends_with_1(capsys, monkeypatch):
    rows = memory_rows(capsys, monkeypatch, [memory.SMALL, None], "--lengths", "10,20", code=1)
    assert [(row["policy"], row.get("failed")) for row in rows] == [("full", None), ("full", "error: too long")] and rows[1]["tokens"] == 20


@pytest.mark.parametrize("peaks, median, more", [
    ([30, 10, 20], 20, []), ([30, 10, 20, 21, 22], 21, ["--repeat", "5"]), ([30, 10], 10, ["--repeat", "2"]), ([memory.SMALL], memory.SMALL, []),
])
def test_memory_measures_a_small_row_again_and_keeps_the_median(capsys, monkeypatch, peaks, median, more):
    row, = memory_rows(capsys, monkeypatch, peaks, "--lengths", "10", *more)
    assert (row["measured_bytes"], row["processes"], row["lowest_bytes"], row["highest_bytes"]) == (median, len(peaks), min(peaks), max(peaks))


def test_memory_that_fails_the_second_time_has_failed(capsys, monkeypatch):
    row, = memory_rows(capsys, monkeypatch, [10, None], "--lengths", "10", code=1)
    assert row["failed"] == "error: too long"
