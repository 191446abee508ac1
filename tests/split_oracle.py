"""How a budget is split, again: exact fractions, plain lists, one row at a time."""

import math
from collections.abc import Sequence
from fractions import Fraction


def pyramid_shares(mean: int, n_layers: int, most: int, beta: float, least: int) -> list[int]:
    """PyramidKV's line, rounded cumulatively; then one row at a time from the widest (the last of equals) to one in need."""
    if n_layers == 1:
        return [mean]
    narrow = mean / Fraction(str(beta))
    wide = 2 * mean - narrow
    if wide > most:
        wide, narrow = Fraction(most), Fraction(2 * mean - most)
    ideal = [wide - (wide - narrow) * layer / (n_layers - 1) for layer in range(n_layers)]
    upto = [math.floor(sum(ideal[:layer]) + Fraction(1, 2)) for layer in range(n_layers + 1)]
    rows = [upto[layer + 1] - upto[layer] for layer in range(n_layers)]
    while min(rows) < least:
        widest = [layer for layer in range(n_layers) if rows[layer] == max(rows)][-1]
        rows[widest] -= 1
        rows[rows.index(min(rows))] += 1
    return rows


def head_shares(scores: Sequence[Sequence], mean: int, floor_ratio: float) -> list[int]:
    """Ada-KV: the best of all heads together say what each needs (of equals: lower head, older token); blend; largest remainders."""
    H = len(scores)
    ranked = sorted(((x, -h, -i) for h, head in enumerate(scores) for i, x in enumerate(head)), reverse=True)
    need = [sum(-h == head for _, h, _ in ranked[: H * mean]) for head in range(H)]
    alpha = Fraction(str(floor_ratio))
    ideal = [(1 - alpha) * f + alpha * mean for f in need]
    share = [math.floor(x) for x in ideal]
    order = sorted(range(H), key=lambda h: (share[h] - ideal[h], -need[h], h))
    for h in order[: H * mean - sum(share)]:
        share[h] += 1
    return share
