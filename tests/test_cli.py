"""The command line: what it prints where, and what it says to a mistake. Most tests call main() on a tiny checkpoint."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import cli
from nanokv import options
from nanokv.checkpoint import name_table
from nanokv.engine import Engine
from nanokv.policy import REGISTRY

ROOT = Path(__file__).parent.parent
SPECIAL = ["<|im_start|>", "<|im_end|>"]
LETTERS = [chr(c) for c in range(32, 127)] + ["\n"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>"


def write_tokenizer(directory: Path) -> None:
    """One token per ASCII character, and two control tokens."""
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary = {t: i for i, t in enumerate(SPECIAL + [spelled.pre_tokenize_str(c)[0][0] for c in LETTERS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = spelled, decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE}))


def write_checkpoint(directory: Path, max_context: int = 4096) -> Path:
    """A random Llama of 3 layers with 2 KV heads of 8 dimensions, padded beyond its 98 tokens, as files."""
    directory.mkdir(exist_ok=True)
    model = tiny(seed=3, vocab_size=104, max_context=max_context)
    c, ours = model.config, dict(model.named_parameters())
    tensors = {name: ours[place][rows].clone() for name, (place, rows) in name_table(c).items() if place in ours}
    save_file(tensors, directory / "model.safetensors")
    config = {
        "model_type": "llama", "vocab_size": c.vocab_size, "hidden_size": c.dim, "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads, "num_key_value_heads": c.n_kv_heads, "head_dim": c.head_dim,
        "intermediate_size": c.ffn_dim, "rms_norm_eps": c.norm_eps, "max_position_embeddings": max_context,
        "rope_theta": 10000.0, "eos_token_id": 1, "torch_dtype": "float32",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def run(tiny_dir, capsys):
    """Run main() on the tiny checkpoint -> exit code, stdout, stderr."""

    def call(*arguments: str, model: Path | str = tiny_dir) -> tuple[int, str, str]:
        code = cli.main([*arguments, "--model", str(model)])
        return code, *capsys.readouterr()

    return call


def pipe(monkeypatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def start(*arguments: str, **options) -> subprocess.Popen:
    """The command in a process of its own, with signals and pipes as a shell gives them."""
    command = [sys.executable, str(ROOT / "cli.py"), *map(str, arguments)]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **(quiet | options))


STREAM = ("--policy", "window", "--budget", "32", "--sink", "4", "-n", "1000000", "--ignore-eos", "--raw", "--quiet", "hello")


# ---- what comes out ----


def test_text_on_stdout_and_nothing_else(run):
    code, out, err = run("hello", "-n", "20", "--ignore-eos")
    assert (code, err) == (0, "")
    report = json.loads(run("hello", "-n", "20", "--ignore-eos", "--json")[1])
    assert out == report["text"] + "\n" and len(report["text"]) > 10


def test_json_is_one_object_with_the_promised_names(run):
    code, out, err = run("hello there, " * 5, "--json", "-n", "9", "--ignore-eos", "--policy", "window", "--budget", "16", "--sink", "4")
    assert (code, err, out.count("\n")) == (0, "", 1)
    r = json.loads(out)
    assert list(r) == [
        "text", "token_ids", "prompt_token_ids", "finish_reason", "usage", "timings", "kv", "seed", "model", "dtype", "device"
    ]  # fmt: skip
    assert list(r["timings"]) == ["load_s", "compile_s", "prefill_s", "decode_s", "prefill_tokens_per_s", "decode_tokens_per_s"]
    T = len(r["prompt_token_ids"])
    assert r["usage"] == {"prompt_tokens": T, "new_tokens": 9} and len(r["token_ids"]) == 9
    peak = r["kv"].pop("peak_prefill_bytes")
    assert r["kv"] == {
        "policy": "window",
        "budget": 16,
        "dtype": "float32",
        "slots_per_head": [16, 16, 16],
        "bytes": 2 * 3 * 2 * 8 * 16 * 4,
        "bytes_planned": 2 * 3 * 2 * 8 * 16 * 4,
        "bytes_full": 2 * 3 * 2 * 8 * (T + 9) * 4,
        "live": 16,
        "evicted": T + 8 - 16,  # the last token is not read any more
        "oldest_position": 0,
    }
    assert peak > r["kv"]["bytes"]
    assert (r["finish_reason"], r["seed"], r["dtype"], r["device"]) == ("length", None, "float32", "cpu")


def test_full_holds_what_full_would_hold(run):
    kv = json.loads(run("hello", "--json", "-n", "9", "--ignore-eos")[1])["kv"]
    assert kv["bytes"] == kv["bytes_full"] and kv["evicted"] == 0 and kv["budget"] is None


def test_raw_and_template_and_system(run):
    def prompt(*arguments: str) -> str:
        ids = json.loads(run("hi", "--json", "-n", "1", *arguments)[1])["prompt_token_ids"]
        return "".join((SPECIAL + LETTERS)[i] for i in ids)

    assert prompt("--raw") == "hi"
    assert prompt() == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>"
    assert prompt("-sys", "be brief") == "<|im_start|>system\nbe brief<|im_end|>\n" + prompt()


def test_every_way_to_give_a_prompt_is_the_same(run, monkeypatch, tmp_path):
    expected = run("one two", "-n", "5")
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"one two\r\n")
    assert run("-p", "one two", "-n", "5") == expected
    assert run("--prompt_file", str(file), "-n", "5") == expected
    for arguments in ([], ["-"], ["-f", "-"]):
        pipe(monkeypatch, b"one two\n")
        assert run(*arguments, "-n", "5") == expected


def test_a_file_gives_its_text_without_mark_and_last_newline():
    assert cli.decoded("\ufeffé\n\r\n".encode(), "a file") == "é\n"
    assert cli.decoded(b"no end\r", "a file") == "no end\r"


def test_stop_texts_end_the_answer_before_them(run):
    full = run("hello", "-n", "60", "--ignore-eos")[1]
    stop = full[20:24]
    code, out, _ = run("hello", "-n", "60", "--ignore-eos", "--stop", "never this", "--stop", stop)
    assert (code, out) == (0, full[: full.index(stop)] + "\n")
    report = json.loads(run("hello", "-n", "60", "--ignore-eos", "--stop", stop, "--json")[1])
    assert report["finish_reason"] == "stop" and report["text"] + "\n" == out


def test_eos_ends_the_answer_unless_ignored(run, monkeypatch):
    monkeypatch.setattr("nanokv.sample.Sampler.__call__", lambda self, logits: torch.tensor([1]))
    report = json.loads(run("hello", "-n", "7", "--json")[1])
    assert (report["token_ids"], report["text"], report["finish_reason"]) == ([1], "", "stop")
    assert json.loads(run("hello", "-n", "7", "--json", "--ignore-eos")[1])["token_ids"] == [1] * 7


def test_padded_ids_are_never_chosen(run, monkeypatch):
    seen = {}
    monkeypatch.setattr("nanokv.sample.Sampler.__call__", lambda self, logits: seen.update(v=self.valid_vocab) or torch.tensor([1]))
    run("hello", "-n", "1")
    assert seen["v"] == 98


def test_sampling_follows_the_printed_seed(run):
    code, out, err = run("hello", "-n", "30", "-t", "1", "--ignore-eos")
    assert code == 0 and err.startswith("note: seed ")
    seed = err.split()[-1]
    assert run("hello", "-n", "30", "-t", "1", "--ignore-eos", "-s", seed) == (0, out, "")
    assert run("hello", "-n", "30", "-t", "1", "--ignore-eos", "-s", str(int(seed) ^ 1))[1] != out
    assert run("hello", "-n", "30", "-t", "1", "--quiet")[2] == ""


def test_stats_are_one_line_on_stderr(run):
    out, err = run("hello", "-n", "9", "--ignore-eos", "--stats", "--policy", "streaming_llm", "--budget", "16", "-t", "1", "-s", "7")[1:]
    assert out.endswith("\n") and err.count("\n") == 1
    for part in ("prompt ", "decode 9 tok", "kv 16 slots x 3 layers 0.0 MiB as planned (full ", "live 16, evicted ", "oldest 0", "| length | seed 7"):
        assert part in err


def test_spellings_of_other_engines(run):
    plain = run("hello", "--policy", "streaming_llm", "--budget", "16", "--sink", "3", "--max-new-tokens", "30", "--chunk", "4")
    for spelling in (
        ["--kv_eviction", "streaming-llm", "--max-kv-size", "16", "--start_size=3", "--n-predict=30"],
        ["--cache_strategy=streaming_llm", "--max_cache_length", "16", "--global_tokens", "3", "--max_tokens", "30"],
        ["--method", "streaming_llm", "--set", "budget=16", "--set", "sink=3", "-n30"],
    ):
        assert run("hello", *spelling, "--chunk", "4") == plain
    assert plain[0] == 0
    assert options.spelled(["--top_k=a_b", "a_b", "--no such_option", "--", "--kv_budget"]) == [
        "--top-k=a_b", "a_b", "--no such_option", "--", "--kv_budget"
    ]  # fmt: skip


def test_no_option_is_named_twice_and_every_alias_has_a_home():
    known = cli.parser()._option_string_actions
    aliases = [a for names in options.ALIASES.values() for a in names]
    assert set(options.ALIASES) <= set(known) and not set(aliases) & set(known) and len(aliases) == len(set(aliases))


def test_notes_are_said_once_and_can_be_silenced(run, tmp_path):
    model = write_checkpoint(tmp_path, max_context=16)
    code, _, err = run("hello hello hello", "-n", "3", model=model)
    assert code == 0 and err.count("\n") == 1 and "beyond the 16" in err
    assert run("hello hello hello", "-n", "3", "--quiet", model=model)[2] == ""
    assert "sink" in run("hello", "-n", "3", "--policy", "window", "--budget", "16")[2]
    assert run("hello", "-n", "3", "--policy", "window", "--budget", "16", "--sink", "4")[2] == ""


def test_what_changes_nothing_is_said(run):
    assert run("hello", "-n", "2", "--top-k", "5", "-s", "3")[2] == "note: at temperature 0, which is greedy, nothing is changed by --top-k, --seed\n"
    assert run("hello", "-n", "2", "--top-k", "5", "-s", "3", "-t", "1")[2] == ""


def test_a_long_prompt_is_seen_to_be_read(run, monkeypatch):
    assert "reading" not in run("hello " * 100, "-n", "2")[2]
    monkeypatch.setattr(cli.sys.stderr, "isatty", lambda: True, raising=False)
    assert "reading" not in run("hello", "-n", "2")[2]
    code, out, err = run("hello " * 100, "-n", "2", "--raw")
    assert code == 0 and "reading 600 tokens [" in err and "reading" not in out


def test_policies_lists_the_registry(capsys):
    assert cli.main(["--policies"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.count("paper: https://") == len(REGISTRY)
    assert "streaming_llm\n    Keep the first tokens as attention sinks" in out
    assert "budget=1024, sink=4, interval=1, positions=cache" in out
    assert "https://arxiv.org/abs/2309.17453\n" in out


def test_help_and_version_are_instant_and_need_no_torch():
    code = "import sys; sys.argv = ['nanokv', sys.argv[1]]; import cli\ntry: cli.main()\nfinally: assert 'torch' not in sys.modules"
    for option, expected in (("--help", "usage: nanokv"), ("--version", "nanokv 0.1.0")):
        done = subprocess.run([sys.executable, "-c", code, option], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(expected)
        module = subprocess.run([sys.executable, "-m", "nanokv", option], cwd=ROOT, capture_output=True, text=True)
        assert (module.returncode, module.stderr, module.stdout) == (0, "", done.stdout)


# ---- mistakes: one line on stderr, nothing on stdout, and the right exit code ----

USAGE = [
    (["hi", "--policy", "window", "--budget", "8", "--sink", "4", "--interval", "5"], "sink 4 + window 0 + interval 5 = 9"),
    (["hi", "--window", "4"], "full, the default policy, keeps everything and has no dials: --window needs another"),
    (["hi", "--policy", "triattention", "--set", "stats="], "--set stats= needs a value"),
    (["hi", "--policy", "triattention", "--set", "reach=9999"], "reach must be a number from 0 to 31, not 9999"),
    (["hi", "--policy", "window", "--budget", "9" * 400], "budget must be below 2^31"),
    (["hi", "--memory", "9" * 400], "no machine has so much memory"),
    (["hi", "--memory", ""], "a size of memory looks like"),
    (["hi", "--plan", "--context", "9" * 400], "--context: must be at most 1,000,000,000,000"),
    (["-f", ""], "--prompt-file needs the name of a file"),
    (["hi", "--policy", "window", "--set", "kernel=3"], "window has no dial 'kernel'"),
    (["hi", "--policy", "window", "--budget", "many"], "dial budget takes int, not 'many'"),
    (["hi", "--policy", "window", "--budget", "8", "--set", "budget=9"], "budget was given twice"),
    (["hi", "--policy", "window", "--set", "budget"], "DIAL=VALUE"),
    (["hi", "--policy", "lru"], "no policy is called 'lru'"),
    ([""], "the prompt is empty"),
    (["hi\udcff"], "the prompt is not UTF-8"),
    (["hi", "-p", "ho"], "given twice"),
    (["hi", "--raw", "--system", "x"], "--system does not go with --raw"),
    (["hi", "-n", "0"], "at least 1"),
    (["hi", "--chunk", "0"], "at least 1"),
    (["hi", "--temperature", "-1"], "temperature must be 0"),
    (["hi", "--top-p", "2", "-t", "1"], "top-p"),
    (["hi", "--stop", ""], "--stop needs a text"),
    (["hi", "--device", "abacus"], "device must be"),
    (["hi", "--device", "cuda:99"], "no device cuda:99"),
    (["hi", "--dtype", "int8"], "--dtype"),
    (["hi", "--stats", "--quiet"], "not allowed with"),
    (["hi", "--polic", "full"], "unrecognized arguments: --polic"),
    (["hi", "there"], "unrecognized arguments: there"),
]


@pytest.mark.parametrize("arguments, words", USAGE, ids=[w for _, w in USAGE])
def test_a_mistake_on_the_command_line(run, arguments, words):
    code, out, err = run(*arguments, model="no/such/model")  # found before the model is looked for
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1 and words in err


def test_a_prompt_that_cannot_be_read(run, monkeypatch, tmp_path):
    file = tmp_path / "latin-1.txt"
    file.write_bytes("caf\u00e9 au lait".encode("latin-1"))
    assert run("-f", str(file)) == (2, "", f"error: {file} is not UTF-8: byte 3 is 0xe9\n")
    pipe(monkeypatch, b"ab\xff")
    assert run() == (2, "", "error: standard input is not UTF-8: byte 2 is 0xff\n")
    for nothing in (b"", b"\n"):
        pipe(monkeypatch, nothing)
        assert run() == (2, "", "error: the prompt is empty\n")
    assert run("-f", str(tmp_path / "none")) == (1, "", f"error: {tmp_path / 'none'}: No such file or directory\n")
    assert run("-f", str(tmp_path)) == (1, "", f"error: {tmp_path}: Is a directory\n")
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    code, out, err = run()
    assert (code, out) == (2, "") and "there is no prompt" in err


def edit_config(directory: Path, **changes) -> None:
    config = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))


def truncate(directory: Path) -> None:
    os.truncate(directory / "model.safetensors", 5000)


def lose_a_shard(directory: Path) -> None:
    names = load_file(directory / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-2-of-2.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def point(directory: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (directory / "model.safetensors").write_text(text)


def reshape(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {"model.norm.weight": torch.ones(31)}, directory / "model.safetensors")


FILES = {
    "no config.json": lambda d: (d / "config.json").unlink(),
    "damaged or cut short (5,000 bytes)": truncate,
    "no model-2-of-2.safetensors": lose_a_shard,
    "git-lfs pointer": point,
    "model.norm.weight has shape [31], but the config makes it [32]": reshape,
    "rope type 'spiral' is not supported": lambda d: edit_config(d, rope_scaling={"rope_type": "spiral"}),
    "tokenizer.json": lambda d: (d / "tokenizer.json").write_text("{"),
    "config.json: config.json must give hidden_size": lambda d: edit_config(d, hidden_size=0),
    "tokenizer_config.json: bos_token must be a text": lambda d: (d / "tokenizer_config.json").write_text('{"bos_token": 1}'),
}


@pytest.mark.parametrize("words", FILES)
def test_a_damaged_checkpoint(run, tmp_path, words):
    FILES[words](write_checkpoint(tmp_path))
    code, out, err = run("hi", model=tmp_path)
    assert (code, out) == (1, "") and err.startswith("error: ") and err.count("\n") == 1 and words in err


def test_no_such_model(run):
    code, out, err = run("hi", model="llama-9-900b")
    assert (code, out) == (1, "") and err.startswith("error: ") and err.count("\n") == 1 and "llama-9-900b" in err


def test_an_empty_chat_template_is_none(run, tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": ""}))
    assert len(json.loads(run("hi", "--json", "-n", "1", model=tmp_path)[1])["prompt_token_ids"]) == 2


def test_a_tokenizer_of_another_model(run, tmp_path):
    write_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:50].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    edit_config(tmp_path, vocab_size=50)
    code, out, err = run("zzz", model=tmp_path)
    assert (code, out) == (1, "") and err.count("\n") == 1 and "its model only 50" in err


def test_debug_shows_where(run):
    code, _, err = run("hi", "--debug", model="llama-9-900b")
    assert code == 1 and "Traceback" in err and err.splitlines()[-1].startswith("error: ")


# ---- people who leave ----


def test_ctrl_c_keeps_what_there_is(run, monkeypatch):
    whole = json.loads(run("hello", "--json", "-n", "20", "--ignore-eos")[1])
    generate = Engine.generate

    def impatient(*arguments, **options):
        for n, token in enumerate(generate(*arguments, **options)):
            if n == 5:
                raise KeyboardInterrupt
            yield token

    monkeypatch.setattr(Engine, "generate", impatient)
    code, out, err = run("hello", "-n", "20", "--ignore-eos")
    assert (code, out, err) == (130, whole["text"][: len(out) - 1] + "\n", "interrupted\n") and len(out) > 2
    code, out, _ = run("hello", "--json", "-n", "20", "--ignore-eos")
    r = json.loads(out)
    assert (code, r["finish_reason"], r["token_ids"]) == (130, "interrupted", whole["token_ids"][:5])
    assert r["usage"]["new_tokens"] == 5 and set(r) == set(whole)


def test_ctrl_c_while_the_prompt_is_read(run, monkeypatch):
    def impatient(self, tokens):
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "extend", impatient)
    code, out, _ = run("hello", "--json")
    r = json.loads(out)
    assert (code, r["finish_reason"], r["token_ids"], r["text"]) == (130, "interrupted", [], "")


def test_a_real_ctrl_c(tiny_dir):
    process = start("--model", tiny_dir, *STREAM)
    begun = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"interrupted\n")
    assert begun and out.endswith(b"\n")


def test_ctrl_c_while_leaving_has_nothing_to_interrupt():
    late = "import atexit, os, signal, cli; atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT)); cli.command()"
    done = subprocess.run([sys.executable, "-c", late, "--none"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: unrecognized arguments: --none (see --help)\n")


def test_a_reader_who_has_enough(tiny_dir):
    process = start("--model", tiny_dir, *STREAM)
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 0
    process = start("--help")
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 0


# ---- the plan ----


def test_a_plan_needs_no_weights_and_says_what_fits(run):
    code, out, err = run("--plan", "--context", "32768", "--policy", "h2o", "--budget", "1024", "--memory", "24GiB", model="llama-2-7b")
    assert code == 0 and not err
    for part in ("512.00 MiB   1,024 slots a head x 512.00 KiB a token; full would hold 16.00 GiB", "longest context in 24.00 GiB"):
        assert part in out


def test_a_plan_that_does_not_fit_says_what_would(run):
    code, out, err = run("--plan", "--context", "32768", "--memory", "24GiB", model="llama-2-7b")
    assert code == 1 and "a prompt of " in err and err.count("\n") == 1 and "16.00 GiB" in out


def test_a_run_that_does_not_fit_is_refused_before_the_weights_are_read(run, monkeypatch):
    from nanokv.loading import Source

    monkeypatch.setattr(Source, "model", lambda self: pytest.fail("the weights were read"))
    code, out, err = run("hello", "--policy", "window", "--sink", "2", "--budget", "30000", "--memory", "2MB")
    assert (code, out) == (1, "") and "peak" in err and "a budget of " in err.splitlines()[-1]
    budget = int(err.split("a budget of ")[1].split()[0].replace(",", ""))
    with pytest.raises(pytest.fail.Exception):  # that budget goes through to the weights
        run("hello", "--policy", "window", "--sink", "2", "--budget", str(budget), "--memory", "2MB")


def test_weights_of_few_bits_answer_too(run):
    for form in ("int8", "int4"):
        code, out, err = run("hello", "--weights", form, "-n", "4", "--json", "--raw")
        assert (code, err) == (0, "") and json.loads(out)["usage"]["new_tokens"] == 4


def test_random_weights_of_a_directory_speak_with_its_tokenizer(run, tmp_path):
    (write_checkpoint(tmp_path) / "model.safetensors").unlink()
    code, out, err = run("zzz", "--random-weights", "-n", "3", "--json", "--raw", model=tmp_path)
    assert code == 0 and "the text is noise" in err and len(json.loads(out)["prompt_token_ids"]) == 3


def test_random_weights_have_the_real_size(run):
    code, out, err = run("hello", "--random-weights", "-n", "3", "--json", "--dtype", "float32", model="smollm2-135m")
    assert code == 0 and "the text is noise" in err
    assert json.loads(out)["kv"]["bytes"] == 2 * 30 * 3 * 64 * (5 + 3) * 4
