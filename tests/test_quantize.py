"""Codes against loops, kernels against the plain layer."""

import foreign
import pytest
import torch
from torch import Tensor

from nanokv import processor, quantize, sweep
from nanokv.checkpoint import filled, name_table
from nanokv.config import read_config
from nanokv.headers import Safetensors, read_config_of
from nanokv.quantize import FEW, GROUP, Coded, Codes, Embedding, Int4, Int8, bits_of, linear


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def off(a: Tensor, b: Tensor) -> float:
    """Relative distance, l2."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def test_8_bits_are_a_scale_per_row():
    w = noise(5, 40)
    m = Codes.of(w, 8)
    for i in range(5):
        scale = float(m.scale[i, 0])
        assert abs(scale * 127 / float(w[i].abs().max()) - 1) < 0.005, "rounded to bfloat16"
        for j in range(40):
            assert abs(int(m.codes[i, j]) * scale - float(w[i, j])) <= scale * 1.01
    assert torch.equal(m.rows(torch.float32), m.codes.float() * m.scale.float())


def test_4_bits_are_a_scale_and_a_zero_per_group():
    w = noise(3, 2 * GROUP)
    m = Codes.of(w, 4)
    assert m.codes.min() >= -8 and m.codes.max() <= 7 and m.scale.shape == m.zero.shape == (3, 2)
    for i in range(3):
        for j in range(2 * GROUP):
            scale, zero = float(m.scale[i, j // GROUP]), float(m.zero[i, j // GROUP])
            again = int(m.codes[i, j]) * scale + zero
            assert abs(again - float(m.rows(torch.float32)[i, j])) < 1e-6
            assert abs(again - float(w[i, j])) < 0.6 * scale, "half a step, and what rounding scale and zero adds"


@pytest.mark.parametrize("bits", (8, 4))
def test_a_constant_matrix_survives(bits):
    for value in (0.0, 1.0, -1.0):
        w = torch.full((2, GROUP), value)
        assert (Codes.of(w, bits).rows(torch.float32) - w).abs().max() < 0.005


KINDS = {
    "int8": lambda w: (Int8, Codes.of(w, 8), 8),
    "int4": lambda w: (Int4, Codes.of(w, 4), 4),
}


@pytest.mark.parametrize("short, close", ((torch.float32, 1e-5), (torch.bfloat16, 5e-3)))
@pytest.mark.parametrize("N, K", ((64, 64), (192, 96), (960, 576)))
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_agree_with_the_plain_layer(kind, N, K, short, close, monkeypatch):
    monkeypatch.setattr(quantize, "SHORT", short)  # in float32 the kernels are slow, and exact
    cls, matrix, bits = KINDS[kind](noise(N, K))
    fast, plain = linear(matrix, bits), Coded(matrix)
    assert type(fast) is cls
    for rows in (1, 3, FEW, FEW + 1, 100):
        x = noise(rows, K, seed=rows)
        want = plain(x.double())
        assert off(fast(x), want) < (close if rows <= FEW else 1e-5), "a long text is multiplied in its own dtype"
    for dtype in (torch.float32, torch.bfloat16):
        assert fast(x[0].to(dtype)).shape == (N,) and fast(x.to(dtype)).dtype == dtype


@pytest.mark.parametrize("flags, swept", (({"avx2", "avx512bw"}, True), ({"avx2"}, False)))
def test_a_compiled_step_sweeps_codes_where_the_processor_widens_bytes(flags, swept, monkeypatch):
    monkeypatch.setattr(processor, "features", lambda: flags)
    matrix, x, calls = Codes.of(noise(64, 32), 8), noise(1, 32), []
    layer, product = linear(matrix, 8), sweep.product
    monkeypatch.setattr(sweep, "product", lambda *given: calls.append(given) or product(*given))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert off(layer(x), Coded(matrix)(x.double())) < 5e-3 and bool(calls) == swept


def test_packed_codes_come_back_as_they_went_in():
    matrix = Codes.of(noise(128, 96), 4)
    assert torch.equal(linear(matrix, 4).dense(torch.float32), matrix.rows(torch.float32))


def test_what_no_kernel_takes_is_multiplied_plainly():
    assert type(linear(Codes.of(noise(40, 32), 4), 4)) is Coded, "40 rows are no whole blocks"
    assert off(linear(Codes.of(noise(40, 32), 4), 4)(noise(2, 32)), noise(2, 32) @ noise(40, 32).T) < 0.1


def test_a_bias_is_added_and_matrices_are_stacked():
    a, b, bias, x = Codes.of(noise(64, 32), 8), Codes.of(noise(64, 32, seed=1), 8), noise(128), noise(2, 32)
    both = linear(Codes.stacked([a, b]), 8, bias)
    want = torch.cat((Coded(a)(x), Coded(b)(x)), 1) + bias
    assert off(both(x), want) < 5e-3


def test_an_embedding_shows_the_rows_of_its_tokens():
    matrix = Codes.of(noise(10, 64), 8)
    rows = Embedding(matrix, torch.float32)(torch.tensor([3, 9, 3]))
    assert torch.equal(rows, matrix.rows(torch.float32)[[3, 9, 3]])


class Rounded:
    """A checkpoint whose matrices were replaced by what their codes say."""

    def __init__(self, stored: Safetensors, places: dict, form: str):
        self.stored, self.shapes, self.places, self.form = stored, stored.shapes, places, form

    def tensor(self, name: str) -> Tensor:
        w, place = self.stored.tensor(name), self.places[name][0]
        return w if w.dim() == 1 else Codes.of(w, bits_of(place, self.form)).rows(torch.float32)


@pytest.mark.parametrize("form", ("int8", "int4"))
@pytest.mark.parametrize("name", ("llama-2-tied", "llama-biased", "qwen2", "qwen3"))
def test_a_model_of_codes_is_the_model_that_its_codes_describe(name, form, tmp_path):
    foreign.theirs(name).save_pretrained(tmp_path)
    stored, c = Safetensors(tmp_path), read_config(read_config_of(tmp_path))
    coded = filled(c, stored, torch.float32, "cpu", form)
    rounded = filled(c, Rounded(stored, name_table(c), form), torch.float32, "cpu")
    tokens = foreign.tokens()
    assert len(tokens) > FEW
    assert (foreign.logits(coded, tokens) - foreign.logits(rounded, tokens)).abs().max() < 1e-4
    few = foreign.logits(coded, tokens[:5]), foreign.logits(rounded, tokens[:5])
    assert off(*few) < 0.05, "the kernels round activations"
    assert sum(b.nbytes for b in coded.buffers()) < 0.5 * sum(p.nbytes for p in rounded.parameters())
