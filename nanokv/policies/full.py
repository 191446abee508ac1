"""Keep everything: the yardstick that every other policy is measured against.

The lesson: a KV cache is nothing but the keys and values of the tokens read so far, kept so that
each new token costs one row of attention instead of a whole triangle. It also is the problem:
2 x layers x KV heads x head_dim numbers for every token, and no end to it.

Paper: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762 (the attention that is cached).

Its rows are the prompt plus the tokens asked for, so there is no budget and nothing to dial. When
they are used up it stops with a sentence instead of growing: memory is never taken by surprise.
"""

from dataclasses import dataclass

from ..later import Tensor
from ..policy import Policy
from ..slots import Slots


@dataclass(frozen=True)
class Full(Policy):
    def plan(self, n_layers: int, prompt_len: int, max_new: int) -> list[int]:
        return [prompt_len + max_new] * n_layers

    def score(self, kv: Slots) -> Tensor:
        raise ValueError(
            f"the {self.name} cache is used up: it was made for as many tokens as were announced and forgets none; "
            "announce more, or choose a policy with a budget"
        )
