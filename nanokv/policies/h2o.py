"""Keep the recent half, and of the rest the heavy hitters: tokens that have drawn the most attention so far.

The lesson: attention received is heavy-tailed. Add up the softmax weight that every query so far
gave to a token, and a few tokens hold most of the sum. Keep those. The sum is local knowledge
(no query of the future is needed), never decayed, and gone with the token when it is evicted.

Paper: Zhang et al. 2023, https://arxiv.org/abs/2306.14048. H heavy + R recent = budget - 1.

| paper | official code (real drop) | here |
|---|---|---|
| k heavy + k recent | H + R kept, H + R + 1 attended | budget = H + R + 1; `window` = R, half by default |
| evicts at every step, the prompt's too | exact prompt, then one choice | as the code; the token leaving the window competes |
| MHA | crashes on grouped queries | `group`: sum over the group; mean ranks alike; max compares each query head's own sum |
| - | sums in the model's dtype: they stall in half precision | float32 |
| sinks stay because they are heavy | as the paper | `sink` 0 by default |

Early tokens have more summands: that is the method. Its authors tried the average, and it was worse.
Cost: the prompt's attention once more, block by block; 4 bytes a slot.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..later import Tensor
from ..policy import FLOAT, Scoring
from ..slots import Shapes, Slots


@dataclass(frozen=True)
class H2O(Scoring):
    window: int | None = None  # None: half of what sinks and the tokens to come leave
    group: str = "sum"  # or "mean", "max": over the query heads that share a KV head

    prompt: ClassVar[str] = "probs"
    step: ClassVar[str] = "probs"

    def __post_init__(self) -> None:
        if self.window is None:
            self._whole(budget=1, sink=0, interval=1)
            self._unless_set(window=max(self.budget - self.sink - self.interval, 0) // 2)
        self._one_of("group", "sum", "mean", "max")
        super().__post_init__()

    def marks(self, G: int) -> Shapes:
        return {"mass": ((G,), "float32") if self.group == "max" else FLOAT}

    def observe(self, kv: Slots, q: Tensor, pos: Tensor, probs: Tensor) -> None:
        received, K = probs.sum(2), probs.shape[-1]  # [H, G, K]
        if self.group == "max":
            received = received.mT
        else:
            received = received.sum(1) if self.group == "sum" else received.mean(1)
        kv.marks["mass"][:, :K] += received

    def score(self, kv: Slots) -> Tensor:
        mass = kv.marks["mass"]
        return mass.amax(2) if self.group == "max" else mass
