"""One row times a matrix as a plain loop, for torch.compile: what a decode step on a CPU consists of.

The insight: a library's products are made for many rows, of which each reads again what another has brought near. One
token is one row: a matrix passes through the processor once, and that is all. Said as a multiplication and a sum, this is
what the compiler makes of it: one loop over memory, which joins the loops before and after it in one function. So are a
query's products with all keys, and the sum of all values that their probabilities weight.
"""

from .later import Tensor, torch

STREAMS = 4  # places of a matrix that one loop reads at once: sums that need not wait for each other, and more of memory on its way
RUN = 128  # slots whose values are added up at a time: they are read for one part of D after the other, and should stay near


def wanted(x: Tensor) -> bool:
    """Is a step for the CPU being compiled, and is x [..., K] one row?"""
    return torch.compiler.is_compiling() and x.numel() == x.shape[-1] and x.device.type == "cpu"


def product(x: Tensor, w: Tensor) -> Tensor:
    """x [..., K], one row, times w [N, K] stored row by row -> [..., N] in float32."""
    x, N = _there(x), len(w)
    parts = w.unflatten(0, (STREAMS if N % STREAMS == 0 else 1, -1))
    return torch.cat([(part.float() * x.view(-1)).sum(-1) for part in parts.unbind()]).view(*x.shape[:-1], N)  # one loop


def wanted_for_slots(q: Tensor, k: Tensor) -> bool:
    """Is what queries q [H, G, S, D] find among keys k [H, N, D] to be sums? Where a compiled step on a CPU has one query each."""
    return torch.compiler.is_compiling() and q.shape[2] == 1 and k.dim() == 3 and k.device.type == "cpu"


def products(q: Tensor, k: Tensor) -> Tensor:
    """Every row of q [H, G, D] times every row of k [H, N, D] -> [H, G, N] in float32, whatever theirs is."""
    q, k = parted(q.float()), k.float()  # not _there: who chooses what to read may have q laid out in another order
    return torch.stack([(x[:, None] * k).sum(-1) for x in q.unbind(1)], 1)  # one loop: a key is read once for all G queries


def weighted(probs: Tensor, v: Tensor) -> Tensor:
    """The rows of v [H, N, D] weighted by probs [H, G, N] and summed -> [H, G, D] in float32."""
    N = v.shape[1]
    whole = N - N % RUN
    sums = [_weighted(probs[..., whole:], v[:, whole:])] if N % RUN else []
    if whole:  # every run by itself, then their sums
        sums.append(_there(_weighted(probs[..., :whole].unflatten(2, (-1, RUN)), v[:, :whole].unflatten(1, (-1, RUN)))).sum(2))
    return parted(sum(sums))


def _weighted(probs: Tensor, v: Tensor) -> Tensor:
    """probs [H, G, ..., N] and v [H, ..., N, D] -> [H, G, ..., D]; a value is read once for all G queries."""
    v = v.float()
    return torch.stack([(p[..., None] * v).sum(-2) for p in probs.unbind(1)], 1)


def parted(x: Tensor) -> Tensor:
    """x [..., D], D even, in float32: what is computed of it will be another C++ function than what made it.

    torch.compile writes no loops for complex numbers, so it ends a function where a tensor is looked at as such; nothing is
    moved or computed for that. So every layer is a function, and most of them the same one. A whole step in one would take
    the C++ compiler minutes.
    """
    return torch.view_as_real(torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))).view(x.shape)


def _there(x: Tensor) -> Tensor:
    """x in float32, as a tensor that is there: else what made it, or at least the conversion, would be done anew for every row it meets."""
    x = x.float()
    return x.as_strided(x.shape, x.stride())
