"""Bytes: what a KV cache takes by the formula, and what reading a prompt will take at its peak.

The insight: a fixed number of rows is a fixed number of bytes, so both are known before the first
token. What stays is the pools and their bookkeeping. What comes and goes while a text is read
belongs to one layer at a time, so its peak is the largest moment of one layer, once: turning q,
attending, or the MLP, whichever takes most.

L layers, H KV heads, G query heads per KV head, D head_dim, S tokens read at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from .attention import ROWS, WATCHED
from .model import MLP_ROWS, ModelConfig
from .policy import Policy
from .slots import Shapes

RANKING = 56  # bytes per token and head while tokens are ranked: worth, time order and their sorted copies


def kv_bytes(c: ModelConfig, tokens: int, itemsize: int) -> int:
    """K and V of `tokens` tokens in every layer, `itemsize` bytes a number: 2 x L x H x D x tokens x itemsize."""
    return 2 * c.n_layers * c.n_kv_heads * c.head_dim * tokens * itemsize


def pool_bytes(c: ModelConfig, rows: Sequence[int], itemsize: int) -> int:
    """K and V pools with `rows` rows per head, layer by layer."""
    return 2 * c.n_kv_heads * c.head_dim * sum(rows) * itemsize


def bookkeeping_bytes(c: ModelConfig, policy: Policy, rows: Sequence[int], itemsize: int) -> int:
    """What stands beside the pools: positions, free slots, marks, and the policy's own tensors."""
    H, G, D = c.n_kv_heads, c.n_heads // c.n_kv_heads, c.head_dim
    total = 0
    for n in rows:
        width = policy.width(n, H)
        total += H * width * _slot_bytes(c, policy, itemsize) + H * 3 * 8 + 2 * 8
        total += _tensor_bytes(policy.state(H, G, width, D), itemsize)
        if width != n:  # ragged shares: which head owns a pool row, and where its entry stands
            total += H * n * (H + 4)
    return total


def _slot_bytes(c: ModelConfig, policy: Policy, itemsize: int) -> int:
    return 4 + 4 + _tensor_bytes(policy.marks(c.n_heads // c.n_kv_heads), itemsize)  # pos and free are int32


def _tensor_bytes(shapes: Shapes, itemsize: int) -> int:
    return sum(prod(shape) * (dtype.itemsize if dtype else itemsize) for shape, dtype in shapes.values())


@dataclass(frozen=True)
class Prefill:
    """Bytes at the peak of reading a prompt. The weights are not in it."""

    pools: int
    bookkeeping: int
    scratch: int  # one layer: what its slots hold and the new tokens, side by side
    activations: int  # what else lives at once

    @property
    def peak(self) -> int:
        return self.pools + self.bookkeeping + self.scratch + self.activations


def plan_prefill(c: ModelConfig, policy: Policy, prompt_len: int, max_new: int, chunk: int | None, itemsize: int) -> Prefill:
    """The plan for a first prompt, read in one piece or `chunk` tokens at a time."""
    rows = policy.plan(c.n_layers, prompt_len, max_new)
    S = min(chunk or prompt_len, prompt_len)
    held = min(max(rows), prompt_len - S)  # what the widest layer holds when the last chunk comes
    if policy.shared and held + S > min(rows):  # then the slots are filled by the decode path
        S, held = min(S, min(rows)), 0
    H, D, T = c.n_kv_heads, c.head_dim, held + S
    scratch = H * T * (2 * D * itemsize + _slot_bytes(c, policy, itemsize))
    widest = _widest(c, policy, min(rows), S, T, itemsize, scratch)
    return Prefill(pool_bytes(c, rows, itemsize), bookkeeping_bytes(c, policy, rows, itemsize), *widest)


def _widest(c: ModelConfig, policy: Policy, rows: int, S: int, T: int, itemsize: int, scratch: int) -> tuple[int, int]:
    """(scratch, activations) at the moment of a layer that takes most: S new tokens among T."""
    heads, D = c.n_heads, c.head_dim
    x, q = S * c.dim * itemsize, S * heads * D * itemsize
    cast = itemsize if itemsize < 4 else 0  # half precision meets float32 in a copy
    always = x + 2 * S * D * 4 + 2 * S * 8  # the residual, cosine and sine in float32, ids and positions
    projected = x + S * (heads + 2 * c.n_kv_heads) * D * itemsize  # the normed residual and what it became
    turning = always + projected + S * heads * D * (3 * 4 + cast)  # two float32 products and their sum
    masks = itemsize * (2 if S > ROWS else 1) + 1  # a block's, while the one before still lives; and where it is dark
    answer = q if T == S else q + min(S, ROWS) * (heads * D * itemsize + T * masks)
    seen = min(S, policy.watch, WATCHED) if policy.prompt == "probs" else 0
    watched = seen * heads * T * (8 + cast)  # logits and probabilities
    ranked = c.n_kv_heads * T * RANKING if T > rows else 0
    attending = always + projected + 2 * q + max(answer, watched, ranked)
    wide = min(S, MLP_ROWS) * (c.dim + 3 * c.ffn_dim + max(c.ffn_dim, c.dim)) * itemsize
    return max((0, turning), (scratch, attending), (0, always + x + wide), key=sum)
