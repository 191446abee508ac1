"""How a budget is split: over layers as a pyramid, over the heads of a layer by need.

Both splits conserve the total exactly, because the memory behind them is allocated once: what one
layer or head gains another gives. Both deal out what is left after the protected tokens, so no
layer and no head ever falls below sink + window + interval.
"""

from itertools import accumulate

from .later import Tensor, torch


def pyramid(mean: int, n_layers: int, most: int, beta: float, least: int = 0) -> list[int]:
    """Rows of each layer, falling in a straight line from about 2 x mean to mean / beta; they sum to n_layers x mean.

    mean: rows per layer to deal out; most >= mean: the bottom layer needs no more (the text's
    length); least: what a layer gets at any rate, taken from the widest ones (0: the plain line).
    PyramidKV (Cai et al. 2024, https://arxiv.org/abs/2406.02069) with cumulative rounding; its code
    floors the slope instead and spends up to 27 % more than it was given.
    """
    if not beta >= 1:
        raise ValueError(f"beta must be at least 1 (1: every layer gets the same), not {beta}")
    if least > mean:
        raise ValueError(f"a mean of {mean} rows a layer cannot give every layer {least}")
    if n_layers == 1:
        return [mean]
    bottom = min(2 * mean - mean / beta, most)
    slope = 2 * (bottom - mean) / (n_layers - 1)
    half = 0.5 + 1e-9  # what float64 loses in a sum must not decide
    edges = [int(x + half) for x in accumulate(bottom - layer * slope for layer in range(n_layers))]
    rows = [b - a for a, b in zip([0, *edges], edges)]
    for layer in range(n_layers):
        while rows[layer] < least:
            rows[rows.index(max(rows))] -= 1
            rows[layer] += 1
    return rows


def adaptive(score: Tensor, mean: int, floor_ratio: float, most: int | None = None) -> list[int]:
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
    slots = [int(t) for t in ideal]
    by_remainder = sorted(range(H), key=lambda h: (round(slots[h] - ideal[h], 9), -deserved[h], h))
    for h in by_remainder[: H * mean - sum(slots)]:
        slots[h] += 1
    if most is not None and max(slots) > most:
        spare = sum(max(n - most, 0) for n in slots)
        slots = [min(n, most) for n in slots]
        for h in sorted(range(H), key=lambda h: (-ideal[h], h)):  # to the neediest that have room
            given = min(most - slots[h], spare)
            slots[h], spare = slots[h] + given, spare - given
    return slots
