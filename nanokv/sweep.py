"""One row against many, as plain loops: what torch.compile makes of a decode step on a CPU.

The insight: a library's products are made for many rows, of which each reads again what another has brought near. One
token is one row: a matrix passes through the processor once, from front to back, and that is all. Said as a
multiplication and a sum, this is what the compiler makes of it: one loop over memory, which joins the loops before and
after it in one function. Sums are in float32, whatever is read.
"""

from .later import Tensor, torch


def wanted(x: Tensor) -> bool:
    """Is a step for the CPU being compiled, and is x [..., K] one row?"""
    return torch.compiler.is_compiling() and x.numel() == x.shape[-1] and x.device.type == "cpu"


def product(x: Tensor, w: Tensor) -> Tensor:
    """x [..., K], one row, times w [N, K] stored row by row -> [..., N] in float32."""
    return (w.float() * _made(x).float().view(-1)).sum(-1).view(*x.shape[:-1], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """One query's attention, q [H, G, 1, D] to k, v [H, N, D] where mask [H, 1, N] -> [H, G, 1, D]."""
    logits = (_made(q).float() * k[:, None].float()).sum(-1) * scale  # [H, G, N]
    probs = _made(logits.masked_fill(~mask, -torch.inf).softmax(-1))
    return (probs[..., None] * v[:, None].float()).sum(2, keepdim=True).to(q.dtype)


def _made(x: Tensor) -> Tensor:
    """x as a tensor that is there: else the compiler would work it out anew for every row that it meets."""
    return x.as_strided(x.shape, x.stride())
