"""Checkpoint directories against transformers, and bad files against one sentence."""

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from foreign import MODELS, logits, theirs, tokens
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanokv.checkpoint import load_model
from nanokv.config import read_config
from nanokv.headers import stop_ids


def save(model: transformers.PreTrainedModel, where: Path, **options) -> Path:
    model.save_pretrained(where, **options)
    return where


def edit(directory: Path, **changes) -> None:
    """Change config.json; a value of ... removes the key."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def speak_transformers_4(directory: Path, kind: str) -> None:
    """Rewrite `rope_parameters` as `rope_theta` and `rope_scaling`, with the rule under the key `kind`."""
    rule = json.loads((directory / "config.json").read_text())["rope_parameters"]
    theta, name = rule.pop("rope_theta"), rule.pop("rope_type")
    edit(directory, rope_parameters=..., rope_theta=theta, rope_scaling=None if name == "default" else rule | {kind: name})


@pytest.mark.parametrize("dialect", ["rope_parameters", "rope_type", "type"])
@pytest.mark.parametrize("shard", [None, "10KB"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_agree_with_transformers(name, shard, dialect, tmp_path):
    model = theirs(name)
    save(model, tmp_path, **({"max_shard_size": shard} if shard else {}))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == bool(shard)
    if dialect != "rope_parameters":
        speak_transformers_4(tmp_path, dialect)
    ours = load_model(tmp_path)
    assert (ours.head.weight is ours.embed.weight) == ours.config.tied == bool(model.config.tie_word_embeddings)
    expected = model(tokens()[None]).logits[0]
    assert expected.std() > 0.5
    assert (logits(ours, tokens()) - expected).abs().max() < 1e-4


def test_the_dtype_is_the_checkpoints_own(tmp_path):
    for stored, expected in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32), (torch.float32, torch.float32)):
        save(theirs("qwen2").to(stored), tmp_path / str(stored))
        for config in ({}, {"dtype": ..., "torch_dtype": str(stored)[6:]}, {"torch_dtype": ...}):  # named, old key, not named
            edit(tmp_path / str(stored), **config)
            assert {p.dtype for p in load_model(tmp_path / str(stored)).parameters()} == {expected}
    model = load_model(tmp_path / "torch.float32", dtype=torch.float16)
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert not any(p.requires_grad for p in model.parameters())


def test_a_redundant_head_is_ignored_and_a_different_one_used(tmp_path):
    save(theirs("llama-2-tied"), tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    save_file(stored | {"lm_head.weight": stored["model.embed_tokens.weight"].clone()}, file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load_model(tmp_path)
    assert model.head.weight is model.embed.weight
    save_file(stored | {"lm_head.weight": stored["model.embed_tokens.weight"] + 1}, file)
    with pytest.warns(UserWarning, match="lm_head.weight differs"):
        model = load_model(tmp_path)
    assert torch.equal(model.head.weight, model.embed.weight + 1)


def test_qwen2_has_biases_if_the_file_has(tmp_path):
    save(theirs("qwen2"), tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if not name.endswith("bias")}, file)
    assert load_model(tmp_path).blocks[0].attn.qkv.bias is None


def rewrite(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    """Damage the tensors of model.safetensors."""

    def damage(where: Path) -> None:
        stored = load_file(where / "model.safetensors")
        change(stored)
        save_file(stored, where / "model.safetensors")

    return damage


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda where: (where / name).write_bytes((where / name).read_bytes()[:size])


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
UP = "model.layers.1.mlp.up_proj.weight"
DAMAGE = {
    "missing tensor": (rewrite(lambda t: t.pop(UP)), f"{UP} is missing"),
    "missing tensors": (rewrite(lambda t: [t.pop(UP), t.pop("lm_head.weight")]), r"lm_head.weight \(and 1 more\) is missing"),
    "surplus": (rewrite(lambda t: t.update(extra=torch.ones(1))), "tensor extra has no place"),
    "surplus bias": (rewrite(lambda t: t.update({UP.replace("weight", "bias"): torch.ones(48)})), "bias has no place"),
    "misshapen": (rewrite(lambda t: t.update({UP: torch.ones(48, 31)})), rf"{UP} has shape \[48, 31\].*\[48, 32\]"),
    "integers": (rewrite(lambda t: t.update({UP: torch.ones(48, 32, dtype=torch.int8)})), "stored as int8"),
    "cut short": (cut("model.safetensors", 5000), r"model.safetensors.*\(5,000 bytes\).*download it again"),
    "empty": (cut("model.safetensors", 0), "download it again"),
    "no weights": (lambda where: (where / "model.safetensors").unlink(), "has no model.safetensors"),
    "pointer": (lambda where: (where / "model.safetensors").write_bytes(POINTER), "model.safetensors is a git-lfs pointer"),
    "pointer config": (lambda where: (where / "config.json").write_bytes(POINTER), "config.json is a git-lfs pointer"),
    "cut config": (cut("config.json", 40), "config.json is not JSON"),
    "no config": (lambda where: (where / "config.json").unlink(), "has no config.json"),
    "dtype": (lambda where: edit(where, dtype="float8_e4m3fn"), "float8_e4m3fn"),
    "other sizes": (lambda where: edit(where, num_hidden_layers=4), r"layers.3.*\(and 8 more\) is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_directory_is_one_sentence(damage, tmp_path):
    save(theirs("llama-2"), tmp_path)
    spoil, message = DAMAGE[damage]
    spoil(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        load_model(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path):
    save(theirs("llama-2"), tmp_path)
    rewrite(lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))(tmp_path)
    load_model(tmp_path)


def test_the_index_decides(tmp_path):
    save(theirs("llama-2"), tmp_path, max_shard_size="10KB")
    save_file({"consolidated": torch.ones(1)}, tmp_path / "consolidated.safetensors")  # not in the index: not looked at
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    stored, last = load_file(shards[0]), load_file(shards[-1])
    save_file(last | {name: value + 1 for name, value in stored.items()}, shards[-1])  # stored twice: the index says where
    model = load_model(tmp_path)
    assert torch.equal(model.embed.weight, stored["model.embed_tokens.weight"])
    shard = shards[1]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=f"{shard.name}, which model.safetensors.index.json names"):
        load_model(tmp_path)


REFUSED = [
    (dict(model_type="gemma3"), "'gemma3' is not supported; known: llama, mistral, qwen2, qwen3"),
    (dict(architectures=["LlamaForSequenceClassification"]), "LlamaForSequenceClassification"),
    (dict(quantization_config={"quant_method": "awq"}), "quantised .awq"),
    (dict(hidden_act="gelu"), "'gelu'"),
    (dict(rope_scaling={"type": "dynamic", "factor": 2.0}), "'dynamic' is not supported"),
    (dict(hidden_size=None), "hidden_size"),
    (dict(num_key_value_heads=3), "4 heads of 8 dimensions cannot share 3 KV heads"),
    (dict(layer_types=["full_attention", "sliding_attention"]), "sliding-window"),
    (dict(model_type="mistral"), "sliding-window"),  # by the family's default window of 4096
    (dict(model_type="mistral", sliding_window=4096), "sliding-window"),
    (dict(model_type="qwen2", use_sliding_window=True, sliding_window=4096, max_window_layers=1), "sliding-window"),
    (dict(model_type="qwen2", rope_theta=None), "rope_theta"),
    (dict(model_type="qwen2", num_key_value_heads=None), "num_key_value_heads"),
    (dict(model_type="qwen2", rms_norm_eps=None), "rms_norm_eps"),
]
BASE = dict(
    model_type="llama", vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=10000.0,
)  # fmt: skip


@pytest.mark.parametrize("changes, message", REFUSED)
def test_a_config_that_cannot_run_is_one_sentence(changes, message):
    with pytest.raises(ValueError, match=message):
        read_config(BASE | changes)


@pytest.mark.parametrize(
    "changes",
    [
        dict(model_type="qwen2", use_sliding_window=False, sliding_window=4096, max_window_layers=1),
        dict(model_type="qwen2", use_sliding_window=True, sliding_window=4096, max_window_layers=2),
        dict(model_type="qwen3", layer_types=["full_attention"] * 2, sliding_window=None),
        dict(model_type="mistral", sliding_window=None),
        dict(model_type="mistral", sliding_window=32768),
    ],
)
def test_a_window_that_is_named_but_not_switched_on_is_ignored(changes):
    read_config(BASE | changes)


def test_what_llama_1_leaves_out_has_its_documented_meaning():
    c = read_config({k: v for k, v in BASE.items() if k not in ("num_key_value_heads", "rope_theta", "rms_norm_eps", "max_position_embeddings")})
    assert (c.n_kv_heads, c.rope["rope_theta"], c.norm_eps, c.max_context) == (4, 10000.0, 1e-6, 2048)
    assert not c.tied


def test_stop_ids_are_the_union_of_both_files(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert stop_ids(tmp_path) == {2}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [128001, 128009]}')
    assert stop_ids(tmp_path) == {2, 128001, 128009}
    (tmp_path / "config.json").write_text('{"eos_token_id": null}')
    assert stop_ids(tmp_path) == {128001, 128009}


def test_loading_is_imported_without_the_file_formats():
    code = "import sys, nanokv.checkpoint; print({'gguf', 'safetensors', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
