"""Calibration: what is gathered is what enters RoPE, whatever the text's length, and a mistake is one sentence."""

import io
import itertools
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import tiny
from torch import Tensor

import nanokv.calibrate
from nanokv.calibrate import calibrate, ids_of, main, segments
from nanokv.engine import Engine
from nanokv.model import Transformer
from nanokv.policies.full import Full
from nanokv.policies.triattention import TriAttention
from nanokv.query_stats import load


@dataclass
class Letters:
    """A tokenizer: every character is a token."""

    add_bos: bool = False
    bos_id: int | None = 96

    def encode(self, text: str, bos: bool = True) -> list[int]:
        assert not bos, "BOS belongs to segments, not to wherever a block of the file begins"
        return [ord(c) % 90 for c in text]


def heard(model: Transformer, texts: list[list[int]]) -> Tensor:
    """Queries before RoPE of all tokens, caught where the layers make them [L, Hq, T, D]."""
    c, found = model.config, [[] for _ in model.blocks]

    def catch(layer: int, out: Tensor) -> None:
        found[layer].append(out.flatten(1)[:, : c.n_heads * c.head_dim].unflatten(1, (c.n_heads, c.head_dim)))

    watched = [block.attn.q_norm if c.qk_norm else block.attn.qkv for block in model.blocks]
    hooks = [m.register_forward_hook(lambda _, args, out, layer=i: catch(layer, out)) for i, m in enumerate(watched)]
    for text in texts:
        Engine(model, Full()).extend(text)
    for hook in hooks:
        hook.remove()
    return torch.stack([torch.cat(x) for x in found]).transpose(1, 2)


def text(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(97, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("shape", (dict(), dict(qk_norm=True), dict(n_heads=6, qkv_bias=True)))
@pytest.mark.parametrize("chunk", (None, 7))
def test_it_is_the_mean_of_what_enters_rope(shape, chunk):
    """After q_norm and before RoPE, over all tokens of all segments; in any chunks."""
    model, texts = tiny(**shape), text(30, 30, 11)
    got, q = calibrate(model, texts, chunk, "tiny"), heard(model, texts).double()
    torch.testing.assert_close(got.mean, q.mean(2).float(), atol=1e-6, rtol=0)
    length = (q[..., :4] ** 2 + q[..., 4:] ** 2).sqrt()
    torch.testing.assert_close(got.size, length.mean(2).float(), atol=1e-6, rtol=0)
    assert got.model == "tiny" and torch.equal(got.freqs, Engine(model, Full()).freqs)


def test_sums_do_not_round_in_a_model_of_few_bits():
    """Only the queries themselves are in bfloat16."""
    model = tiny().bfloat16()
    got, q = calibrate(model, text(300)), heard(model, text(300)).double()
    torch.testing.assert_close(got.mean, q.mean(2).float(), atol=1e-6, rtol=0)


def test_memory_is_bounded_by_a_segment():
    """2,000 tokens in segments of 40: no more than 40 slots are ever taken."""
    taken = []
    empty = nanokv.calibrate.Engine.reset

    def reset(engine: Engine, *args: int) -> None:
        empty(engine, *args)
        taken.append(len(engine.slots[0].k) // 2)

    with mock.patch.object(nanokv.calibrate.Engine, "reset", reset):
        calibrate(tiny(), segments(iter(text(2000)[0]), 40, []))
    assert taken == [40] * 50


def test_every_segment_has_a_beginning():
    assert list(segments(iter(range(7)), 4, [99])) == [[99, 0, 1, 2], [99, 3, 4, 5], [99, 6]]
    assert list(segments(iter(range(4)), 4, [])) == [[0, 1, 2, 3]]
    assert list(segments(iter([]), 4, [99])) == []


def test_a_text_is_tokenized_piece_by_piece_and_cut_at_line_ends():
    words = "".join(f"line {i}\n" for i in range(200))
    with mock.patch.object(nanokv.calibrate, "BLOCK", 50), mock.patch.object(Letters, "encode", side_effect=lambda t, bos: [t]):
        pieces = list(ids_of(io.StringIO(words), Letters()))
    assert "".join(pieces) == words and len(pieces) > 20 and all(p.endswith("\n") and len(p) < 101 for p in pieces)


# ---- the command ----


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run it on a tiny model -> (exit code, stderr)."""
    monkeypatch.setattr(nanokv.calibrate, "load", lambda name, dtype, device: (tiny(max_context=64), Letters()))

    def run(*arguments: object) -> tuple[int, str]:
        code = main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert out == ""
        return code, err

    return run


def test_the_file_it_writes_is_the_file_that_triattention_reads(command, tmp_path):
    source, target = tmp_path / "text.txt", tmp_path / "stats.safetensors"
    source.write_text("Some text, longer than a context of 64 tokens; it is cut, and each part read alone.\n" * 3)
    code, err = command("--model", "org/Tiny", source, "-o", target)
    ids = Letters().encode(source.read_text(), bos=False)
    assert code == 0 and f"read {len(ids)} tokens" in err and not list(tmp_path.glob("*.part"))
    want = calibrate(tiny(max_context=64), [ids[a : a + 64] for a in range(0, len(ids), 64)])
    got = load(target)
    assert got.model == "tiny" and torch.allclose(got.mean, want.mean, atol=1e-5) and torch.allclose(got.size, want.size, atol=1e-5)
    engine = Engine(tiny(max_context=64), TriAttention(budget=16, stats=str(target)))
    assert engine.extend(list(range(40))).isfinite().all()


def test_it_reads_as_many_tokens_as_it_is_told(command, tmp_path):
    source = tmp_path / "text.txt"
    source.write_text("x y z " * 100)
    for n in (1, 64, 100):
        code, err = command(source, "--model", "m", "-o", tmp_path / "s.safetensors", "--tokens", n, "--chunk", 9)
        assert code == 0 and f"read {n} tokens" in err


def test_mistakes_are_one_sentence_and_an_exit_code(command, tmp_path):
    good, empty, latin = (tmp_path / n for n in ("good.txt", "empty.txt", "latin.txt"))
    good.write_text("text"), empty.write_text(""), latin.write_bytes(b"caf\xe9 au lait")
    out = tmp_path / "s.safetensors"
    for arguments, code, words in (
        ((tmp_path / "absent.txt", "-m", "m", "-o", out), 1, "absent.txt: No such file"),
        ((tmp_path, "-m", "m", "-o", out), 1, "Is a directory"),
        ((empty, "-m", "m", "-o", out), 1, "empty.txt holds no text"),
        ((latin, "-m", "m", "-o", out), 1, "latin.txt is not UTF-8"),
        ((good, "-m", "m", "-o", tmp_path / "no" / "s.safetensors"), 1, "No such file"),
        ((good, "-m", "m", "-o", tmp_path / "s.pt"), 2, ".safetensors"),
        ((good, "-m", "m", "-o", out, "--tokens", "0"), 2, "--tokens"),
        ((good, "-m", "m", "-o", out, "--chunk", "-1"), 2, "--chunk"),
        ((good, "-m", "m", "-o", out, "--device", "abacus"), 2, "device must be"),
        ((good, "-o", out), 2, "--model"),
        (("-m", "m", "-o", out), 2, "text"),
    ):
        got, err = command(*arguments)
        assert got == code and words in err and err.startswith("error: ") and err.count("\n") == 1, (arguments, got, err)
        assert not out.exists() and not list(tmp_path.glob("*.part"))


def test_a_model_that_is_not_there(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("text")
    assert main([str(tmp_path / "text.txt"), "--model", "no-such-model", "-o", str(tmp_path / "s.safetensors")]) == 1
    assert "no-such-model" in capsys.readouterr().err


def test_a_tokenizer_of_another_model(command, tmp_path, monkeypatch):
    monkeypatch.setattr(Letters, "encode", lambda self, text, bos: [5, 97])
    (tmp_path / "text.txt").write_text("text")
    code, err = command(tmp_path / "text.txt", "-m", "m", "-o", tmp_path / "s.safetensors")
    assert code == 1 and "token 97" in err


def test_ctrl_c_leaves_what_was_there(command, tmp_path):
    source, target = tmp_path / "text.txt", tmp_path / "s.safetensors"
    source.write_text("text " * 100)
    target.write_text("older")
    calls = itertools.count()

    def interrupt(*args: object) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt

    with mock.patch.object(nanokv.calibrate, "add", interrupt):
        code, err = command(source, "-m", "m", "-o", target)
    assert code == 130 and "nothing was written" in err and target.read_text() == "older" and not list(tmp_path.glob("*.part"))


def test_as_a_module_on_a_real_model(smollm2, tmp_path):
    """A few hundred tokens; and what another model's file is answered with."""
    source, target = tmp_path / "text.txt", tmp_path / "s.safetensors"
    source.write_text((Path(nanokv.calibrate.__file__)).read_text())
    run = [sys.executable, "-m", "nanokv.calibrate", str(source), "--model", str(smollm2), "-o", str(target), "--tokens", "300"]
    done = subprocess.run(run, capture_output=True, text=True, cwd=Path(nanokv.calibrate.__file__).parent.parent)
    assert done.returncode == 0 and done.stdout == "", done.stderr
    stats = load(target)
    assert stats.mean.shape == (30, 9, 64) and stats.model == "smollm2-135m"
    crowded = stats.mean.unflatten(2, (2, 32)).norm(dim=2) / stats.size  # the paper's concentration R, 0 to 1
    assert crowded.max() <= 1 and crowded.median() > 0.3
    with pytest.raises(ValueError, match="30 layers of 9 heads"):
        Engine(tiny(), TriAttention(stats=str(target))).extend([1])
