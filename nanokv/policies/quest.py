"""Evict nothing, but read only the pages whose bounding box could match the query.

The lesson: which tokens matter depends on the query, so forgetting is a bet and reading less is
not. Cut the keys into pages and keep each page's smallest and largest value per channel; the box
bounds every dot product inside it from above. Take the best pages, attend to those. It saves
*reads, not memory*: memory grows like `full`'s, plus two vectors a page.

Paper: Tang et al. 2024, https://arxiv.org/abs/2406.10774. Page size = page, token budget = budget.

| paper | official code | here |
|---|---|---|
| top budget / page pages per query head | CUDA: current page always, estimate not computed | current page always, the best of the rest |
| MHA | per query head | one set per KV head: `group` sum (or max) of the bounds over its queries |
| - | the first two layers dense | `dense` 2 |
| - | evaluation: sparse even if all fits | dense while the pages fit the budget |

The bound of a group's sum is two products: max(q m, q M) summed = relu(q) M + min(q, 0) m.
Cost: 1/page of the keys' reads for the boxes, then budget rows gathered and read.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..slots import Shapes, Slots
from .full import Full


@dataclass(frozen=True)
class Quest(Full):
    budget: int = 1024
    page: int = 16
    dense: int = 2
    group: str = "sum"

    step: ClassVar[str] = "queries"

    def __post_init__(self) -> None:
        self._whole(budget=1, page=1, dense=0)
        self._one_of("group", "sum", "max")
        if self.page > self.budget:
            raise ValueError(f"a budget of {self.budget} tokens holds no page of {self.page}")

    def plan(self, n_layers: int, prompt_len: int, max_new: int) -> list[int]:
        return [-(-(prompt_len + max_new) // self.page) * self.page] * n_layers

    def state(self, H: int, G: int, N: int, D: int) -> Shapes:
        return {"low": ((H, N // self.page, D), None), "high": ((H, N // self.page, D), None)}

    def settle(self, kv: Slots) -> None:
        pages = kv.keys.unflatten(1, (-1, self.page))  # [H, P, page, D]; slot = position, nothing was ever evicted
        live = kv.live.unflatten(1, (-1, self.page))[..., None]
        used = live.any(2)
        kv.state["low"].copy_(pages.masked_fill(~live, torch.inf).amin(2).masked_fill_(~used, 0))
        kv.state["high"].copy_(pages.masked_fill(~live, -torch.inf).amax(2).masked_fill_(~used, 0))

    def observe(self, kv: Slots, q: Tensor, pos: Tensor, probs: Tensor | None) -> None:
        key, page = kv.keys.index_select(1, pos), pos // self.page
        first = pos % self.page == 0
        for name, wider in (("low", torch.minimum), ("high", torch.maximum)):
            box = kv.state[name]
            box.index_copy_(1, page, torch.where(first, key, wider(box.index_select(1, page), key)))

    def read(self, kv: Slots, q: Tensor) -> Tensor | None:
        low, high = kv.state["low"], kv.state["high"]
        top = self.budget // self.page
        if kv.layer < self.dense or top >= low.shape[1]:
            return None
        here = (kv.now - 1) // self.page  # the page being written
        q = q[:, :, 0].float()  # [H, G, D]
        q = q if self.group == "max" else torch.cat((q.relu().sum(1, keepdim=True), q.clamp(max=0).sum(1, keepdim=True)), 1)
        up, down = (q.relu(), q.clamp(max=0)) if self.group == "max" else (q[:, :1], q[:, 1:])
        bound = (up @ high.float().mT + down @ low.float().mT).amax(1)  # [H, P]
        page = torch.arange(low.shape[1], device=q.device)
        bound = bound.masked_fill(page > here, -torch.inf).masked_fill(page == here, torch.inf)
        chosen = bound.topk(top, dim=1).indices
        return (chosen[..., None] * self.page + torch.arange(self.page, device=q.device)).flatten(1)
