"""Reading: a text on its way into the slots, layer by layer, in blocks of rows.

The insight: when a layer's text is attended to, its keys and values stand in one scratch `Slots`,
and everything that happens to them afterwards is what a policy does to any slots. So reading is a
loop over blocks of rows (append keys, attend, watch), and then one selection. The scratch is the
only thing that grows with the text, and it lives for one layer.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import attend_prompt, watch_prompt, watched_rows
from .policy import Policy, select
from .rope import angles, turn
from .slots import Slots


class Memory:
    """What a reader fills: the slots of every layer, and the policy that rules them."""

    slots: list[Slots]
    policy: Policy
    freqs: Tensor
    scale: float


class Reading:
    """Answers `attend` for one text of S tokens, read by one memory, or by several side by side.

    Several memories must hold tokens at the same positions, in one dtype, and share a model: the attention itself
    is computed once, over what the first of them holds, and every policy watches it.
    """

    def __init__(self, memories: Sequence[Memory], S: int, device: torch.device):
        first = memories[0]
        self.memories, self.S, self.done, self.layer = memories, S, 0, -1
        self.pos = first.slots[0].now + torch.arange(S, device=device)
        self.cos, self.sin = angles(self.pos, first.freqs)
        self.texts: list[Slots] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [H, G, C, D], k v [H, C, D] of the next C tokens -> what they attend to [H, G, C, D]."""
        if self.done == 0:
            # the last layer's scratch becomes the next one's: what is given back and taken again stays resident in between
            spare = [[text.k, text.v] for text in self.texts] or [[] for _ in self.memories]
            self.texts = []
            self.texts = [m.slots[layer].beside(self.S, own) for m, own in zip(self.memories, spare)]
        rows = slice(self.done, self.done + q.shape[2])
        q, k = (turn(x, self.cos[rows], self.sin[rows]) for x in (q, k))
        q = q.to(self.texts[0].k.dtype)
        for text in self.texts:
            text.append(k, v)
        self.done = rows.stop
        out = torch.empty_like(q)
        for heads, keys, values in self.texts[0].heads(unread=self.S - self.done):
            out[heads] = attend_prompt(q[heads], keys, values, self.memories[0].scale)
        for memory, text in zip(self.memories, self.texts):
            self._watch(memory, text, q, self.pos[rows])
        if self.done == self.S:
            self.done = 0
            for memory, text in zip(self.memories, self.texts):
                settle(memory.policy, text, memory.slots[layer])
        return out.to(v.dtype)

    def _watch(self, memory: Memory, text: Slots, q: Tensor, pos: Tensor) -> None:
        """Show the policy those of these rows that are among the text's last `watch`, as it wants to see them."""
        policy, unread = memory.policy, self.S - self.done
        last = min(policy.watch - unread, len(pos)) if policy.prompt else 0
        if last <= 0:
            return
        if policy.prompt == "queries":
            return policy.observe(text, q[:, :, -last:], pos[-last:], None)
        block = watched_rows(policy.watch, q.shape[0] * q.shape[1], text.width)
        runs = [watch_prompt(q[heads], keys, last, memory.scale, block) for heads, keys, _ in text.heads(unread)]
        while all(blocks := [next(run, ()) for run in runs]):  # zip would keep a block alive behind our back
            rows, probs = blocks[0]
            if len(blocks) > 1:  # ragged: every head has another number of tokens behind it
                width = max(p.shape[-1] for _, p in blocks)
                probs = torch.cat([F.pad(p, (0, width - p.shape[-1])) for _, p in blocks])
            policy.observe(text, q[:, :, rows], pos[rows], probs)
            del blocks, probs  # before the next ones are made


def settle(policy: Policy, text: Slots, kv: Slots, coming: int = 0) -> None:
    """Keep in the slots what the policy selects of a layer's text, with `coming` more tokens in sight."""
    kv.fill(text, select(policy, text, kv, coming))
    policy.settle(kv)
