"""Let the end of the prompt vote, once, on which prompt tokens the answer will need.

The lesson: the last queries of a prompt attend where the answer will attend. The mean attention
of those `window` rows is a vote for each earlier token; pooling lets the neighbours of a hit
survive with it, so a number is kept whole and not as its first digit. The pooling decides more
than the evidence: max 7 finds needles at budgets where average 5 finds next to none.

Paper: Li et al. 2024, https://arxiv.org/abs/2404.14469. w = window; its capacity C = budget - interval.

| paper | official code | here |
|---|---|---|
| softmax over all keys, sum of w rows, pool, top-k | the same, per query head: G x the memory | softmax, mean of w rows, `group` mean or max, pool; per KV head, float32 |
| LongBench: w 32, max 7 | w 64, avg 5 | `window` 32, `kernel` 7, `pooling` max or avg |
| the answer is never evicted | the cache grows again | hard budget: see below |
| one prompt | any longer call is a new prompt | a later turn's last rows vote over all that is live |

Under a hard budget the window's own tokens rank above all votes. The least-voted token makes room
for a new one until those with votes are down to `prompt_share` of the rows; from then on the oldest
generated token does (with interval m: m at a time). The newest `recent` are protected.
Cost: w rows of attention once more; nothing while decoding.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..attention import WATCHED
from ..later import F, Tensor, torch
from ..policy import FLOAT, Scoring
from ..slots import Shapes, Slots


@dataclass(frozen=True)
class SnapKV(Scoring):
    window: int | None = None  # None: 32, or half the budget where that is less
    recent: int | None = None  # None: 16, or the window where that is less
    kernel: int = 7
    pooling: str = "max"  # or "avg"
    group: str = "mean"  # or "max": over the query heads that share a KV head
    prompt_share: float = 0.5

    prompt: ClassVar[str] = "probs"

    def __post_init__(self) -> None:
        self._whole(budget=1)
        self._unless_set(window=max(min(32, self.budget // 2), 1))
        self._whole(window=1)
        self._unless_set(recent=min(16, self.window))
        self._whole(recent=0)
        self._odd("kernel")
        self._one_of("pooling", "max", "avg")
        self._one_of("group", "mean", "max")
        if not self.recent <= self.window <= WATCHED:
            raise ValueError(f"window must be from recent, {self.recent}, to {WATCHED}, not {self.window}")
        self._between(0, 1, "prompt_share")
        super().__post_init__()

    @property
    def watch(self) -> int:
        return self.window

    def marks(self, G: int) -> Shapes:
        return {"votes": FLOAT}

    def observe(self, kv: Slots, q: Tensor, pos: Tensor, probs: Tensor) -> None:
        votes = probs.mean((1, 2)) if self.group == "mean" else probs.mean(2).amax(1)  # [H, T]
        voters = kv.pos >= pos[0]  # the pool runs over the prefix alone
        pool, outside = (F.max_pool1d, -torch.inf) if self.pooling == "max" else (F.avg_pool1d, 0)
        votes = pool(votes.masked_fill(voters, outside), self.kernel, 1, self.kernel // 2)
        kv.marks["votes"].copy_(votes.clamp(min=1e-37).masked_fill(voters, 2.0))  # 0: a generated token

    def score(self, kv: Slots) -> Tensor:
        votes = kv.marks["votes"]
        generated = votes == 0
        crowded = (~generated & kv.live).sum(1, keepdim=True) > self.prompt_share * kv.caps[:, None]  # [H, 1]
        last = torch.where(crowded, -3, kv.now)  # the oldest generated token goes after all votes, or before
        return torch.where(generated, (kv.pos - last).float(), votes)
