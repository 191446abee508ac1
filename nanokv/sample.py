"""The next token from the logits: greedy, or drawn by temperature, top-k, top-p and min-p.

The insight: of independent clocks that ring at rates p_i, the first to ring is i with
probability p_i. So a draw is `argmax(p / e)` with e exponential: no sum, no search, nothing the
CPU has to wait for, and the token stays a tensor on the device.
"""

import math
import secrets
from dataclasses import dataclass, field

from .later import Tensor, torch


@dataclass(frozen=True)
class Sampler:
    """How the next token is chosen; the defaults are greedy.

    The filters work in this order, each on what the one before left: temperature divides the
    logits; top_k keeps the k likeliest (0: all); top_p keeps the likeliest until they hold that
    share of the remaining probability (the one that crosses it stays); min_p drops what is less
    likely than min_p times the likeliest. Of equal logits the lower id counts as likelier.

    seed: None draws one, to be read afterwards and printed. Two samplers with one seed draw the
    same sequence (on one kind of device). valid_vocab: ids from here on are a model's padding
    and never chosen.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    valid_vocab: int | None = None
    _generators: dict = field(default_factory=dict, init=False, repr=False, compare=False)  # by device

    def __post_init__(self):
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if self.top_k < 0 or self.top_k != int(self.top_k):
            raise ValueError(f"top-k must be 0 (all tokens) or a whole number above it, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p must be above 0 and at most 1 (all tokens), not {self.top_p}")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min-p must be at least 0 (all tokens) and below 1, not {self.min_p}")
        if self.seed is None:
            object.__setattr__(self, "seed", secrets.randbelow(2**32))  # short enough to type again
        if not 0 <= self.seed < 2**63 or self.seed != int(self.seed):
            raise ValueError(f"seed must be a whole number from 0 to 2^63 - 1, not {self.seed}")
        if self.valid_vocab is not None and self.valid_vocab < 1:
            raise ValueError(f"valid_vocab must be at least 1, not {self.valid_vocab}")

    def __call__(self, logits: Tensor) -> Tensor:
        """logits [vocab] -> the chosen id [1], int64, without waiting for the device."""
        if self.temperature == 0:
            return logits[: self.valid_vocab].argmax(-1, keepdim=True)
        p = self.probabilities(logits)
        clock = torch.empty_like(p).exponential_(generator=self._generator(p.device))
        return (p / clock.clamp_min_(1e-30)).argmax(-1, keepdim=True)  # 0 / 0 would win

    def probabilities(self, logits: Tensor) -> Tensor:
        """logits [vocab] -> [valid vocab] float32: 0 where filtered, else in proportion to the chance."""
        logits = logits[: self.valid_vocab].float() / max(self.temperature, 1e-30)  # float32 calls less 0
        if self.top_k or self.top_p < 1:
            logits = self._likeliest(logits)
        p = logits.softmax(-1)
        return p.where(p >= self.min_p * p.max(), 0) if self.min_p else p

    def _likeliest(self, logits: Tensor) -> Tensor:
        """logits with -inf where top-k and top-p drop: sorted values say how many stay and where to cut."""
        k = min(self.top_k or logits.numel(), logits.numel())
        best = logits.topk(k).values if k < logits.numel() else logits.sort(descending=True).values
        p, share = best.softmax(-1), self.top_p if self.top_p < 1 else math.inf
        m = (p.cumsum(-1) - p < share).sum(-1, keepdim=True)
        last = best.gather(-1, (m - 1).clamp_min(0))
        above, tied = logits > last, logits == last  # of the tied, the lower ids stay
        return logits.where(above | tied & (tied.cumsum(-1) <= m - above.sum()), -math.inf)

    def _generator(self, device: "torch.device") -> "torch.Generator":
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[device]
