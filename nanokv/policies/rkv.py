"""Keep what is attended to and is not said twice.

The lesson: a chain of thought repeats itself, and attention alone keeps every copy. So a token's
worth is the attention that the last `window` queries pay to it, minus how much its key resembles
the other keys of its head; and each token forgives its newest look-alike, so that of many copies the
latest survives. Scored in the order of time, whatever slots the tokens stand in.

Paper: Cai et al. 2025, https://arxiv.org/abs/2505.24133. alpha = window, lambda = mix, T = alike, B_buffer = interval.

| paper | official code | here |
|---|---|---|
| spare the beta newest above T; row mean | zero the newest above 0.5 in each row, column mean | the code's rule |
| pool, then mean over queries | mean, then max-pool 7 | the code's |
| lambda 0.1 | 0.07 in the class | `mix` 0.1 |
| budget + buffer 128 | swings between B and B + 128 | budget is B + buffer; `interval` min(128, budget / 8) |
| - | no similar key: entry 0 of the row is zeroed | the same |

Column sums need no S x S matrix: sum_i u_i . u_s = u_s . U, less itself and less what was forgiven.
Cost: S^2 D per head whenever room is made, in blocks of linear memory; `window` queries kept.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..policy import Scoring
from ..slots import Shapes, Slots

BLOCK = 512


@dataclass(frozen=True)
class RKV(Scoring):
    window: int = 8
    interval: int | None = None
    mix: float = 0.1
    kernel: int = 7
    alike: float = 0.5

    prompt: ClassVar[str] = "queries"
    step: ClassVar[str] = "queries"

    def __post_init__(self) -> None:
        if self.interval is None:
            self._whole(budget=1)
            object.__setattr__(self, "interval", max(min(128, self.budget // 8), 1))
        self._whole(window=1, kernel=1)
        super().__post_init__()

    @property
    def watch(self) -> int:
        return self.window

    def state(self, H: int, G: int, N: int, D: int) -> Shapes:
        return {"queries": ((H, G, self.window, D), None), "asked": ((1,), torch.long)}

    def observe(self, kv: Slots, q: Tensor, pos: Tensor, probs: Tensor | None) -> None:
        kv.state["queries"].index_copy_(2, pos % self.window, q)  # a ring: the mean does not care where it starts
        kv.state["asked"].copy_(pos[-1:] + 1)

    def score(self, kv: Slots) -> Tensor:
        end = torch.iinfo(torch.int32).max
        time = kv.pos.masked_fill(~kv.live, end).argsort(1)  # [H, N], those that hold nobody last
        pos = kv.pos.gather(1, time)
        live = pos >= 0
        k = kv.k[kv.rows(time).clamp(max=kv.k.shape[0] - 1)].float()  # [H, N, D]
        z = self.mix * self._attention(kv, k, live & (pos < kv.now - self.window))
        z -= (1 - self.mix) * self._redundancy(k, live)
        return torch.empty_like(z).scatter_(1, time, z)

    def _attention(self, kv: Slots, k: Tensor, candidates: Tensor) -> Tensor:
        logits = (kv.state["queries"].float() @ k[:, None].mT).amax(1) * kv.scale  # [H, w, N]
        logits = logits.masked_fill(~candidates[:, None], -1e30).softmax(-1)
        asked = torch.arange(self.window, device=k.device)[:, None] < kv.state["asked"]
        seen = (logits * asked).sum(1) / asked.sum()
        pooled = F.max_pool1d(seen.masked_fill(~candidates, -1), self.kernel, 1, self.kernel // 2)
        return pooled.clamp(min=0)

    def _redundancy(self, k: Tensor, live: Tensor) -> Tensor:
        u = k / (k.norm(dim=-1, keepdim=True) + 1e-8) * live[..., None]
        column = torch.arange(k.shape[1], device=k.device)
        total = (u @ u.sum(1)[..., None])[..., 0] - (u * u).sum(-1)  # column sums without the diagonal
        for a in range(0, k.shape[1], BLOCK):
            c = u[:, a : a + BLOCK] @ u.mT  # [H, C, N]
            c[:, column[: c.shape[1]], column[a : a + BLOCK]] = 0
            newest = torch.where(c > self.alike, column, 0).amax(-1)  # [H, C]
            total.scatter_add_(1, newest, -c.gather(2, newest[..., None])[..., 0])
        mean = total / live.sum(1, keepdim=True)
        return mean.masked_fill(~live, -torch.inf).softmax(-1)
