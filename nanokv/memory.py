"""Bytes: what weights and a KV cache take by the formula, and what reading a prompt will take at its peak.

The insight: a fixed number of rows is a fixed number of bytes, so both are known before the first
token. What stays is the pools and their bookkeeping. What comes and goes while a text is read
belongs to one layer and one block of rows at a time, so its peak is the largest moment of one
block, once: turning q, attending, or the MLP, whichever takes most.

L layers, H KV heads, G query heads per KV head, D head_dim, S tokens read at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from .attention import watched_rows
from .policy import Policy
from .processor import arithmetic
from .shape import FEW, ROWS, ModelConfig
from .slots import Shapes

ITEMSIZE = {  # bytes of a number, by its dtype's name
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
GROUP = 32  # columns that share a scale and a zero: a block of GGUF's
BITS = {"int8": 8, "int4": 4}  # of the layers' matrices, by the name of the form
FORMS = ("native", *BITS)  # native: numbers in the model's dtype
RANKING = 56  # bytes per token and head while tokens are ranked: worth, time order and their sorted copies


def weight_bytes(c: ModelConfig, weights: str, itemsize: int) -> int:
    """The weights, `native` (itemsize bytes a number), int8 or int4; a tied head is counted once."""
    attend, dim = c.n_heads * c.head_dim, c.dim
    kv = c.n_kv_heads * c.head_dim
    layer = [(attend + 2 * kv, dim, c.qkv_bias), (dim, attend, c.o_bias), (2 * c.ffn_dim, dim, c.mlp_bias), (dim, c.ffn_dim, c.mlp_bias)]
    ends = (1 if c.tied else 2) * _matrix_bytes(c.vocab_size, dim, 8 if weights in BITS else None, itemsize)
    matrices = sum(_matrix_bytes(N, K, BITS.get(weights), itemsize) + N * bias * itemsize for N, K, bias in layer)
    norms = (c.n_layers * (2 * dim + 2 * c.head_dim * c.qk_norm) + dim) * itemsize
    return c.n_layers * matrices + ends + norms


def _matrix_bytes(N: int, K: int, bits: int | None, itemsize: int) -> int:
    """A matrix [N, K] as numbers (bits None), as codes with a scale a row, or as codes with a scale and a zero a group."""
    if bits is None:
        return N * K * itemsize
    return N * K + 2 * N if bits == 8 else N * K // 2 + 4 * N * -(-K // GROUP)


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
        if policy.heads == "adaptive":  # ragged shares: which head owns a pool row, and where its entry stands
            total += H * n * (H + 4)
    return total


def _slot_bytes(c: ModelConfig, policy: Policy, itemsize: int) -> int:
    return 4 + 4 + _tensor_bytes(policy.marks(c.n_heads // c.n_kv_heads), itemsize)  # pos and free are int32


def _tensor_bytes(shapes: Shapes, itemsize: int) -> int:
    return sum(prod(shape) * (ITEMSIZE[dtype] if dtype else itemsize) for shape, dtype in shapes.values())


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


@dataclass(frozen=True)
class Remade:
    """What passing a long text through matrices takes beside them, where they are made anew for it, one at a time."""

    weight: int = 0  # bytes a weight
    number: int = 0  # bytes of each number that goes in or comes out, in another dtype than the model's
    unpacked: int = 0  # bytes a weight that are gone once it is made


def remade(weights: str, dtype: str, device: str = "cpu") -> Remade:
    """Codes become numbers, and numbers that the processor does not multiply become wider ones."""
    wide = arithmetic(dtype, device)
    number = ITEMSIZE[wide] if wide != dtype else 0
    if weights == "native":
        return Remade(number, number)
    return Remade(ITEMSIZE[wide], number, int(weights == "int4"))  # codes of 4 bits become bytes first


def plan_prefill(
    c: ModelConfig, policy: Policy, prompt_len: int, max_new: int, chunk: int | None, itemsize: int,
    kv_itemsize: int | None = None, made: Remade = Remade(),
) -> Prefill:  # fmt: skip
    """The plan for a first prompt, read in one piece or `chunk` tokens at a time; kv_itemsize: of keys and values (None: as all)."""
    kv_itemsize = kv_itemsize or itemsize
    rows = policy.plan(c.n_layers, prompt_len, max_new)
    pieces = -(-prompt_len // (chunk or prompt_len))
    S = -(-prompt_len // pieces)  # pieces are of equal size, but for a token
    held = min(max(rows), prompt_len - S)  # what the widest layer holds when the last chunk comes
    stepped = policy.shared and S > min(rows)  # then it is read by the decode path, a memory's worth first
    if policy.shared:  # and no scratch holds more than the memory
        S = min(S, *rows)
        held = min(held, min(rows) - S)
    H, D, T = c.n_kv_heads, c.head_dim, held + S
    scratch = 0 if stepped else H * T * (2 * D * kv_itemsize + _slot_bytes(c, policy, kv_itemsize))
    residual = S * (c.dim * itemsize + 2 * D * 4 + 2 * 8)  # with cosine and sine in float32, ids and positions
    C = -(-S // -(-S // ROWS))  # blocks are of equal size, but for a row
    block = min(C, policy.watch, watched_rows(policy.watch, c.n_heads, T))
    watched = C if stepped else block if policy.prompt == "probs" else 0
    own = policy.working(H, c.n_heads // H, T, D, watched)
    ranking = own + H * T * RANKING if T > min(rows) else 0
    block = max(_block_bytes(c, C, T, watched, ranking, itemsize, kv_itemsize), _product_bytes(c, C, itemsize, made))
    return Prefill(pool_bytes(c, rows, kv_itemsize), bookkeeping_bytes(c, policy, rows, kv_itemsize), scratch, residual + block)


def _block_bytes(c: ModelConfig, C: int, T: int, watched: int, ranking: int, itemsize: int, kv_itemsize: int) -> int:
    """What lives at once while C rows pass a layer, the last of T tokens, at the moment that takes most.

    watched: rows of attention whose probabilities are looked at, one block of them; ranking: bytes to choose who stays.
    """
    D = c.head_dim
    q, k = C * c.n_heads * D, C * c.n_kv_heads * D  # numbers
    cast = itemsize if itemsize < 4 else 0  # half precision meets float32 in a copy
    projected = (C * c.dim + q + 2 * k) * itemsize  # the normed residual and what it became
    turning = max(q * (3 * 4 + cast), q * itemsize + k * (3 * 4 + cast))  # two float32 products and their sum
    answer = q * kv_itemsize  # a block's own; then it joins the others'
    if T > C:  # behind a prefix: two parts and the logarithms of their sums (off the CPU a mask of 128 rows instead)
        answer = C * c.n_heads * (2 * D * kv_itemsize + 4 * 4)
    evidence = watched * c.n_heads * T * 4  # logits that become probabilities in place, float32
    if kv_itemsize < 4 and watched:
        evidence += c.n_kv_heads * T * D * 4  # and the keys
    back = q * itemsize if kv_itemsize != itemsize else 0  # queries meet keys in the keys' dtype, the answer comes back
    attending = k * itemsize + 2 * q * kv_itemsize + max(answer, evidence, ranking, back)  # k and q turned, what q finds
    mlp = C * (2 * c.dim + 3 * c.ffn_dim) * itemsize
    return max(projected + turning, projected + attending, mlp)


def _product_bytes(c: ModelConfig, C: int, itemsize: int, made: Remade) -> int:
    """What lives at once while C rows pass the largest matrices, those of the MLP, made anew for them: on the way in, or out."""
    if C <= FEW:
        return 0
    dim, ffn, out = c.dim, c.ffn_dim, made.number or itemsize
    up = C * dim * (itemsize + made.number) + 2 * ffn * (dim * made.weight + max(C * out, dim * made.unpacked))
    back = C * (dim * itemsize + 2 * ffn * (itemsize + made.number))  # by then the matrix is gone
    down = C * ((dim + 3 * ffn) * itemsize + ffn * made.number) + dim * (ffn * made.weight + max(C * out, ffn * made.unpacked))
    return max(up, back, down)
