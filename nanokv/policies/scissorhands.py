"""Drop, a batch at a time, the tokens that the last queries ignored most often.

The lesson: importance persists. Nearly all tokens that will matter have mattered before, so count: in how
many of the last `history` attention rows did a token get less than its fair share, 1 / (tokens in sight)?
30 % of a row counts no more than 15 %. Rows older than a token do not judge it: that favours the young.

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

from ..later import Tensor, torch
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
        self._unless_set(interval=max(min(self.budget // 2, self.budget - self.sink - self.window), 1))
        super().__post_init__()

    def marks(self, G: int) -> Shapes:
        return {"low": ((G, -(-self.history // 8)), "uint8")}

    def observe(self, kv: Slots, q: Tensor, pos: Tensor, probs: Tensor) -> None:
        H, G, S, K = probs.shape
        held, bits = kv.pos[:, None, :K], kv.marks["low"][:, :K]  # [H, 1, K], [H, K, G, bytes]
        byte, bit = pos % self.history // 8, (1 << pos % self.history % 8).byte()  # each row's place in the ring
        seen = ((held >= 0) & (held <= pos[:, None]))[:, None]  # [H, 1, S, K]: not by a row older than the token
        low = (probs < self._fair(probs, seen, pos)) & seen  # [H, G, S, K]
        if S == 1:  # a step touches one byte of every slot
            low, old = low.transpose(1, 3)[:, :, 0, :, None], bits.index_select(3, byte)
            bits.index_copy_(3, byte, torch.where(low, old | bit, old & ~bit))
            return
        low = low * bit[:, None]
        low = low.new_zeros(H, G, bits.shape[3], K).index_add_(2, byte, low)  # rows share bytes, and add up
        bit = bit.new_zeros(bits.shape[3]).index_add_(0, byte, bit)
        low = low.flatten(0, 2).mT.contiguous().view(K, H, G, -1)  # (a flat transposition is the fast one)
        bits.bitwise_and_(~bit).bitwise_or_(low.transpose(0, 1))

    def _fair(self, probs: Tensor, seen: Tensor, pos: Tensor) -> Tensor:
        """What a token must reach in a row not to be low, broadcast to [H, G, S, K]."""
        n = seen.sum(-1, keepdim=True, dtype=torch.int32)  # tokens in sight [H, 1, S, 1]
        if self.threshold != "quantile":
            return 1 / n if self.threshold == "visible" else (1 / (pos + 1))[:, None]
        ranked = probs.masked_fill(~seen, -1).sort(-1).values  # those out of sight come first
        return ranked.gather(-1, (probs.shape[-1] - n + 9 * (n - 1) // 10).long().expand(*probs.shape[:3], 1))

    def score(self, kv: Slots) -> Tensor:
        x = kv.marks["low"]
        x = (x & 0x55) + (x >> 1 & 0x55)  # how many bits of each byte are 1: neighbours add up, then pairs, then halves
        x = (x & 0x33) + (x >> 2 & 0x33)
        low = ((x & 0x0F) + (x >> 4)).flatten(2).sum(2, dtype=torch.int32).float()  # [H, N]
        return -low / (kv.now - kv.pos).clamp(1, self.history) if self.norm else -low  # per row that could see the token
