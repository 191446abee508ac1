"""Let the end of the prompt vote, once, on which prompt tokens the answer will need.

The lesson: the last queries of a prompt attend where the answer will attend. The mean attention
of those `window` rows is a vote for each earlier token; pooling lets the neighbours of a hit
survive with it, so a number is kept whole and not as its first digit. The pooling decides more
than the evidence: max 7 finds needles at budgets where average 5 finds next to none.

Paper: Li et al. 2024, https://arxiv.org/abs/2404.14469. w = window, kernel = pooling width.

| paper | official code | here |
|---|---|---|
| softmax over all keys, sum of w rows, pool, top-k | the same, per query head, G x the memory | softmax, mean of w rows, `group` mean or max, pool: per KV head, float32 |
| LongBench: w 32, max 7 | avg 5 | `window` 32, `kernel` 7, `pooling` max or avg |
| the answer is never evicted | the cache grows again | hard budget: see below |
| one prompt | any longer call is a new prompt | a later turn's last rows vote over all that is live |

Under a hard budget the window's own tokens rank above all votes; the least-voted pick makes room for a
new token until the prompt is down to `prompt_share` of the rows, from then on the oldest generated
token does (with interval m, m at a time). The newest `recent` tokens are protected.
Cost: w rows of attention once more; nothing while decoding.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import WATCHED
from ..policy import FLOAT, Scoring
from ..slots import Shapes, Slots


@dataclass(frozen=True)
class SnapKV(Scoring):
    window: int = 32
    recent: int = 16
    kernel: int = 7
    pooling: str = "max"
    group: str = "mean"
    prompt_share: float = 0.5

    prompt: ClassVar[str] = "probs"

    def __post_init__(self) -> None:
        self._whole(window=1, recent=0, kernel=1)
        self._one_of("pooling", "max", "avg")
        self._one_of("group", "mean", "max")
        if self.window > WATCHED or self.kernel % 2 == 0 or not 0 <= self.prompt_share <= 1:
            raise ValueError(f"window must be at most {WATCHED}, kernel odd, prompt_share between 0 and 1; "
                             f"not {self.window}, {self.kernel}, {self.prompt_share}")
        super().__post_init__()

    @property
    def watch(self) -> int:
        return self.window

    def marks(self, G: int) -> Shapes:
        return {"votes": FLOAT}

    def observe(self, kv: Slots, q: Tensor, pos: Tensor, probs: Tensor) -> None:
        votes = probs.mean(2)  # [H, G, T]
        votes = votes.mean(1) if self.group == "mean" else votes.amax(1)
        voters = (kv.pos >= pos[0]) | ~kv.live  # the pool runs over the prefix alone
        if self.pooling == "max":
            votes = F.max_pool1d(votes.masked_fill(voters, -torch.inf), self.kernel, 1, self.kernel // 2)
        else:
            votes = F.avg_pool1d(votes.masked_fill(voters, 0), self.kernel, 1, self.kernel // 2)
        least = torch.finfo(torch.float32).tiny  # 0 is the mark of a generated token
        kv.marks["votes"].copy_(votes.clamp(min=least).masked_fill(voters, 2.0))

    def score(self, kv: Slots) -> Tensor:
        votes = kv.marks["votes"]
        generated = votes == 0
        prompt = (~generated & kv.live).sum(1, keepdim=True)
        crowded = prompt > self.prompt_share * kv.caps[:, None]
        return torch.where(generated, torch.where(crowded, 3.0, (kv.pos - kv.now).float()), votes)
