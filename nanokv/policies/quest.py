"""Evict nothing, but read only the pages whose bounding box could match the query.

The lesson: which tokens matter depends on the query, so forgetting is a bet and reading less is
not. Cut the keys into pages, keep each page's smallest and largest value per channel: the box bounds
every dot product inside it. Attend to the best pages. It saves *reads, not memory*, which grows like `full`'s.

Paper: Tang et al. 2024, https://arxiv.org/abs/2406.10774. Page size = page, token budget = budget.
| paper | official code | here |
|---|---|---|
| top budget / page pages | CUDA: the current page always, the best of the others; evaluation: it competes | as the CUDA code |
| MHA | pages per query head | one set per KV head: `group` sum (or max) of the bounds over its queries |
| first two layers dense | evaluation counts layers down from 32 | `dense` 2 |
| - | evaluation: sparse even if all fits | dense while the pages fit the budget |
Cost: the boxes' reads, 1/page of keys and values, then budget rows gathered and read.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..later import Tensor, torch
from ..slots import Shapes, Slots
from .full import Full


@dataclass(frozen=True)
class Quest(Full):
    budget: int = 1024  # tokens read per head and step
    page: int = 16
    dense: int = 2  # so many first layers read everything
    group: str = "sum"  # or "max": over the query heads that share a KV head
    step: ClassVar[str] = "queries"

    def __post_init__(self) -> None:
        self._whole(budget=1, page=1, dense=0)
        self._one_of("group", "sum", "max")
        if self.page > self.budget:
            raise ValueError(f"a budget of {self.budget} tokens holds no page of {self.page}")

    @property
    def note(self) -> str:
        return f"quest keeps every token: its budget of {self.budget} bounds what a step reads, not what is stored"

    def plan(self, n_layers: int, prompt_len: int, max_new: int) -> list[int]:
        return [-(-(prompt_len + max_new) // self.page) * self.page] * n_layers

    def reads(self, layer: int, rows: int, tokens: int) -> int:
        return tokens if layer < self.dense or self.budget >= tokens else self.budget + tokens // self.page

    def state(self, H: int, G: int, N: int, D: int) -> Shapes:
        return {"box": ((H, N // self.page, 2 * D), None)}  # each page's smallest k and smallest -k, per channel

    def settle(self, kv: Slots) -> None:
        """A text was read: box its pages. Slot = position, for nothing is evicted; a page not begun is never read."""
        pages, here = kv.keys.unflatten(1, (-1, self.page)), (kv.now - 1) // self.page  # [H, P, page, D]
        torch.cat((pages.amin(2), -pages.amax(2)), -1, out=kv.state["box"])
        last, empty = pages.index_select(1, here), torch.arange(self.page, device=here.device) > (kv.now - 1) % self.page
        kv.state["box"].index_copy_(1, here, torch.cat((last, -last), -1).masked_fill(empty[:, None], torch.inf).amin(2))

    def observe(self, kv: Slots, q: Tensor, pos: Tensor, probs: Tensor | None) -> None:
        key, here, box = kv.keys.index_select(1, pos), pos // self.page, kv.state["box"]
        key = torch.cat((key, -key), -1)  # a step's key widens the box of its page, or begins one
        box.index_copy_(1, here, torch.where(pos % self.page == 0, key, torch.minimum(box.index_select(1, here), key)))

    def bound(self, kv: Slots, q: Tensor) -> Tensor:
        """What no key of a page [H, P] exceeds in its product with q [H, G, 1, D]: max(q low, q high), summed over D."""
        q = torch.cat((q, -q), -1)[:, :, 0].float().clamp(max=0)  # [H, G, 2D]: of each pair, the side that is felt
        box = kv.state["box"].float().mT
        return (q.sum(1, keepdim=True) @ box)[:, 0] if self.group == "sum" else (q @ box).amax(1)

    def read(self, kv: Slots, q: Tensor) -> Tensor | None:
        top, pages = self.budget // self.page, kv.width // self.page
        if kv.layer < self.dense or top >= pages:
            return None
        here, page = (kv.now - 1) // self.page, torch.arange(pages, device=q.device)
        bound = self.bound(kv, q).masked_fill(page > here, -torch.inf).index_fill(1, here, torch.inf)
        return bound.sort(dim=1, descending=True, stable=True).indices[:, :top]  # stable: of equals the older
