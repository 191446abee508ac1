"""One row times a matrix as a plain loop, for torch.compile: what a decode step on a CPU consists of.

The insight: a library's products are made for many rows, of which each reads again what another has brought near. One
token is one row: a matrix passes through the processor once, from front to back, and that is all. Said as a
multiplication and a sum, this is what the compiler makes of it: one loop over memory, which joins the loops before and
after it in one function. (Attention could be said so too, and then a whole step is one function; but the C++ compiler
takes minutes over it, and a tenth of the step is gained, or nothing.)
"""

import torch
from torch import Tensor


def wanted(x: Tensor) -> bool:
    """Is a step for the CPU being compiled, and is x [..., K] one row?"""
    return torch.compiler.is_compiling() and x.numel() == x.shape[-1] and x.device.type == "cpu"


def product(x: Tensor, w: Tensor) -> Tensor:
    """x [..., K], one row, times w [N, K] stored row by row -> [..., N] in float32."""
    x = x.as_strided(x.shape, x.stride())  # a tensor that is there: else what made it would be computed anew for every row of w
    return (w.float() * x.float().view(-1)).sum(-1).view(*x.shape[:-1], -1)
