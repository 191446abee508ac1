"""The plan's arithmetic: sizes in words, weights, and the figures people quote."""

from dataclasses import replace

import pytest
import torch

from nanokv import make
from nanokv.config import read_config
from nanokv.model import ModelConfig
from nanokv.models import architecture, names
from nanokv.noise import random_model
from nanokv.plan import ENDLESS, Plan, human, largest_budget, longest, size, verdict, weight_bytes

GiB = 1 << 30


def plan(model: str, tokens: int, policy: str = "full", chunk: int | None = None, weights: str = "native", **dials: object) -> Plan:
    return Plan(read_config(architecture(model)), make(policy, **dials), tokens - 256, 256, chunk, 2, weights)


@pytest.mark.parametrize("text, n", [("24GiB", 24 * GiB), ("16 GB", 16 * 10**9), ("800MiB", 800 << 20), ("1.5k", 1500), ("77", 77)])
def test_sizes(text, n):
    assert size(text) == n


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "3 XB", "9" * 400])
def test_no_size(text):
    with pytest.raises(ValueError, match="24GiB|no machine has so much memory: .{1,40}$"):
        size(text)


@pytest.mark.parametrize("model, tokens, gib", [
    ("llama-2-7b", 8192, 4.0), ("llama-2-7b", 32768, 16.0), ("llama-2-13b", 8192, 6.25), ("llama-2-13b", 32768, 25.0),
])  # fmt: skip
def test_the_figures_people_quote(model, tokens, gib):
    assert plan(model, tokens).prefill.pools == gib * GiB


@pytest.mark.parametrize("form", ("native", "int8", "int4"))
@pytest.mark.parametrize("options", (dict(tied=True), dict(qkv_bias=True, qk_norm=True), dict(o_bias=True, mlp_bias=True)))
def test_weights_take_what_is_planned_to_the_byte(form, options):
    c = ModelConfig(vocab_size=128, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, ffn_dim=192, **options)
    model = random_model(c, torch.bfloat16, form=form)
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in (*model.parameters(), *model.buffers())}
    assert sum(storages.values()) == weight_bytes(c, form, 2)


def test_every_registered_architecture_has_about_the_parameters_in_its_name():
    for name in names():
        billions = [part for part in name.split("-") if part[-1] in "bm" and part[:-1].replace(".", "").isdigit()][0]
        said = float(billions[:-1]) * (1 if billions[-1] == "b" else 1e-3)
        assert 0.85 < weight_bytes(read_config(architecture(name)), "native", 1) / 1e9 / said < 1.3, name


def test_qwen3_32b_at_4_bits_on_24_gib_runs_out_in_full():
    assert 16_000 < longest(plan("qwen3-32b", 1000, chunk=512, weights="int4"), 24 * GiB) < 28_000


def test_what_fits_fits_and_one_more_does_not():
    p = plan("llama-2-7b", 8192)
    n = longest(p, 20 * GiB)
    assert plan("llama-2-7b", n).peak <= 20 * GiB < plan("llama-2-7b", n + 64).peak
    assert longest(plan("llama-2-7b", 8192, "streaming_llm", chunk=512), 16 * GiB) >= ENDLESS
    assert longest(p, GiB) == 0


def test_the_budget_that_fits():
    p = plan("llama-2-7b", 40_000, "h2o", chunk=512, budget=30_000)
    budget = largest_budget(p, 20 * GiB)
    assert 0 < budget < 30_000
    assert plan("llama-2-7b", 40_000, "h2o", chunk=512, budget=budget).peak <= 20 * GiB
    assert plan("llama-2-7b", 40_000, "h2o", chunk=512, budget=budget + 64).peak > 20 * GiB
    assert f"a budget of {budget:,}" in verdict(p, 20 * GiB) and verdict(p, 99 * GiB) == ""
    assert "its weights alone" in verdict(p, 10 * GiB)


def test_bytes_in_words():
    assert [human(n) for n in (12, 2048, 5 << 20, 3 * GiB)] == ["12 B", "2.00 KiB", "5.00 MiB", "3.00 GiB"]


def test_what_is_in_the_way_is_named():
    history = plan("smollm2-135m", 2000, "scissorhands", budget=30, history=2**31 - 1)
    assert "no budget makes it fit: most goes into scratch, " in verdict(history, GiB)
    assert "most goes into bookkeeping, " in verdict(replace(history, chunk=1), GiB)
    assert "its weights alone take" in verdict(history, 200 << 20)
