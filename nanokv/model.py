"""A Llama / Qwen transformer that knows nothing of caches: it asks `attend(layer, q, k, v)`.

q [H, G, S, D] and k, v [H, S, D] are handed over *before* RoPE, because where a token stands
is the memory's business, not the model's. Prefill, decode, later turns and calibration are
different answers to the same question.

H KV heads, G query heads per KV head, S new tokens, D head_dim.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import sweep
from .processor import arithmetic
from .shape import FEW, ROWS, ModelConfig

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def wide(x: Tensor) -> torch.dtype:
    """What a long text x is to be multiplied in."""
    return getattr(torch, arithmetic(str(x.dtype).removeprefix("torch."), x.device.type))


class Linear(nn.Linear):
    """A linear layer. Where the processor cannot multiply its dtype, a long text meets a float32 copy of the matrix, made for it and dropped."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        if sweep.wanted(x):
            out = sweep.product(x, self.weight)
            return (out if self.bias is None else out + self.bias).to(x.dtype)
        if x.numel() <= FEW * x.shape[-1] or (dtype := wide(x)) == x.dtype:
            return super().forward(x)
        return F.linear(x.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.H, self.G, self.D = c.n_kv_heads, c.n_heads // c.n_kv_heads, c.head_dim
        self.qkv = Linear(c.dim, (c.n_heads + 2 * c.n_kv_heads) * c.head_dim, bias=c.qkv_bias)
        self.o = Linear(c.n_heads * c.head_dim, c.dim, bias=c.o_bias)
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
        self.gate_up = Linear(c.dim, 2 * c.ffn_dim, bias=c.mlp_bias)
        self.down = Linear(c.ffn_dim, c.dim, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate).mul_(up))  # in place: of a block's numbers these are the most


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
        self.head = Linear(c.dim, c.vocab_size, bias=False)
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
