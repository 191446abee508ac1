"""RoPE against complex multiplication in float64, and frequency rules against transformers."""

import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanokv import rope

D = 16
FREQS = rope.frequencies({"rope_type": "default", "rope_theta": 10000.0}, D, 2048)[0]
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)


def turned(x: torch.Tensor, pos: list[int], freqs: torch.Tensor) -> np.ndarray:
    """Pairs (i, i + D/2) as complex numbers times e^(i pos freq), in float64."""
    half = x.shape[-1] // 2
    z = x[..., :half].double().numpy() + 1j * x[..., half:].double().numpy()
    z = z * np.exp(1j * np.array(pos, dtype=np.float64)[:, None] * freqs.double().numpy())
    return np.concatenate((z.real, z.imag), -1)


def test_rotate_multiplies_pairs_by_a_complex_phase():
    pos = [0, 1, 7, 1000, 4_000_000, -5]
    x = torch.randn(3, len(pos), D)
    assert np.abs(rope.rotate(x, torch.tensor(pos), FREQS).numpy() - turned(x, pos, FREQS)).max() < 2e-6


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_angles_at_position_four_million_are_exact(theta):
    freqs, _ = rope.frequencies({"rope_type": "default", "rope_theta": theta}, 128, 2048)
    for pos in (4, 4_000_000):
        cos, sin = rope.angles(torch.tensor(pos), freqs)
        angle = pos * freqs.double().numpy()
        assert np.abs(cos[:64].numpy() - np.cos(angle)).max() < 1e-6
        assert np.abs(sin[64:].numpy() - np.sin(angle)).max() < 1e-6


def test_rotations_form_a_group():
    x = torch.randn(4, D, dtype=torch.float64)
    a, b = torch.tensor([3, 100, 9000, 0]), torch.tensor([50, -100, 1, 12345])
    once = rope.rotate(x, a + b, FREQS)
    assert torch.allclose(rope.rotate(rope.rotate(x, a, FREQS), b, FREQS), once, atol=1e-6)
    assert torch.allclose(rope.rotate(once, -(a + b), FREQS), x, atol=1e-6)


def test_a_logit_depends_on_the_distance_alone():
    q, k = torch.randn(D), torch.randn(D)

    def logit(i: int, j: int) -> float:
        return float(rope.rotate(q, torch.tensor(i), FREQS) @ rope.rotate(k, torch.tensor(j), FREQS))

    assert logit(10, 3) == pytest.approx(logit(100_010, 100_003), abs=1e-4)
    assert abs(logit(10, 3) - logit(10, 4)) > 1e-3


def test_half_precision_keeps_its_dtype_but_not_its_angles():
    x = torch.randn(2, D).bfloat16()
    out = rope.rotate(x, torch.tensor([257, 15962]), FREQS)  # bfloat16 could not hold these positions
    assert out.dtype == torch.bfloat16
    assert np.abs(out.double().numpy() - turned(x, [257, 15962], FREQS)).max() < 0.03


YARN = [
    dict(factor=4.0),
    dict(factor=4.0, original_max_position_embeddings=64),
    dict(factor=8.0, beta_fast=16, beta_slow=2),
    dict(factor=4.0, attention_factor=0.9),
    dict(factor=40.0, mscale=0.7, mscale_all_dim=1.2),
    dict(factor=4.0, truncate=False),
]


@pytest.mark.parametrize("rule", [dict(rope_type="linear", factor=4.0), dict(rope_type="llama3", **LLAMA3)] + [dict(rope_type="yarn", **y) for y in YARN])
def test_frequencies_agree_with_transformers(rule):
    rule = dict(rule, rope_theta=10000.0)
    config = LlamaConfig(hidden_size=32, num_attention_heads=1, max_position_embeddings=256, rope_parameters=rule)
    expected, factor = ROPE_INIT_FUNCTIONS[rule["rope_type"]](config, "cpu")
    freqs, scale = rope.frequencies(rope.parameters(config.to_dict()), 32, 256)
    assert torch.allclose(freqs, expected, rtol=1e-6)
    assert scale == pytest.approx(factor**2)


def test_yarn_by_a_factor_of_four_scales_logits_as_published():
    _, scale = rope.frequencies({"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}, 128, 32768)
    assert scale == pytest.approx(1.1386294**2, rel=1e-6)


def test_llama3_stretches_long_waves_and_keeps_short_ones():
    plain, _ = rope.frequencies({"rope_type": "default", "rope_theta": 500000.0}, 128, 8192)
    freqs, scale = rope.frequencies({"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3, "original_max_position_embeddings": 8192}, 128, 131072)
    assert scale == 1 and freqs[0] == plain[0]
    assert math.isclose(freqs[-1], plain[-1] / 8, rel_tol=1e-6)
    assert torch.all(freqs[1:] < freqs[:-1])


def test_factors_divide_pair_by_pair():
    factors = [1.0 + i for i in range(D // 2)]
    freqs, scale = rope.frequencies({"rope_type": "factors", "rope_theta": 10000.0, "factors": factors}, D, 2048)
    assert scale == 1
    assert torch.allclose(freqs * torch.tensor(factors), FREQS)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", **LLAMA3}},
    ],
)
def test_every_dialect_of_a_config_says_the_same(config):
    assert rope.parameters(config) == {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}


def test_no_scaling_means_the_default_rule():
    assert rope.parameters({"rope_theta": 1e6, "rope_scaling": None}) == {"rope_type": "default", "rope_theta": 1e6}


def test_theta_is_guessed_for_the_first_llamas_only():
    assert rope.parameters({"model_type": "llama", "vocab_size": 32000})["rope_theta"] == 10000.0
    for config in ({"model_type": "llama", "vocab_size": 128256}, {"model_type": "qwen2", "vocab_size": 32000}):
        with pytest.raises(ValueError, match="rope_theta"):
            rope.parameters(config)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "sinusoid"])
def test_an_unknown_rule_is_an_error(kind):
    with pytest.raises(ValueError, match=f"{kind}.*known: default"):
        rope.frequencies({"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}, D, 2048)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_a_rule_without_its_factor_is_an_error(kind):
    with pytest.raises(ValueError, match="needs 'factor'"):
        rope.frequencies({"rope_type": kind, "rope_theta": 10000.0}, D, 2048)


def test_partial_rotation_is_an_error():
    with pytest.raises(ValueError, match="partial"):
        rope.parameters({"rope_theta": 1e4, "partial_rotary_factor": 0.5})
