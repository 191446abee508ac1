"""Many engines read one prompt at the price of one: the exact prefill is the same for every policy and budget.

The insight: a prompt is read with full attention before anything is forgotten, so its queries, keys and
values do not depend on the policy. They are computed once, and each engine watches and keeps what its policy wants.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ..engine import Engine, greedy
from ..reading import Reading


@torch.no_grad()
def read_together(engines: Sequence[Engine], tokens: Sequence[int]) -> Tensor:
    """Let engines on one model, all just reset, read a first text [S] in one piece -> logits of its last token [vocab].

    Each then holds what its own `extend` would have left it. Not for one that reads by the decode path (see `apart`).
    """
    first = engines[0]
    assert all(e.model is first.model and e.slots and not e.seen for e in engines), "engines on one model, freshly reset"
    text = torch.as_tensor(tokens, device=first.like.device)
    return first.model(text, Reading(engines, len(text), text.device))


def apart(engine: Engine, n: int) -> bool:
    """Does a text of n tokens reach these slots by the decode path, so that its prefill is no one else's?"""
    return engine.policy.shared and n > engine.slots[0].room


def answer(engine: Engine, logits: Tensor, max_new: int, stop: Collection[int]) -> list[int]:
    """The greedy continuation of what was read, given its last logits: up to max_new tokens, ended by one of `stop`."""
    ids: list[int] = []
    while True:
        token = greedy(logits)
        ids.append(int(token))
        if ids[-1] in stop or len(ids) == max_new:
            return ids
        logits = engine.decode(token)
