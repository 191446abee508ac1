"""One row times a matrix as a plain loop, for torch.compile: what a decode step on a CPU consists of.

The insight: a library's products are made for many rows, of which each reads again what another has brought near. One
token is one row: a matrix passes through the processor once, from front to back, and that is all. Said as a
multiplication and a sum, this is what the compiler makes of it: one loop over memory, which joins the loops before and
after it in one function. So do the products of a query and short keys. (Values weighted by probabilities stay a
library's product: it is as fast, and it parts one layer's function from the next one's. A whole step as one function
would take the C++ compiler minutes.)
"""

from .later import Tensor, torch


def wanted(x: Tensor) -> bool:
    """Is a step for the CPU being compiled, and is x [..., K] one row?"""
    return torch.compiler.is_compiling() and x.numel() == x.shape[-1] and x.device.type == "cpu"


def product(x: Tensor, w: Tensor) -> Tensor:
    """x [..., K], one row, times w [N, K] stored row by row -> [..., N] in float32."""
    x = _there(x)
    return (w.float() * x.view(-1)).sum(-1).view(*x.shape[:-1], -1)


def wanted_for_keys(q: Tensor, k: Tensor) -> bool:
    """Are the products of queries q [H, G, S, D] and keys k [H, N, D] to be sums? Where bfloat16 or float16 keys meet one query each.

    torch's fused attention reads such slots half as fast as these loops do (float32 ones as fast).
    """
    return torch.compiler.is_compiling() and q.shape[2] == 1 and k.dim() == 3 and k.dtype.itemsize < 4 and k.device.type == "cpu"


def products(q: Tensor, k: Tensor) -> Tensor:
    """Every row of q [H, G, D] times every row of k [H, N, D] -> [H, G, N] in float32, whatever theirs is."""
    return (_there(q)[:, :, None] * k.float()[:, None]).sum(-1)


def _there(x: Tensor) -> Tensor:
    """x in float32, as a tensor that is there: else what made it, or at least the conversion, would be done anew for every row it meets."""
    x = x.float()
    return x.as_strided(x.shape, x.stride())
