"""Checkpoints against transformers, block formats against a naive decode, and bad files against one sentence."""

import json
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanokv import gguf_file, rope
from nanokv.checkpoint import load_model, stop_ids
from nanokv.config import read_config
from nanokv.gguf_file import GGUF
from nanokv.model import Attend, Transformer

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32)
MODELS = {
    "llama-2": ("Llama", dict(num_key_value_heads=4, rope_parameters=PLAIN)),
    "llama-2-tied": ("Llama", dict(num_key_value_heads=1, rope_parameters=PLAIN, tie_word_embeddings=True)),
    "llama-biased": ("Llama", dict(rope_parameters=PLAIN, attention_bias=True, mlp_bias=True)),
    "llama-3.1": ("Llama", dict(rope_parameters=LLAMA3, max_position_embeddings=512)),
    "mistral": ("Mistral", dict(rope_parameters=PLAIN, sliding_window=None, head_dim=16)),
    "qwen2": ("Qwen2", dict(rope_parameters=PLAIN, tie_word_embeddings=True)),
    "qwen2.5-yarn": ("Qwen2", dict(rope_parameters=YARN, max_position_embeddings=32)),
    "qwen3": ("Qwen3", dict(rope_parameters=PLAIN, head_dim=16)),
}


def causal(freqs: Tensor, scale: float) -> Attend:
    """Plain causal attention over one piece of text: what any memory must reproduce."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        S, D = q.shape[-2:]
        pos = torch.arange(S)
        q, k = rope.rotate(q, pos, freqs), rope.rotate(k, pos, freqs)
        logits = torch.einsum("hgsd,htd->hgst", q, k) * D**-0.5 * scale
        logits = logits.masked_fill(pos > pos[:, None], -torch.inf)
        return torch.einsum("hgst,htd->hgsd", logits.softmax(-1), v)

    return attend


def logits(model: Transformer, tokens: Tensor) -> Tensor:
    c = model.config
    return model(tokens, causal(*rope.frequencies(c.rope, c.head_dim, c.max_context)), every=True)


def theirs(name: str, **changes) -> transformers.PreTrainedModel:
    """A tiny random transformers model whose every parameter, biases and norms too, matters."""
    family, options = MODELS[name]
    sizes = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
    options = sizes | dict(num_key_value_heads=2, max_position_embeddings=256) | options | changes
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**options)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.2) if p.dim() > 1 else p.add_(torch.randn_like(p) * 0.2)
    return model


def tokens(n: int = 60) -> Tensor:
    return torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(1))


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


@torch.no_grad()
def test_smollm2_agrees_with_transformers(smollm2):
    ours = load_model(smollm2)
    prompt = torch.randint(0, 49152, (100,), generator=torch.Generator().manual_seed(0))
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32)
    assert (logits(ours, prompt) - model(prompt[None]).logits[0]).abs().max() < 1e-3
    assert ours.head.weight is ours.embed.weight


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
    load_model(tmp_path)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
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


# GGUF


def gguf_name(name: str) -> str:
    """transformers' tensor name in a GGUF, spelled out by hand for the oracle."""
    for theirs, ours in (
        ("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output"), ("model.layers", "blk"),
        ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"), ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"), ("self_attn.k_norm", "attn_k_norm"), ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"), ("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"),
    ):  # fmt: skip
        name = name.replace(theirs, ours)
    return name


def permuted(x: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows in llama files' order: head by head, dimension i and i + D/2 beside each other."""
    order = [h + i + half for h in range(0, len(x), head_dim) for i in range(head_dim // 2) for half in (0, head_dim // 2)]
    return x[order]


def write_gguf(model: transformers.PreTrainedModel, path: Path, arch: str, skip: tuple[str, ...] = (), **metadata) -> Path:
    """A float32 GGUF of a tiny model; metadata keys with double underscores for dots."""
    c = model.config
    w = gguf.GGUFWriter(path, arch)
    w.add_block_count(c.num_hidden_layers), w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size), w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads), w.add_head_count_kv(c.num_key_value_heads)
    w.add_layer_norm_rms_eps(c.rms_norm_eps), w.add_rope_freq_base(c.rope_parameters["rope_theta"])
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    w.add_key_length(head_dim), w.add_value_length(head_dim)
    for key, value in metadata.items():
        add = {int: w.add_uint32, float: w.add_float32, str: w.add_string, list: w.add_array}[type(value)]
        add(key.replace("__", "."), value)
    for name, value in model.state_dict().items():
        value = value.numpy()
        if name in skip or (name == "lm_head.weight" and c.tie_word_embeddings):
            continue
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            value = permuted(value, head_dim)
        w.add_tensor(gguf_name(name), np.ascontiguousarray(value))
    if c.rope_parameters["rope_type"] == "llama3":
        plain = 1 / c.rope_parameters["rope_theta"] ** (torch.arange(0, head_dim, 2) / head_dim)
        w.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file()
    w.close()
    return path


YARN_KEYS = dict(qwen2__rope__scaling__type="yarn", qwen2__rope__scaling__factor=4.0, qwen2__rope__scaling__original_context_length=32)


@pytest.mark.parametrize(
    "name, arch, metadata",
    [
        ("llama-2", "llama", {}),
        ("llama-2-tied", "llama", {}),
        ("llama-biased", "llama", {}),
        ("llama-3.1", "llama", {}),
        ("mistral", "llama", {}),
        ("qwen2", "qwen2", {}),
        ("qwen2.5-yarn", "qwen2", YARN_KEYS),
        ("qwen3", "qwen3", {}),
    ],
)
@torch.no_grad()
def test_a_gguf_agrees_with_transformers(name, arch, metadata, tmp_path):
    model = theirs(name)
    ours = load_model(write_gguf(model, tmp_path / "tiny.gguf", arch, **metadata))
    assert (logits(ours, tokens()) - model(tokens()[None]).logits[0]).abs().max() < 1e-4
    assert ours.config.tied == bool(model.config.tie_word_embeddings)


def half(raw: bytes) -> float:
    return struct.unpack("<e", raw)[0]


def q8_0(b: bytes) -> list[float]:
    return [half(b[:2]) * q for q in struct.unpack("32b", b[2:])]


def q4_0(b: bytes) -> list[float]:
    return [half(b[:2]) * (q - 8) for q in [x & 15 for x in b[2:]] + [x >> 4 for x in b[2:]]]


def q4_1(b: bytes) -> list[float]:
    return [half(b[:2]) * q + half(b[2:4]) for q in [x & 15 for x in b[4:]] + [x >> 4 for x in b[4:]]]


def q4_k(b: bytes) -> list[float]:
    """Eight runs of 32, each with a 6-bit scale and a 6-bit minimum; the last four's high bits sit in the first four's."""
    d, low, s, qs, out = half(b[:2]), half(b[2:4]), b[4:16], b[16:], []
    for run in range(8):
        if run < 4:
            scale, least = s[run] & 63, s[run + 4] & 63
        else:
            scale, least = s[run + 4] & 15 | s[run - 4] >> 6 << 4, s[run + 4] >> 4 | s[run] >> 6 << 4
        for x in qs[run // 2 * 32 : run // 2 * 32 + 32]:
            out.append(d * scale * (x >> 4 if run % 2 else x & 15) - low * least)
    return out


def q6_k(b: bytes) -> list[float]:
    """Two halves of 128: four low bits, two high bits, a signed scale for every 16."""
    ql, qh, scales, d, out = b[:128], b[128:192], struct.unpack("16b", b[192:208]), half(b[208:]), [0.0] * 256
    for i in range(256):
        side, part, at = i // 128, i % 128 // 32, i % 32
        low = ql[side * 64 + part % 2 * 32 + at] >> (4 if part > 1 else 0) & 15
        high = qh[side * 32 + at] >> 2 * part & 3
        out[i] = d * scales[i // 16] * ((high << 4 | low) - 32)
    return out


def f32(b: bytes) -> list[float]:
    return list(struct.unpack("<f", b))


def f16(b: bytes) -> list[float]:
    return [half(b)]


def bf16(b: bytes) -> list[float]:
    return list(struct.unpack("<f", b"\0\0" + b))


HALVES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q6_K": [208], "F32": [2], "F16": [0], "BF16": [0]}
DECODE = {"Q8_0": q8_0, "Q4_0": q4_0, "Q4_1": q4_1, "Q4_K": q4_k, "Q6_K": q6_k, "F32": f32, "F16": f16, "BF16": bf16}


@pytest.mark.parametrize("kind", DECODE)
def test_blocks_decode_as_written(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_file, "PIECE", 1024)  # several pieces and a rest
    qtype = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[qtype]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (5, 768 // block, size), dtype=np.uint8)
    for at in HALVES[kind]:  # random bytes, but finite scales
        raw[..., at : at + 2] = rng.normal(size=raw.shape[:2]).astype(np.float16)[..., None].view(np.uint8)
    w = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    w.add_tensor("blk.0.ffn_up.weight", raw.reshape(5, -1), raw_dtype=qtype)
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file()
    w.close()
    expected = [[x for b in row for x in DECODE[kind](b.tobytes())] for row in raw]
    found = GGUF(tmp_path / "one.gguf").tensor("model.layers.0.mlp.up_proj.weight")
    assert found.shape == (5, 768)
    assert torch.allclose(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-6)


def test_gguf_metadata_is_what_was_written(tmp_path):
    w = gguf.GGUFWriter(tmp_path / "meta.gguf", "llama")
    w.add_token_list(["a", "é", "<|x|>", ""]), w.add_token_scores([0.5, -1.0]), w.add_uint32("n", 7), w.add_bool("yes", True)
    w.add_eos_token_id(2), w.add_eot_token_id(5)
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file()
    w.close()
    found = GGUF(tmp_path / "meta.gguf").metadata
    assert found["tokenizer.ggml.tokens"] == ["a", "é", "<|x|>", ""]
    assert found["tokenizer.ggml.scores"] == [0.5, -1.0]
    assert (found["n"], found["yes"], found["general.architecture"]) == (7, True, "llama")
    assert stop_ids(tmp_path / "meta.gguf") == {2, 5}


@pytest.mark.parametrize(
    "metadata, message",
    [
        (dict(split__count=2), "one part of 2"),
        (dict(llama__expert_count=8), "8 experts"),
        (dict(llama__attention__sliding_window=64), "sliding-window"),
        (dict(llama__rope__dimension_count=4), "8 dimensions"),
        (dict(llama__rope__scaling__type="longrope"), "'longrope' is not supported"),
        (dict(llama__rope__scaling__type="yarn", llama__rope__scaling__attn_factor=0.5), "attention factor"),
    ],
)
def test_a_gguf_that_cannot_run_is_one_sentence(metadata, message, tmp_path):
    path = write_gguf(theirs("llama-2"), tmp_path / "tiny.gguf", "llama", **metadata)
    with pytest.raises(ValueError, match=message):
        load_model(path)


def test_a_gguf_of_another_architecture_or_without_a_tensor_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="'gemma3' is not supported"):
        load_model(write_gguf(theirs("qwen2"), tmp_path / "a.gguf", "gemma3"))
    with pytest.raises(ValueError, match=f"{UP} is missing"):
        load_model(write_gguf(theirs("llama-2"), tmp_path / "b.gguf", "llama", skip=(UP,)))


def test_a_damaged_gguf_is_one_sentence(tmp_path):
    whole = write_gguf(theirs("llama-2"), tmp_path / "whole.gguf", "llama").read_bytes()
    part = tmp_path / "part.gguf"
    for size in [*range(8, 2000, 61), len(whole) // 2, len(whole) - 1]:
        part.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=f"part.gguf is cut short at {size:,} bytes .*download it again"):
            load_model(part)
    for start, message in ((POINTER, "git-lfs pointer"), (b"hello", "not a GGUF"), (b"", "not a GGUF"), (b"GGUF\1\0\0\0", "version 2 or 3")):
        part.write_bytes(start)
        with pytest.raises(ValueError, match=message):
            load_model(part)
