"""How a budget is split: over layers as a pyramid, over the heads of a layer by need.

Both splits conserve the total exactly, because the memory behind them is allocated once: what one
layer or head gains another gives. Both deal out what is left after the protected tokens, so no
layer and no head ever falls below sink + window + interval.
"""

import torch
from torch import Tensor


def pyramid(mean: int, n_layers: int, most: int, beta: float, least: int = 0) -> list[int]:
    """Rows of each layer, falling in a straight line from about 2 x mean to mean / beta; they sum to n_layers x mean.

    mean: rows per layer to deal out; most: the bottom layer needs no more (the text's length);
    least: what a layer gets at any rate, taken from the widest ones. PyramidKV (Cai et al. 2024,
    https://arxiv.org/abs/2406.02069) with cumulative rounding; its code floors the slope instead
    and spends up to 27 % more than it was given.
    """
    if beta < 1:
        raise ValueError(f"beta must be at least 1 (1: every layer gets the same), not {beta}")
    if least > mean:
        raise ValueError(f"a mean of {mean} rows a layer cannot give every layer {least}")
    top = mean / beta
    bottom = 2 * mean - top
    if bottom > most:
        bottom, top = most, 2 * mean - most
    slope = (bottom - top) / max(n_layers - 1, 1)
    ideal = [bottom - layer * slope for layer in range(n_layers)] if n_layers > 1 else [float(mean)]
    edges = [int(sum(ideal[:layer]) + 0.5) for layer in range(n_layers)] + [n_layers * mean]
    rows = [b - a for a, b in zip(edges, edges[1:])]
    for layer in range(n_layers):
        while rows[layer] < least:
            rows[rows.index(max(rows))] -= 1
            rows[layer] += 1
    return rows


def adaptive(score: Tensor, mean: int, floor_ratio: float) -> list[int]:
    """Slots of each head, given scores [H, P] of what competes for them; they sum to H x mean.

    The H x mean best scores of the layer, taken over all heads together, say how many a head
    deserves; blended with an equal share of weight floor_ratio (0: by need alone, 1: equal).
    mean <= P. Ada-KV (Feng et al. 2024, https://arxiv.org/abs/2407.11550) with the largest
    remainders rounded up; its code rounds each head for itself and loses or gains slots.
    """
    H, P = score.shape
    best = score.reshape(-1).argsort(descending=True, stable=True)[: H * mean]  # of equals: lower head, older token
    deserved = torch.bincount(best // P, minlength=H).tolist()
    ideal = [(1 - floor_ratio) * f + floor_ratio * mean for f in deserved]
    slots = [int(t + 1e-9) for t in ideal]
    by_remainder = sorted(range(H), key=lambda h: (round(slots[h] - ideal[h], 9), -deserved[h], h))
    for h in by_remainder[: H * mean - sum(slots)]:
        slots[h] += 1
    return slots
