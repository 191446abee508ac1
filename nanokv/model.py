"""A Llama / Qwen transformer that knows nothing of caches: it asks `attend(layer, q, k, v)`.

q [H, G, S, D] and k, v [H, S, D] are handed over *before* RoPE, because where a token stands
is the memory's business, not the model's. Prefill, decode, later turns and calibration are
different answers to the same question.

H KV heads, G query heads per KV head, S new tokens, D head_dim.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

# A long text passes a layer in blocks of rows: what is wider than the residual exists for one block only.
# Blocks are of equal size, so the last one holds at least ROWS / 2: the votes of up to 128 rows come together.
ROWS = 1024


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


class Attention(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.H, self.G, self.D = c.n_kv_heads, c.n_heads // c.n_kv_heads, c.head_dim
        self.qkv = nn.Linear(c.dim, (c.n_heads + 2 * c.n_kv_heads) * c.head_dim, bias=c.qkv_bias)
        self.o = nn.Linear(c.n_heads * c.head_dim, c.dim, bias=c.o_bias)
        if c.qk_norm:
            self.q_norm = nn.RMSNorm(c.head_dim, c.norm_eps)
            self.k_norm = nn.RMSNorm(c.head_dim, c.norm_eps)
        self.qk_norm = c.qk_norm

    def forward(self, x: Tensor, layer: int, attend: Attend) -> Tensor:
        """x [S, dim] -> [S, dim]."""
        S, (H, G, D) = x.shape[0], (self.H, self.G, self.D)
        q, k, v = self.qkv(x).split((H * G * D, H * D, H * D), -1)
        q, k, v = q.view(S, H, G, D), k.view(S, H, D), v.view(S, H, D)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(layer, q.permute(1, 2, 0, 3), k.transpose(0, 1), v.transpose(0, 1))  # [H, G, S, D]
        return self.o(out.permute(2, 0, 1, 3).reshape(S, H * G * D))


class MLP(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.gate_up = nn.Linear(c.dim, 2 * c.ffn_dim, bias=c.mlp_bias)
        self.down = nn.Linear(c.ffn_dim, c.dim, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.attn_norm, self.attn = nn.RMSNorm(c.dim, c.norm_eps), Attention(c)
        self.mlp_norm, self.mlp = nn.RMSNorm(c.dim, c.norm_eps), MLP(c)

    def forward(self, x: Tensor, layer: int, attend: Attend) -> Tensor:
        """x [S, dim] -> [S, dim], in place. A long text asks `attend` several times, its rows in order."""
        for rows in x.tensor_split(-(-len(x) // ROWS)):  # views: the residual grows in place
            rows += self.attn(self.attn_norm(rows), layer, attend)
            rows += self.mlp(self.mlp_norm(rows))
        return x


class Transformer(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.config = c
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.n_layers))
        self.norm = nn.RMSNorm(c.dim, c.norm_eps)
        self.head = nn.Linear(c.dim, c.vocab_size, bias=False)
        if c.tied:
            self.head.weight = self.embed.weight

    @property
    def like(self) -> Tensor:
        """A tensor on the model's device and in the dtype of its activations."""
        return self.norm.weight

    def forward(self, tokens: Tensor, attend: Attend, every: bool = False) -> Tensor:
        """tokens [S] -> logits of the last one [vocab], or of all [S, vocab] when `every`."""
        x = self.embed(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, attend)
        return self.head(self.norm(x if every else x[-1]))
