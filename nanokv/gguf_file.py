"""A GGUF file: its metadata, its tensors by their Hugging Face names, its config in config.json's words.

The insight that makes it short: GGUF is another spelling of what a checkpoint directory says.
Once names, row order and metadata are translated, nothing else in the project knows the format.

The header is read here and not by gguf's own reader, which makes one numpy array per word of the
vocabulary: two seconds for the smallest model. The formats of the weights are gguf's, asked for when one is read.
"""

import math
import mmap
import re
import struct
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import brief, refuse_pointer, typed
from .later import Tensor, torch
from .pages import Room

if TYPE_CHECKING:
    from .quantize import Codes

SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # GGUF's value types, as struct spells them
STRING, ARRAY = 8, 9
ROPE = "rope_freqs.weight"  # part of the config, not of the weights
FORMATS = {  # of weights, by GGUF's number: name, numbers in a block, bytes of it
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
PIECE = 2**18  # elements decoded at a time: stays in the processor's cache

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUF:
    """A memory-mapped GGUF file. Raises ValueError when it is not one, or not all of one.

    metadata: key -> int, float, bool, str, or a list of them.
    shapes: Hugging Face tensor name -> rows first; a name without a translation stays as it is.
    """

    def __init__(self, path: Path):
        self.path, state = path, path.stat()
        self._size = state.st_size
        refuse_pointer(path)
        try:
            self.metadata, tensors, end = _header(path, state.st_mtime_ns, state.st_size)
        except (struct.error, UnicodeDecodeError, KeyError) as error:
            raise self._cut_short("its header is damaged or does not end") from error
        self._tensors = self._placed(tensors, end)
        self.shapes = {name: shape for name, (shape, *_) in self._tensors.items() if name != ROPE}

    @cached_property
    def _bytes(self) -> mmap.mmap:
        with open(self.path, "rb") as file:  # a private mapping is writable, as torch wants it, and never reaches the file
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def tensor(self, name: str) -> Tensor:
        """The values of a tensor by its Hugging Face name; quantised ones as float32."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        shape, (kind, block, block_bytes), start, size = self._tensors[name]
        raw = torch.frombuffer(self._bytes, dtype=torch.uint8, count=size, offset=start)
        if plain := {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(kind):
            return self._unpermuted(name, raw.view(plain).view(shape))
        values = Room(4 * math.prod(shape), 1).empty(shape, torch.float32)  # alone: in the heap it would leave a hole
        pieces = (x.split(max(PIECE // block, 1)) for x in (values.view(-1, block), raw.view(-1, block_bytes)))
        try:
            for to, piece in zip(*pieces):
                to.copy_(torch.from_numpy(dequantize(piece.reshape(1, -1).numpy(), GGMLQuantizationType[kind])).view(-1, block))
        except (NotImplementedError, KeyError) as error:
            raise ValueError(f"tensor {name} is stored as {kind}, which is not supported") from error
        return self._unpermuted(name, values)

    def codes(self, name: str) -> "Codes | None":
        """The file's own codes of a tensor, if they have 4 bits: Q4_0 and Q4_1."""
        from .quantize import Codes

        shape, (kind, *_), start, size = self._tensors[name]
        if kind not in ("Q4_0", "Q4_1"):
            return None
        raw = torch.frombuffer(self._bytes, dtype=torch.uint8, count=size, offset=start).view(*shape[:-1], shape[-1] // 32, -1)
        ends = raw.shape[-1] - 16  # bytes before the codes: the scale, and in Q4_1 the smallest weight
        numbers, codes = raw[..., :ends].contiguous().view(torch.float16).float(), raw[..., ends:]
        scale = numbers[..., 0]
        zero = numbers[..., 1] + 8 * scale if kind == "Q4_1" else torch.zeros_like(scale)
        signed = torch.cat((codes & 15, codes >> 4), -1).view(torch.int8) - 8
        return Codes(*(self._unpermuted(name, x) for x in (signed.flatten(-2), scale, zero)))

    def config(self) -> dict[str, Any]:
        """The model's shape in the words of a `config.json`. Raises ValueError for what has none."""
        arch = self._need("general.architecture")
        if arch not in ("llama", "qwen2", "qwen3"):
            raise ValueError(f"{self.path}: architecture {brief(arch)} is not supported; known: llama (and mistral), qwen2, qwen3")
        if (parts := self._whole("split.count", 1)) > 1:
            raise ValueError(f"{self.path} is one part of {parts}; join them with llama-gguf-split --merge")

        def get(key: str, default: Any = None) -> Any:
            return self.metadata.get(f"{arch}.{key}", default)

        if experts := self._whole(f"{arch}.expert_count", 0):
            raise ValueError(f"{self.path} is a mixture of {experts} experts, which is not supported")
        if any(isinstance(get(f"attention.head_count{of}"), list) for of in ("", "_kv")):
            raise ValueError(f"{self.path} has another number of heads in every layer, which is not supported")
        heads, head_dim = self._whole(f"{arch}.attention.head_count"), self._head_dim(arch)
        if get("attention.value_length", head_dim) != head_dim or get("rope.dimension_count", head_dim) != head_dim:
            raise ValueError(f"{self.path}: keys, values and RoPE must all have {head_dim} dimensions per head")
        window, context = self._whole(f"{arch}.attention.sliding_window", 0), self._whole(f"{arch}.context_length")
        return {
            "model_type": arch,
            "vocab_size": [*self.shapes.get("model.embed_tokens.weight", ()), 0][0],
            "hidden_size": self._need(f"{arch}.embedding_length"),
            "num_hidden_layers": self._need(f"{arch}.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": get("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "intermediate_size": self._need(f"{arch}.feed_forward_length"),
            "rms_norm_eps": self._need(f"{arch}.attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": context,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self.shapes,
            "mlp_bias": "model.layers.0.mlp.down_proj.bias" in self.shapes,
            "tie_word_embeddings": "lm_head.weight" not in self.shapes,
            "layer_types": ["sliding_attention"] if 0 < window < context else None,
            "rope_parameters": self._rope(get),
        }

    def _rope(self, get: Callable[..., Any]) -> Mapping:
        """The RoPE rule, as config.json's `rope_parameters`."""
        rope = {"rope_theta": get("rope.freq_base")} if get("rope.freq_base") else {}
        kind = get("rope.scaling.type", "linear" if get("rope.scale_linear") else "none")
        if ROPE in self._tensors:
            if kind != "none":
                raise ValueError(f"{self.path} has both {ROPE} and rope scaling {brief(kind)}; only one is supported")
            return rope | {"rope_type": "factors", "factors": self._factors()}
        if kind == "none":
            return rope
        if kind not in ("linear", "yarn"):
            raise ValueError(f"{self.path}: rope scaling {brief(kind)} is not supported; known: none, linear, yarn")
        if get("rope.scaling.attn_factor", 1.0) != 1.0 or get("rope.scaling.yarn_log_multiplier", 0.0) != 0.0:
            raise ValueError(f"{self.path} scales RoPE with an attention factor of its own, which is not supported")
        rope |= {"rope_type": kind, "factor": get("rope.scaling.factor", get("rope.scale_linear"))}
        if kind == "yarn":
            rope["original_max_position_embeddings"] = get("rope.scaling.original_context_length")
            rope |= {f"beta_{end}": get(f"rope.scaling.yarn_beta_{end}") for end in ("fast", "slow")}
        return rope

    def _factors(self) -> list[float]:
        """The divisors of RoPE's frequencies: part of the config, so read without torch."""
        shape, (kind, *_), start, _ = self._tensors[ROPE]
        if kind != "F32":
            raise ValueError(f"{self.path}: {ROPE} is stored as {kind}, which is not supported")
        return list(struct.unpack_from(f"<{math.prod(shape)}f", self._bytes, start))

    def _unpermuted(self, name: str, x: Tensor) -> Tensor:
        """Undo the row order of llama files: they keep RoPE's pairs (2i, 2i + 1), Hugging Face (i, i + D/2)."""
        if self.metadata.get("general.architecture") != "llama" or not re.search(r"\.[qk]_proj\.", name):
            return x
        head_dim = self._head_dim("llama")
        return x.view(-1, head_dim // 2, 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)

    def _head_dim(self, arch: str) -> int:
        heads, dim = self._whole(f"{arch}.attention.head_count", least=1), self._whole(f"{arch}.embedding_length")
        return self._whole(f"{arch}.attention.key_length", dim // heads)

    def _need(self, key: str) -> Any:
        if key not in self.metadata:
            raise ValueError(f"{self.path} does not give {key}")
        return self.metadata[key]

    def _whole(self, key: str, default: int | None = None, least: int = 0) -> int:
        """A whole number. ValueError names the file and the key."""
        try:
            value = typed(self.metadata, key, int, default)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error
        if value is None or value < least:
            raise ValueError(f"{self.path} does not give {key}" + (f" as {least} or more" if value is not None else ""))
        return value

    def _placed(self, found: Mapping[str, tuple], end: int) -> dict[str, tuple]:
        """Hugging Face name -> (shape, format, first byte, bytes), of tensors as `_header` gives them."""
        align = self._whole("general.alignment", 32, least=1)
        base = -(-end // align) * align
        tensors = {}
        for name, (shape, number, offset) in found.items():
            if number not in FORMATS:
                raise ValueError(f"{self.path}: {name} has the unknown storage type {number}")
            _, block, block_bytes = FORMATS[number]
            size = math.prod(shape) // block * block_bytes
            if base + offset + size > self._size:
                raise self._cut_short(f"{name} ends at byte {base + offset + size:,}")
            tensors[hugging_face_name(name)] = shape, FORMATS[number], base + offset, size
        return tensors

    def _cut_short(self, why: str) -> ValueError:
        return ValueError(f"{self.path} is cut short at {self._size:,} bytes ({why}); download it again")


@lru_cache(maxsize=1)  # a start asks for it several times, and a vocabulary is a hundred thousand strings
def _header(path: Path, changed: int, size: int) -> tuple[dict[str, Any], dict[str, tuple], int]:
    """Metadata, and name -> (shape, number of its format, offset) of every tensor, of a file in this state; where the header ends.

    Raises ValueError for what is no GGUF; struct.error, UnicodeDecodeError or KeyError for a damaged one.
    """
    with open(path, "rb") as file:
        start = file.read(8)
        if start[:4] != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file")
        if start[4:] not in (b"\2\0\0\0", b"\3\0\0\0"):
            raise ValueError(f"{path}: only little-endian GGUF of version 2 or 3 is supported")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Reader(data, 8)
            n_tensors, n_keys = reader.scalars("Q", 2)
            metadata, tensors = {}, {}
            for _ in range(n_keys):
                key = reader.string()
                metadata[key] = reader.value(reader.scalar("I"))
            for _ in range(n_tensors):
                name = reader.string()
                shape = tuple(reversed(reader.scalars("Q", reader.scalar("I"))))  # GGUF counts columns first
                tensors[name] = shape, reader.scalar("I"), reader.scalar("Q")
            return metadata, tensors, reader.at


class _Reader:
    """A place in a GGUF header that moves on as it is read. Raises struct.error past the end."""

    def __init__(self, data: mmap.mmap, at: int):
        self.data, self.at = data, at

    def scalars(self, code: str, n: int) -> tuple:
        format = f"<{n}{code}"
        values = struct.unpack_from(format, self.data, self.at)
        self.at += struct.calcsize(format)
        return values

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, n: int) -> list[str]:
        data, at, size, end, found = self.data, self.at, struct.Struct("<Q").unpack_from, len(self.data), []
        for _ in range(n):
            start = at + 8
            at = start + size(data, at)[0]
            if at > end:
                raise struct.error("a text runs past the end of the file")
            found.append(data[start:at].decode())
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.scalar(SCALARS[kind])
        kind, n = self.scalar("I"), self.scalar("Q")
        if kind == STRING:
            return self.strings(n)
        return list(self.scalars(SCALARS[kind], n))


def read_metadata(path: Path) -> dict[str, Any]:
    """All metadata of a GGUF file: numbers, bools, strings, lists of them."""
    return GGUF(path).metadata


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; unknown names unchanged."""
    match = re.fullmatch(r"(blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if not match or match[3] not in NAMES:
        return name
    layer = f"model.layers.{match[2]}." if match[1] else ""
    return f"{layer}{NAMES[match[3]]}.{match[4]}"
