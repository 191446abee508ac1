"""A checkpoint on disk -> a Transformer: config.json with safetensors, or one GGUF file.

The insight that makes it short: every format is a mapping from Hugging Face tensor names to
memory-mapped values, and one table says where each name lands. Parameters are allocated once, in
their final dtype, and filled tensor by tensor: the peak is the weights plus one tensor.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from .config import read_config
from .gguf_file import GGUF
from .headers import EMBED, Safetensors, own_dtype, read_config_of
from .memory import BITS, weight_bytes
from .model import ModelConfig, Transformer
from .pages import Room
from .quantize import Codes, bits_of, coded_places, put

HEAD = "lm_head.weight"


class Weights(Protocol):
    """Where tensors come from: their shapes by Hugging Face name, and their values one at a time."""

    shapes: Mapping[str, tuple[int, ...]]

    def tensor(self, name: str) -> Tensor:
        """The values of one tensor, in the dtype they are stored in (GGUF: float32)."""
        ...


def load_model(path: Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu", form: str = "native") -> Transformer:
    """The model in a checkpoint directory or a .gguf file, ready to run. form: of its matrices, native, int8 or int4.

    dtype None: the one config.json names, or else the one the embedding is stored in; float32
    for GGUF, and instead of float16 on a CPU, where half precision is slow and Qwen2 overflows.
    Raises ValueError or FileNotFoundError, one sentence, for a file that is missing or damaged,
    or does not fit.
    """
    path = Path(path)
    config = read_config_of(path)
    stored = Safetensors(path) if path.is_dir() else None
    weights: Weights = stored or GGUF(path)
    try:
        shape = _fitted(read_config(config), weights)
        own = "float32" if path.is_file() else own_dtype(config, str(device), stored)
        return filled(shape, weights, dtype or getattr(torch, own), device, form)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def name_table(c: ModelConfig) -> dict[str, tuple[str, slice]]:
    """Hugging Face tensor name -> our parameter, and the rows of it that the tensor fills."""
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    every = slice(None)
    parts = {
        "self_attn.q_proj": ("attn.qkv", slice(0, q)),
        "self_attn.k_proj": ("attn.qkv", slice(q, q + kv)),
        "self_attn.v_proj": ("attn.qkv", slice(q + kv, q + 2 * kv)),
        "self_attn.o_proj": ("attn.o", every),
        "self_attn.q_norm": ("attn.q_norm", every),
        "self_attn.k_norm": ("attn.k_norm", every),
        "mlp.gate_proj": ("mlp.gate_up", slice(0, c.ffn_dim)),
        "mlp.up_proj": ("mlp.gate_up", slice(c.ffn_dim, 2 * c.ffn_dim)),
        "mlp.down_proj": ("mlp.down", every),
        "input_layernorm": ("attn_norm", every),
        "post_attention_layernorm": ("mlp_norm", every),
    }
    table = {EMBED: ("embed.weight", every), "model.norm.weight": ("norm.weight", every), HEAD: ("head.weight", every)}
    for layer in range(c.n_layers):
        for theirs, (ours, rows) in parts.items():
            for kind in ("weight", "bias"):
                table[f"model.layers.{layer}.{theirs}.{kind}"] = f"blocks.{layer}.{ours}.{kind}", rows
    return table


def _fitted(c: ModelConfig, weights: Weights) -> ModelConfig:
    """The config, with the two questions that the tensors answer better: Qwen2's biases, and a tied head."""
    if c.qkv_bias and not c.o_bias:  # Qwen2: its config has no word for it
        c = replace(c, qkv_bias="model.layers.0.self_attn.q_proj.bias" in weights.shapes)
    if c.tied and HEAD in weights.shapes and EMBED in weights.shapes:
        same = weights.shapes[HEAD] == weights.shapes[EMBED] and torch.equal(weights.tensor(HEAD), weights.tensor(EMBED))
        if not same:
            warnings.warn(f"{HEAD} differs from the embedding although the config ties them; {HEAD} is used", stacklevel=3)
            c = replace(c, tied=False)
    return c


def filled(c: ModelConfig, weights: Weights, dtype: torch.dtype, device: str | torch.device, form: str = "native") -> Transformer:
    """A Transformer with every parameter read. Raises ValueError naming the first tensor that does not fit."""
    with torch.device("meta"):
        model = Transformer(c)
    ours = dict(model.named_parameters())  # a tied head is not among them
    table = {name: place for name, place in name_table(c).items() if place[0] in ours}
    _check_names(table, weights.shapes, spare={HEAD} if c.tied else set())
    places: dict[str, list[tuple[str, slice]]] = {place: [] for place in ours}
    for name, (place, rows) in table.items():
        expected = tuple(ours[place][rows].shape)
        if weights.shapes[name] != expected:
            raise ValueError(f"tensor {name} has shape {list(weights.shapes[name])}, but the config makes it {list(expected)}")
        places[place].append((name, rows))
    coded = coded_places(model) if form in BITS else []
    room = Room(weight_bytes(c, form, dtype.itemsize), 3 * len(ours), device)  # codes come with scales and zeros
    for place in ours:
        if place not in coded:
            parameter = _empty(room, ours[place].shape, dtype, device)
            for name, rows in places[place]:
                parameter[rows].copy_(_value(weights, name))
            owner, _, kind = place.rpartition(".")
            setattr(model.get_submodule(owner), kind, nn.Parameter(parameter, requires_grad=False))
    if c.tied:
        model.head.weight = model.embed.weight
    for place in coded:
        parts = [_codes(weights, name, place, form, device) for name, _ in places[place]]
        put(model, place, Codes.stacked(parts), form, dtype, room.moved)
    return model.eval()


def _empty(room: Room, shape: torch.Size, dtype: torch.dtype, device: str | torch.device) -> Tensor:
    """Memory for a parameter. A matrix in float32 is stored column by column, which a CPU multiplies by one row up to twice as fast."""
    columns = len(shape) == 2 and dtype == torch.float32 and torch.device(device).type == "cpu"
    return room.empty(shape[::-1], dtype).t() if columns else room.empty(shape, dtype)


def _codes(weights: Weights, name: str, place: str, form: str, device: str | torch.device) -> Codes:
    """A tensor as codes: its file's own, if they are of the wanted width, else the nearest ones."""
    bits = bits_of(place, form)
    own = weights.codes(name) if bits == 4 and isinstance(weights, GGUF) else None
    codes = own or Codes.of(_value(weights, name), bits)
    return codes.map(lambda x: x.to(device))


def _value(weights: Weights, name: str) -> Tensor:
    value = weights.tensor(name)
    if not value.is_floating_point() or value.element_size() < 2:
        raise ValueError(f"tensor {name} is stored as {str(value.dtype).removeprefix('torch.')}, which is not supported")
    return value


def _check_names(table: Mapping, shapes: Mapping, spare: set[str]) -> None:
    surplus = [n for n in shapes if n not in table and n not in spare and not n.endswith("rotary_emb.inv_freq")]
    for what, names in (("is missing", [n for n in table if n not in shapes]), ("has no place in this model", surplus)):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise ValueError(f"tensor {names[0]}{more} {what}")
