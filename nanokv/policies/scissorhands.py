"""Drop, a batch at a time, the tokens that the last queries ignored most often.

The lesson: importance persists. Nearly all tokens that will matter have mattered before, so count: in
how many of the last `history` attention rows did a token get less than its fair share, 1 / (tokens in
sight)? A count is no magnitude: 30 % of a row is worth no more than 15 %. A row older than the token
says nothing about it, so the young are favoured (H2O: the old).

Paper: Liu et al. 2023, https://arxiv.org/abs/2305.17118. w = history, r = window, m = interval.

| paper | research code (masks only, no budget) | here |
|---|---|---|
| marks "low score", prints the test the other way round | counts highs | counts lows, drops the most often low |
| below 1/t, t the step | a quantile of the row, near 0.9 | `threshold`: visible (1/tokens in sight), paper, quantile |
| rows recomputed or recorded | a window of rows | recorded: a ring of bits, G x history / 8 bytes a slot |
| drops m = B/2 when over B | - | budget = B + 1; `interval`: half of it by default |
| later layers get more, no figures | - | not built; `layers=pyramid` claims the opposite |
| MHA | MHA | each query head judges, counts add up; `norm`: per row that could see the token |

Cost: one bit per query head and slot each step. The cache swings between half and whole: mean about 0.75 B.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..policy import Scoring
from ..slots import Shapes, Slots


@dataclass(frozen=True)
class Scissorhands(Scoring):
    window: int = 10
    interval: int | None = None  # None: half the budget, or what sinks and window leave of it
    history: int = 400
    threshold: str = "visible"  # or "paper", "quantile"
    norm: bool = False
    prompt: ClassVar[str] = "probs"
    step: ClassVar[str] = "probs"
    watch = property(lambda self: self.history)

    def __post_init__(self) -> None:
        self._whole(budget=1, sink=0, window=0, history=1)
        self._one_of("threshold", "visible", "paper", "quantile")
        if self.interval is None:
            object.__setattr__(self, "interval", max(min(self.budget // 2, self.budget - self.sink - self.window), 1))
        super().__post_init__()

    def marks(self, G: int) -> Shapes:
        return {"low": ((G, -(-self.history // 8)), torch.uint8)}

    def observe(self, kv: Slots, q: Tensor, pos: Tensor, probs: Tensor) -> None:
        held, bits = (x[:, : probs.shape[-1]] for x in (kv.pos, kv.marks["low"]))  # [H, K], [H, K, G, bytes]
        seen = (held[:, None] >= 0) & (held[:, None] <= pos[:, None])  # [H, S, K]: not by a row older than the token
        place = pos % self.history  # of each row in the ring
        byte, bit = place // 8, (1 << place % 8).byte()
        low = ((probs < self._fair(probs, seen, pos)) & seen[:, None]) * bit[:, None]  # [H, G, S, K]
        if len(pos) > 1:  # rows of a text share bytes, and add up; a step touches one byte of every slot
            n = bits.shape[-1]
            low = low.new_zeros(*low.shape[:2], n, low.shape[3]).index_add_(2, byte, low)
            byte, bit = torch.arange(n, device=pos.device), bit.new_zeros(n).index_add_(0, byte, bit)
        bits.index_copy_(3, byte, bits.index_select(3, byte) & ~bit | low.permute(0, 3, 1, 2))

    def _fair(self, probs: Tensor, seen: Tensor, pos: Tensor) -> Tensor:
        """What a token must reach in a row not to be low, broadcast to [H, G, S, K]."""
        if self.threshold == "paper":
            return (1 / (pos + 1))[:, None]
        n = seen.sum(-1, keepdim=True)[:, None]  # tokens in sight [H, 1, S, 1]
        if self.threshold == "visible":
            return 1 / n
        ranked = probs.masked_fill(~seen[:, None], -1).sort(-1).values  # those out of sight come first
        return ranked.gather(-1, (probs.shape[-1] - n + 9 * (n - 1) // 10).expand(*probs.shape[:3], 1))

    def score(self, kv: Slots) -> Tensor:
        x = kv.marks["low"]
        x = (x & 0x55) + (x >> 1 & 0x55)  # how many bits of each byte are 1: neighbours add up, then pairs, then halves
        x = (x & 0x33) + (x >> 2 & 0x33)
        low = ((x & 0x0F) + (x >> 4)).sum((2, 3)).float()  # [H, N]
        return -low / (kv.now - kv.pos).clamp(1, self.history) if self.norm else -low  # per row that could see the token
