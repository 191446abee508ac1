"""GGUF files against transformers, block formats against a naive decode, and bad files against one sentence."""

import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from foreign import logits, theirs, tokens

from nanokv import gguf_file
from nanokv.checkpoint import load_model
from nanokv.gguf_file import GGUF
from nanokv.headers import stop_ids
from nanokv.quantize import Int4, Int8

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
UP = "model.layers.1.mlp.up_proj.weight"


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


@pytest.mark.slow
@torch.no_grad()
def test_smollm2_agrees_with_transformers(smollm2):
    ours = load_model(smollm2)
    prompt = torch.randint(0, 49152, (100,), generator=torch.Generator().manual_seed(0))
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32)
    assert (logits(ours, prompt) - model(prompt[None]).logits[0]).abs().max() < 1e-3
    assert ours.head.weight is ours.embed.weight


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
    own = GGUF(tmp_path / "one.gguf").codes("model.layers.0.mlp.up_proj.weight")
    assert (own is not None) == (kind in ("Q4_0", "Q4_1"))
    assert own is None or torch.allclose(own.rows(torch.float32), found, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_smollm2_keeps_its_own_codes(smollm2):
    coded, native = load_model(smollm2, form="int4"), load_model(smollm2)
    layer, dense = coded.blocks[7], native.blocks[7]
    for ours, w in ((layer.attn.qkv, dense.attn.qkv.weight), (layer.mlp.down, dense.mlp.down.weight)):
        assert type(ours) is Int4
        assert (ours.dense(torch.float32) - w).norm() < 4e-3 * w.norm(), "but for scales of 8 bits of precision"
    assert type(coded.head) is Int8 and coded.head.codes.data_ptr() == coded.embed.codes.data_ptr(), "tied"


def test_formats_are_as_large_as_the_library_says():
    theirs = {int(kind): (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    both = theirs.keys() & gguf_file.FORMATS  # versions of it know more or fewer
    assert len(both) > 20 and all(gguf_file.FORMATS[kind] == theirs[kind] for kind in both)


def test_a_header_is_read_again_when_its_file_has_changed(tmp_path):
    for eos in (2, 3):
        w = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
        w.add_eos_token_id(eos), w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
        assert stop_ids(tmp_path / "m.gguf") == {eos}
        time.sleep(0.02)


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
