"""The shape of a model: all that a plan must know of it, and all that is known before a weight is read."""

from collections.abc import Mapping
from dataclasses import dataclass, field

# A long text passes a layer in blocks of rows: what is wider than the residual exists for one block only.
# Blocks are of equal size, so the last one holds at least ROWS / 2: the votes of up to 128 rows come together.
ROWS = 1024
FEW = 32  # rows up to which a matrix is multiplied as it is stored; for more it pays to make it anew in what the processor multiplies
DTYPES = ("float32", "bfloat16", "float16")  # that a model may run in


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama-like model, in the field's own words. Sizes count elements."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    norm_eps: float = 1e-5
    qkv_bias: bool = False  # Qwen2
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # Qwen3
    tied: bool = False  # the head is the embedding, transposed
    max_context: int = 2048  # tokens seen in training
    name: str = ""  # what the user called it; statistics made for one model are refused by another
    rope: Mapping = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
