"""The formulas behind TriAttention against a plain series of cosines, and the files that hold statistics."""

import cmath
import math
import os
import pickle
import random

import pytest
import torch
from torch import Tensor

from nanokv.query_stats import QueryStats, add, expected, lengths, load, means, sums, z_scores
from nanokv.rope import rotate

OFFSETS = [2**n for n in range(17)]


def table(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def series(k: list[complex], q: list[complex], size: list[float], at: int, t0: int, freqs: list[float]) -> list[float]:
    """The paper's sum of cosines for one key, before RoPE and at position `at`, for every offset."""
    strays = sum((a - abs(c)) * abs(x) for a, c, x in zip(size, q, k))
    phases = [cmath.phase(c) - cmath.phase(x) for c, x in zip(q, k)]
    amplitudes = [abs(c) * abs(x) for c, x in zip(q, k)]
    return [
        strays + sum(a * math.cos(w * (t0 - at + n) + p) for a, w, p in zip(amplitudes, freqs, phases)) for n in OFFSETS
    ]


def halves(x: list[float]) -> list[complex]:
    return [complex(a, b) for a, b in zip(x[: len(x) // 2], x[len(x) // 2 :])]


def neighbours(x: list[float]) -> list[complex]:
    return [complex(a, b) for a, b in zip(x[::2], x[1::2])]


FREQS = {
    "full": [1.0, 0.3, 0.01, 0.0005],
    "partial": [1.0, 0.1, 0.0, 0.0],  # half of the dimensions do not turn
}


@pytest.mark.parametrize("aggregate", ("mean", "max"))
@pytest.mark.parametrize("freqs", FREQS.values(), ids=FREQS)
@pytest.mark.parametrize("pairing", (halves, neighbours))
@pytest.mark.parametrize("t0", (60, 2000, 100_000))
def test_one_product_with_the_turned_key_is_the_whole_series(pairing, freqs, aggregate, t0):
    """The series needs to know where a key stands and what it was before RoPE; the product does not."""
    H, G, N, D = 2, 3, 7, 8
    before, mean = table(H, N, D), table(H, G, D, seed=1)
    size = lengths(mean) + table(H, G, D // 2, seed=2).abs()
    pos = [random.Random(t0).randrange(t0) for _ in range(N)]
    if pairing is neighbours:  # interleaved is half-split after a permutation of the dimensions
        apart = [0, 2, 4, 6, 1, 3, 5, 7]
        keys, centre = before[..., apart], mean[..., apart]
        size = lengths(centre) + table(H, G, D // 2, seed=2).abs()
    else:
        keys, centre = before, mean
    w = torch.tensor(freqs)
    got = expected(rotate(keys, torch.tensor(pos), w), centre, size, torch.tensor([t0]), w, aggregate=aggregate)
    reduce = max if aggregate == "max" else lambda x: sum(x) / len(x)
    w = w.tolist()
    want = [
        [
            [reduce(series(pairing(before[h, s].tolist()), pairing(mean[h, g].tolist()), size[h, g].tolist(), pos[s], t0, w))
             for s in range(N)]
            for g in range(G)
        ]
        for h in range(H)
    ]  # fmt: skip
    torch.testing.assert_close(got, torch.tensor(want), atol=2e-5, rtol=0)


def test_the_pool_of_all_heads_can_be_asked_at_once():
    keys, mean, size, w = table(11, 8), table(2, 3, 8), table(2, 3, 4).abs() + 3, torch.tensor(FREQS["full"])
    for aggregate in ("mean", "max"):
        got = expected(keys, mean, size, torch.tensor([5]), w, aggregate=aggregate)
        want = expected(keys.expand(2, -1, -1), mean, size, torch.tensor([5]), w, aggregate=aggregate)
        torch.testing.assert_close(got, want)


def test_without_one_term_or_the_other():
    keys, mean, w = table(2, 5, 8), table(2, 3, 8), torch.tensor(FREQS["full"])
    size, t0 = lengths(mean) + 0.5, torch.tensor([9])
    stray, whole = 0.5 * lengths(keys).sum(-1)[:, None].expand(-1, 3, -1), size @ lengths(keys).mT
    torch.testing.assert_close(expected(keys, mean, size, t0, w, trig=False), stray)
    torch.testing.assert_close(expected(keys, mean, size, t0, w, trig=False, mlr=False), whole)
    both = expected(keys, mean, size, t0, w)
    torch.testing.assert_close(expected(keys, mean, size, t0, w, mlr=False), both - stray + whole)


def test_z_scores_are_of_those_that_are_judged():
    raw = torch.tensor([[[1.0, 2.0, 3.0, 1e9, torch.inf]]])
    judged = torch.tensor([[True, True, True, False, False]])
    a = 1.5**0.5
    torch.testing.assert_close(z_scores(raw, judged), torch.tensor([[[-a, 0.0, a, 0.0, 0.0]]]))
    assert z_scores(torch.full((1, 1, 4), 7.0), judged[:, :4]).tolist() == [[[0.0] * 4]]
    assert z_scores(raw, torch.zeros(1, 5, dtype=torch.bool)).tolist() == [[[0.0] * 5]]


def test_sums_become_means_of_what_was_added():
    q = table(2, 3, 10, 8)
    kept = {name: torch.zeros(shape, dtype=torch.float64) for name, (shape, _) in sums(2, 3, 8).items()}
    for part in q.split((1, 4, 5), 2):
        add(kept, part)
    mean, size = means(kept)
    torch.testing.assert_close(mean, q.double().mean(2))
    torch.testing.assert_close(size, (q[..., :4] ** 2 + q[..., 4:] ** 2).sqrt().double().mean(2), atol=1e-6, rtol=0)


# ---- files ----


def stats(L: int = 2, Hq: int = 4, D: int = 8, model: str = "a-model") -> QueryStats:
    return QueryStats(table(L, Hq, D), table(L, Hq, D // 2, seed=1).abs(), torch.tensor(FREQS["full"])[: D // 2], model)


def room(H: int = 2, G: int = 2, D: int = 8) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in sums(H, G, D).items()}


def official(folder, name: str = "stats.pt", L: int = 2, Hq: int = 4, F: int = 4, **more: object) -> str:
    """The layout that TriAttention's authors publish."""
    heads = {
        f"layer{layer:02d}_head{head:02d}": {
            "q_mean_real": table(F, seed=layer), "q_mean_imag": table(F, seed=head + 10), "q_abs_mean": table(F).abs() + 9,
        }
        for layer in range(L) for head in range(Hq)
    }  # fmt: skip
    path = str(folder / name)
    torch.save({"metadata": {"rope_style": "half"}, "stats": heads} | more, path)
    return path


def test_a_file_gives_back_what_was_saved(tmp_path):
    path, s = tmp_path / "s.safetensors", stats()
    s.save(path)
    got = load(path)
    assert got.model == "a-model" and got.note == ""
    for name in ("mean", "size", "freqs"):
        assert torch.equal(getattr(got, name), getattr(s, name))
    for layer in (0, 1):
        kept = room()
        got.into(kept, layer, s.freqs)
        mean, size = means(kept)
        assert torch.equal(mean.flatten(0, 1), s.mean[layer]) and torch.equal(size.flatten(0, 1), s.size[layer])


def test_a_file_that_changed_is_read_again(tmp_path):
    path = tmp_path / "s.safetensors"
    stats(model="one").save(path)
    assert load(path).model == "one" and load(path) is load(path)
    path.unlink()
    stats(model="two").save(path)
    assert load(path).model == "two"


def test_the_official_layout(tmp_path):
    """Real and imaginary parts are the two halves; it says nothing about frequencies, and the user is told so."""
    got = load(official(tmp_path))
    assert got.mean.shape == (2, 4, 8) and got.size.shape == (2, 4, 4) and got.freqs is None
    torch.testing.assert_close(got.mean[1, 3], torch.cat((table(4, seed=1), table(4, seed=13))))
    assert "RoPE" in got.note and "stats.pt" in got.note
    got.into(room(), 1, torch.tensor([5.0, 4.0, 3.0, 2.0]))


@pytest.mark.parametrize("layer, shape, freqs, model, words", (
    (0, (2, 2, 8), FREQS["full"], "org/A-Model", None),
    (0, (2, 2, 8), FREQS["full"], "models/a-model.gguf", None),
    (0, (2, 2, 8), FREQS["full"], "", None),
    (0, (2, 2, 8), FREQS["full"], "b-model", "a-model, not for b-model"),
    (0, (2, 2, 8), [1.0, 0.3, 0.01, 0.0004], "", "RoPE frequencies"),
    (2, (2, 2, 8), FREQS["full"], "", "2 layers"),
    (0, (2, 3, 8), FREQS["full"], "", "6 heads"),
    (0, (2, 2, 6), FREQS["full"][:3], "", "heads of 6"),
))  # fmt: skip
def test_statistics_of_another_model_are_refused(tmp_path, layer, shape, freqs, model, words):
    path = tmp_path / "s.safetensors"
    stats().save(path)
    kept = room(*shape)
    if words is None:
        load(path).into(kept, layer, torch.tensor(freqs), model)
        assert kept["count"] == 1
        return
    with pytest.raises(ValueError, match=words) as error:
        load(path).into(kept, layer, torch.tensor(freqs), model)
    assert str(path) in str(error.value) and not kept["count"]


class Evil:
    """What a pickle may do to those who trust it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def broken(folder) -> dict[str, str]:
    """Files that hold no statistics, by what is wrong with them."""
    text, empty, short, other = (folder / n for n in ("text.safetensors", "empty.pt", "short.safetensors", "other.safetensors"))
    text.write_text("these are no tensors, and they are many more than eight bytes")
    empty.touch()
    stats().save(short)
    short.write_bytes(short.read_bytes()[:100])
    from safetensors.torch import save_file

    save_file({"mean": torch.zeros(1, 2, 4)}, other)
    shape, nan = folder / "shape.safetensors", folder / "nan.safetensors"
    save_file({"mean": torch.zeros(1, 2, 4), "size": torch.zeros(1, 2, 3), "freqs": torch.zeros(2)}, shape)
    save_file({"mean": torch.full((1, 2, 4), torch.nan), "size": torch.zeros(1, 2, 2), "freqs": torch.zeros(2)}, nan)
    evil = folder / "evil.pt"
    evil.write_bytes(pickle.dumps(Evil(folder / "done"), 2))
    names = {"layer00_head00": {}, "layer00_head02": {}}
    return {
        "absent": str(folder / "absent.pt"), "a folder": str(folder), "text": str(text), "empty": str(empty), "short": str(short),
        "other": str(other), "shape": str(shape), "nan": str(nan), "evil": str(evil),
        "no stats": official(folder, "a.pt", stats=None), "no heads": official(folder, "b.pt", stats={}),
        "some heads": official(folder, "c.pt", stats=names), "odd names": official(folder, "d.pt", stats={"head": 1}),
        "no mean": official(folder, "e.pt", stats={"layer00_head00": {}}), "a list": official(folder, "f.pt", stats=[1, 2]),
    }  # fmt: skip


def test_what_is_no_statistics_file_is_said_in_one_sentence(tmp_path):
    for what, path in broken(tmp_path).items():
        with pytest.raises(ValueError) as error:
            load(path)
        words = str(error.value)
        assert path in words and "\n" not in words and "weights_only" not in words and len(words) < 300, (what, words)
    assert not (tmp_path / "done").exists(), "a file was trusted"
