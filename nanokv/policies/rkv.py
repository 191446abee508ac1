"""Keep what is attended to and is not said twice.

The lesson: a chain of thought repeats itself, and attention alone keeps every copy. So a token's
worth is the attention that the last `window` queries pay to it, minus how much its key resembles
the other keys of its head; and each token forgives its newest look-alike, so that of many copies the
latest survives. All of it in the order of time, whatever slots the tokens stand in.

Paper: Cai et al. 2025, https://arxiv.org/abs/2505.24133. alpha = window, lambda = mix, T = alike, B_buffer = interval.

| paper | official code | here |
|---|---|---|
| spare the beta newest above T; row mean | zero the newest above 0.5 in each row, else entry 0; column mean | the code's |
| pool, then mean over queries | mean, then max-pool `kernel` 7 | the code's |
| lambda 0.1 | 0.07 in the class | `mix` 0.1 |
| budget + buffer 128 | swings between B and B + 128 | budget is B + buffer; `interval` min(128, budget / 8) |

Column sums need no S x S matrix: sum_i u_i . u_s = u_s . U, less what was forgiven. Cost: S^2 D per head at each choice.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..later import Tensor, torch
from ..policy import Scoring
from ..slots import Shapes, Slots


@dataclass(frozen=True)
class RKV(Scoring):
    window: int = 8
    interval: int | None = None  # None: min(128, budget / 8)
    mix: float = 0.1
    kernel: int = 7
    alike: float = 0.5
    prompt: ClassVar[str] = "queries"
    step: ClassVar[str] = "queries"

    def __post_init__(self) -> None:
        self._whole(budget=1, window=1)
        self._unless_set(interval=self._eighth)
        self._odd("kernel")
        self._between(0, 1, "mix", "alike")
        super().__post_init__()

    def working(self, H: int, G: int, T: int, D: int, watched: int) -> int:
        return H * T * (3 * D * 4 + 128 * 9)

    def state(self, H: int, G: int, N: int, D: int) -> Shapes:
        return {"queries": ((H, G, self.window, D), None)}

    def observe(self, kv: Slots, q: Tensor, pos: Tensor, probs: Tensor | None) -> None:
        q, pos = q[:, :, -self.window :], pos[-self.window :]
        kv.state["queries"].index_copy_(2, pos % self.window, q)  # a ring, full long before anything is scored

    def score(self, kv: Slots) -> Tensor:
        time = kv.pos.masked_fill(~kv.live, 2**31 - 1).argsort(1)[:, : max(kv.shares)]  # [H, M], the empty ones last
        pos = kv.pos.gather(1, time)
        live, old = pos >= 0, (pos >= 0) & (pos < kv.now - self.window)
        k = kv.k[kv.pool_rows.gather(1, time)].float().masked_fill(~live[..., None], 0)  # [H, M, D]
        logits = (kv.state["queries"].float() @ k[:, None].mT).amax(1) * kv.scale  # [H, w, M]
        probs = logits.masked_fill(~old[:, None], torch.finfo(torch.float32).min).softmax(-1)
        pooled = torch.max_pool1d(probs.mean(1).masked_fill(~old, 0), self.kernel, 1, self.kernel // 2)
        z = self.mix * pooled - (1 - self.mix) * redundancy(k, live, self.alike)
        return z.new_zeros(kv.pos.shape).scatter_(1, time, z)


def redundancy(k: Tensor, live: Tensor, alike: float, block: int = 128) -> Tensor:
    """Each key's share of all likeness that is not forgiven; k [H, M, D] in time order, 0 where not live -> [H, M]."""
    u = k / (k.norm(dim=-1, keepdim=True) + 1e-8)
    place = torch.arange(k.shape[1], dtype=torch.int32, device=k.device)
    total = (u @ u.sum(1)[..., None])[..., 0] - u.square().sum(-1)
    for a in range(0, k.shape[1], block):
        like = u[:, a : a + block] @ u.mT  # [H, C, M]
        like.diagonal(a, 1, 2).zero_()
        newest = torch.where(like > alike, place, 0).amax(-1, keepdim=True).long()
        total.scatter_add_(1, newest[..., 0], -like.gather(2, newest)[..., 0])
    return (total / live.sum(1, keepdim=True)).masked_fill(~live, -torch.inf).softmax(-1)
