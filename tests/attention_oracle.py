"""What transformers' eager attention says of a text: its losses under an explicit mask, its weights, its queries.

The statistics are computed from whole matrices, head by head and row by row, with numpy. Nothing is
shared with nanokv.
"""

import math

import numpy as np
import torch
import transformers

SKIP = 64


def band(n: int, budget: int | None, sink: int = 0) -> torch.Tensor:
    """Who reads whom [n, n]: all before it, or the first `sink` and the last `budget - sink`, itself included."""
    query, key = np.indices((n, n))
    kept = True if budget is None else (key < sink) | (query - key < budget - sink)
    return torch.tensor((key <= query) & kept)


def losses(theirs: transformers.PreTrainedModel, tokens: list[int], mask: torch.Tensor) -> np.ndarray:
    """-ln p of every token but the first, in one forward pass under the mask."""
    theirs.set_attn_implementation("eager")
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    with torch.no_grad():
        logits = theirs(torch.tensor([tokens]), attention_mask=additive[None, None], use_cache=False).logits[0].double().numpy()
    top = logits.max(1)
    log_total = top + np.log(np.exp(logits - top[:, None]).sum(1))
    return np.array([log_total[i] - logits[i, tokens[i + 1]] for i in range(len(tokens) - 1)])


def weights_and_queries(theirs: transformers.PreTrainedModel, tokens: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each layer: full attention [Hq, n, n], and the queries before RoPE [n, Hq, D]."""
    theirs.set_attn_implementation("eager")
    weights, queries, hooks = [], [], []
    for layer in theirs.model.layers:
        hooks.append(layer.self_attn.register_forward_hook(lambda module, given, out: weights.append(out[1][0].numpy())))
        hooks.append(layer.self_attn.q_proj.register_forward_hook(lambda module, given, out: queries.append(out[0].numpy())))
    with torch.no_grad():
        theirs(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return [(a, q.reshape(len(tokens), len(a), -1)) for a, q in zip(weights, queries)]


def statistics(weights: np.ndarray, queries: np.ndarray) -> dict[str, tuple[float, float]]:
    """Mean and deviation over heads of everything that the bench says about a layer."""
    heads = [one_head(a.astype(np.float64)) | concentration(queries[:, h].astype(np.float64)) for h, a in enumerate(weights)]
    return {name: (np.nanmean(x), np.nanstd(x)) for name in heads[0] for x in [[head[name] for head in heads]]}


def one_head(a: np.ndarray) -> dict[str, float]:
    """a [n, n]: one head's weights."""
    n = len(a)
    rows = [a[i, : i + 1] for i in range(SKIP, n)]
    low = sum(int((r < 0.01 * r.max()).sum()) for r in rows)
    fewest = [(1 + np.searchsorted(np.cumsum(np.sort(r)[::-1]), 0.95)) / len(r) for r in rows]
    received = np.sort(a[SKIP:].sum(0))[::-1]  # the future gets nothing
    half = n // 2
    early = {j for i in range(SKIP, half) for j in np.flatnonzero(a[i] > 1 / half)}
    late = {j for i in range(half, n) for j in np.flatnonzero(a[i, :half] > 1 / half)}
    return {
        "sink_mass": np.mean([r[0] for r in rows]), "sink_mass_4": np.mean([r[:4].sum() for r in rows]), "sink_mass_last": a[-1, 0],
        **{f"coverage_{x}": received[: math.ceil(x * n / 100)].sum() / received.sum() for x in (5, 10, 20)},
        "sparsity": low / sum(map(len, rows)), "k95": np.mean(fewest),
        "persistence": len(early & late) / len(late) if late else math.nan, "held": len(early) / half,
    }  # fmt: skip


def concentration(q: np.ndarray) -> dict[str, float]:
    """q [n, D]: one head's queries before RoPE, as complex pairs."""
    z = q[SKIP:, : q.shape[1] // 2] + 1j * q[SKIP:, q.shape[1] // 2 :]
    centre, size = np.abs(z.mean(0)), np.abs(z).mean(0)
    best = int(size.argmax())
    return {"concentration": centre[best] / size[best], "concentration_energy": math.sqrt((centre**2).sum() / (size**2).sum())}


def lost(weights: np.ndarray, mask: np.ndarray) -> float:
    """Share of full attention [Hq, n, n] outside a mask [n, n] or [Hq, n, n]: mean over heads and the rows that count."""
    kept = (weights.astype(np.float64) * mask).sum(-1)[:, SKIP:]
    return float((1 - kept).mean())
