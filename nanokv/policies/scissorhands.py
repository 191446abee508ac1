"""Drop, a batch at a time, the tokens that the last queries ignored most often.

The lesson: importance persists. Nearly all tokens that will matter have mattered before, so count:
in each of the last `history` attention rows, did a token get less than its fair share, 1 / (tokens
in sight)? A count is not a magnitude: a token that draws 30 % once is worth no more than one that
draws 15 %. A row older than the token says nothing about it, so the young are favoured (H2O: the old).

Paper: Liu et al. 2023, https://arxiv.org/abs/2305.17118. w = history, r = window, m = interval.

| paper | research code (masks only, no budget) | here |
|---|---|---|
| marks "low score", prints the test the other way round | counts highs | counts lows, drops the most often low |
| threshold 1/t, t the step | a quantile of the row near 0.9 | `threshold`: visible (1/keys in sight), paper (1/t), quantile |
| rows recomputed or recorded | a window of rows | recorded: a ring of bits, G x history / 8 bytes a slot |
| drop m = half of the cache | - | `interval`: half the budget by default; budget = B + 1 |
| more rows to later layers, no figures | - | not built; `layers=pyramid` is the opposite claim |
| MHA | MHA | each query head judges, the group's counts add up; `norm`: per row that could see the token |

Cost: one bit per query head and slot each step. The cache swings between half and whole: mean about 0.75 B.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..policy import Scoring
from ..slots import Shapes, Slots

POPCOUNT = torch.tensor([bin(b).count("1") for b in range(256)], dtype=torch.int16)


@dataclass(frozen=True)
class Scissorhands(Scoring):
    window: int = 10
    interval: int | None = None  # None: half the budget
    history: int = 400
    threshold: str = "visible"
    norm: bool = False

    prompt: ClassVar[str] = "probs"
    step: ClassVar[str] = "probs"

    def __post_init__(self) -> None:
        if self.interval is None:
            self._whole(budget=1)
            object.__setattr__(self, "interval", max(self.budget // 2, 1))
        self._whole(history=1)
        self._one_of("threshold", "visible", "paper", "quantile")
        super().__post_init__()

    @property
    def watch(self) -> int:
        return self.history

    def marks(self, G: int) -> Shapes:
        return {"low": ((G, -(-self.history // 8)), torch.uint8)}

    def observe(self, kv: Slots, q: Tensor, pos: Tensor, probs: Tensor) -> None:
        K = probs.shape[-1]
        held = kv.pos[:, None, :K]
        seen = (held >= 0) & (held <= pos[:, None])  # [H, S, K]; a row older than the token does not count
        low = (probs < self._fair(probs, seen, pos)) & seen[:, None]  # [H, G, S, K]
        turn = pos % self.history  # the ring's place of each row
        byte, bit = turn // 8, (1 << turn % 8).to(torch.uint8)
        bits = kv.marks["low"][:, :K]
        clear = torch.zeros(bits.shape[-1], dtype=torch.uint8, device=bits.device).index_add_(0, byte, bit)
        new = torch.zeros_like(bits).index_add_(3, byte, low.permute(0, 3, 1, 2).to(torch.uint8) * bit)
        bits.copy_(bits & ~clear | new)

    def _fair(self, probs: Tensor, seen: Tensor, pos: Tensor) -> Tensor:
        """What a key must reach in a row not to be low, broadcast to [H, G, S, K]."""
        if self.threshold == "paper":
            return (1 / (pos + 1))[:, None]
        n = seen.sum(-1, keepdim=True)[:, None]  # keys in sight [H, 1, S, 1]
        if self.threshold == "visible":
            return 1 / n
        ranked = probs.masked_fill(~seen[:, None], -1).sort(-1).values  # out of sight first
        at = probs.shape[-1] - n + (0.9 * (n - 1)).long()
        return ranked.gather(-1, at.expand(*probs.shape[:3], 1))

    def score(self, kv: Slots) -> Tensor:
        low = POPCOUNT.to(kv.k.device)[kv.marks["low"].int()].sum((2, 3)).float()  # [H, N]
        if self.norm:
            rows = (kv.now - kv.pos).clamp(1, self.history)  # rows that could see it, the token's own included
            low = low / rows
        return -low
