"""Weights in 8 or 4 bits, because decoding one token reads every weight once: fewer bytes, less time.

The insight: only what is stored shrinks. A code times its scale, plus a zero, is a weight again. So a few rows of
activations go through a kernel that multiplies the codes as it reads them, and a long text, where arithmetic
dominates, through dense weights that are made for one matrix at a time.

    int8   codes of 8 bits, a scale for every row
    int4   codes of 4 bits, a scale and a zero for every GROUP columns; embedding and head keep 8 bits, as in int8
A GGUF's own codes of 4 bits (Q4_0, Q4_1) go in unchanged, their scales as bfloat16.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import sweep
from .memory import BITS, GROUP
from .model import wide
from .processor import widens_bytes
from .shape import FEW

BLOCK = 64  # rows that torch's int4 kernel packs together, whatever the processor
SHORT = torch.bfloat16  # of scales, and of activations in the kernels, which are slow in any other dtype


Keep = Callable[[Tensor], Tensor]  # a tensor -> the same, where it is to stay


def as_it_is(x: Tensor) -> Tensor:
    """x."""
    return x


class Codes(NamedTuple):
    """A matrix [N, K] as codes [N, K] int8 with scale and zero [N, K / g]: weight = code * scale + zero."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None

    @classmethod
    def of(cls, w: Tensor, bits: int) -> "Codes":
        """The nearest codes to weights [N, K]: 8 bits, a scale per row; or 4 bits (-8..7), scale and zero per GROUP columns (per row, if they do not divide it)."""
        w = w.float()
        if bits == 8:
            scale = (w.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12).to(SHORT)
            return cls((w / scale.float()).round().clamp(-127, 127).to(torch.int8), scale)
        w = w.unflatten(1, (-1, GROUP if w.shape[1] % GROUP == 0 else w.shape[1]))
        low, high = w.aminmax(dim=2, keepdim=True)
        scale = ((high - low) / 15).clamp(min=1e-12).to(SHORT).float()
        zero = (low + 8 * scale).to(SHORT).float()
        codes = ((w - zero) / scale).round().clamp(-8, 7).to(torch.int8)
        return cls(codes.flatten(1), scale.squeeze(2).to(SHORT), zero.squeeze(2).to(SHORT))

    def map(self, f: Keep) -> "Codes":
        """f of every tensor."""
        return Codes(*(None if x is None else f(x) for x in self))

    @classmethod
    def stacked(cls, parts: Sequence["Codes"]) -> "Codes":
        """Matrices of one width, one above the other."""
        return cls(*(None if tensors[0] is None else torch.cat(tensors) for tensors in zip(*parts)))

    def rows(self, dtype: torch.dtype) -> Tensor:
        """The weights [N, K]."""
        shape = (*self.scale.shape, -1)
        w = self.codes.to(dtype).view(shape).mul_(self.scale.to(dtype)[..., None])  # in place: it may be the largest matrix there is
        return (w if self.zero is None else w.add_(self.zero.to(dtype)[..., None])).view(self.codes.shape)


class Coded(nn.Module):
    """A linear layer over codes: x [..., K] -> [..., N]. This one is plain, for any shape and device."""

    def __init__(self, matrix: Codes, bias: Tensor | None = None):
        super().__init__()
        self.codes, self.scale, self.zero = (nn.Buffer(x) if x is not None else None for x in matrix)
        self.bias = bias if bias is None else nn.Buffer(bias)

    @staticmethod
    def stored(matrix: Codes) -> Codes:
        """A matrix as this kind of layer stores it."""
        return matrix

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weights [N, K]."""
        return Codes(self.codes, self.scale, self.zero).rows(dtype)

    def few(self, x: Tensor) -> Tensor:
        """The product for a few rows x [S, K] -> [S, N]."""
        return F.linear(x, self.dense(x.dtype))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) <= FEW:
            out = self.few(rows)
        else:
            dtype = wide(x)
            out = F.linear(rows.to(dtype), self.dense(dtype)).to(x.dtype)
        return (out if self.bias is None else out + self.bias).view(*x.shape[:-1], -1)


class Int8(Coded):
    """8 bits and a scale per row, through torch's kernel, or swept in a compiled step."""

    def __init__(self, matrix: Codes, bias: Tensor | None = None):
        super().__init__(matrix, bias)
        self.sweeps = widens_bytes()  # asked now: a step that is being compiled can ask nobody

    def few(self, x: Tensor) -> Tensor:
        if self.sweeps and sweep.wanted(x):
            return (sweep.product(x, self.codes) * self.scale.view(-1).float()).to(x.dtype)
        return torch.ops.aten._weight_int8pack_mm(x.to(SHORT), self.codes, self.scale.view(-1)).to(x.dtype)


class Int4(Coded):
    """4 bits, through torch's kernel: `codes` uint8 [N, K / 2] as it packs them, `scale` [K / GROUP, N, 2] with the zeros."""

    @staticmethod
    def stored(matrix: Codes) -> Codes:
        both = torch.stack((matrix.scale, matrix.zero), -1).to(SHORT).transpose(0, 1).contiguous()
        return Codes(_packed(matrix.codes + 8), both)

    def few(self, x: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x.to(SHORT), self.codes, GROUP, self.scale).to(x.dtype)

    def dense(self, dtype: torch.dtype) -> Tensor:
        N, K = self.scale.shape[1], GROUP * self.scale.shape[0]
        packed = self.codes.view(-1, BLOCK * K // 2)
        codes = torch.cat((packed & 15, packed >> 4), 1).index_select(1, _places(K)).view(torch.int8).view(N, K) - 8
        return Codes(codes, *self.scale.transpose(0, 1).unbind(-1)).rows(dtype)


class Embedding(nn.Module):
    """A table [V, dim] of codes: the rows of tokens [S], as weights [S, dim] in `dtype`."""

    def __init__(self, matrix: Codes, dtype: torch.dtype):
        super().__init__()
        self.codes, self.scale, self.dtype = nn.Buffer(matrix.codes), nn.Buffer(matrix.scale), dtype

    def forward(self, tokens: Tensor) -> Tensor:
        return Codes(self.codes[tokens], self.scale[tokens]).rows(self.dtype)


def linear(matrix: Codes, bits: int, bias: Tensor | None = None, keep: Keep = as_it_is) -> nn.Module:
    """The fastest layer that can hold these codes."""
    (N, K), groups = matrix.codes.shape, matrix.scale.shape[1]
    whole = N % BLOCK == 0 and groups * GROUP == K
    kind = Coded if matrix.codes.device.type != "cpu" else Int8 if bits == 8 else Int4 if whole else Coded
    return kind(kind.stored(matrix).map(keep), bias)


def _packed(codes: Tensor) -> Tensor:
    """Codes 0..15 [N, K] as torch's kernel wants them: bytes [N, K / 2], in an order of its own."""
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)


@cache
def _places(K: int) -> Tensor:
    """Where each code of BLOCK rows [BLOCK * K] stands among the packed bytes' low halves, and behind them their high halves.

    The order depends on the processor, so it is found out: the digits of every place, base 16, are packed like codes.
    """
    place = torch.arange(BLOCK * K).view(BLOCK, K)
    digits = [_packed(place >> shift & 15).flatten().int() for shift in range(0, 32, 4)]
    low, high = (sum((d >> half & 15) << 4 * i for i, d in enumerate(digits)) for half in (0, 4))
    return torch.cat((low, high)).argsort()


# ---- a model of codes ----


def coded_places(model: nn.Module) -> list[str]:
    """The parameters that are stored as codes: every matrix, and the table of embeddings."""
    found = [f"{name}.weight" for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Embedding))]
    own = dict(model.named_parameters())  # a tied head is not among them
    return [place for place in found if place in own]


def bits_of(place: str, form: str) -> int:
    """How many bits a code of this parameter has: those at the model's two ends decide most, and keep 8."""
    return 8 if place in ("embed.weight", "head.weight") else BITS[form]


def put(model: nn.Module, place: str, matrix: Codes, form: str, dtype: torch.dtype, keep: Keep = as_it_is) -> None:
    """Let a layer of codes stand where a linear layer or the embedding stood; a tied head gets the embedding's codes. keep: where its tensors are to be."""
    name = place.removesuffix(".weight")
    owner, _, own = name.rpartition(".")
    if name == "embed":
        matrix = matrix.map(keep)
        model.embed = Embedding(matrix, dtype)
        if model.config.tied:
            model.head = linear(matrix, 8)
    else:
        bias = model.get_submodule(name).bias
        setattr(model.get_submodule(owner), own, linear(matrix, bits_of(place, form), bias, keep))
