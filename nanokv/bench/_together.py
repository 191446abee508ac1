"""Many engines on one model at nearly the price of one: they read a prompt together, and decode together.

The insight: a prompt is read with full attention before anything is forgotten, so its queries, keys and values do
not depend on the policy. They are computed once, and each engine watches and keeps what its policy wants. While
decoding, nearly all the time goes into moving the weights; so the engines' next tokens pass the model as one batch,
and only inside attention does each engine answer for its own column, from its own slots.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ..engine import Engine, greedy
from ..reading import Reading
from ._policies import CANNOT


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


@torch.no_grad()
def decode_together(engines: Sequence[Engine], tokens: Tensor) -> tuple[Tensor, dict[int, Exception]]:
    """Let each of E engines on one model read its own next token, tokens [E], as its `decode` would -> logits [E, vocab].

    Also returns, by index, why an engine could not: its logits mean nothing and it must be reset; the others are not affected.
    """
    assert all(e.model is engines[0].model for e in engines), "engines on one model"
    failed: dict[int, Exception] = {}

    def attempt(i: int, action: Callable[[], Any], otherwise: Any = None) -> Any:
        try:
            return otherwise if i in failed else action()
        except CANNOT as error:
            failed[i] = error
            return otherwise

    with ExitStack() as steps:
        for i, engine in enumerate(engines):
            attempt(i, lambda: steps.enter_context(engine.stepping(1)))
        answers = [attempt(i, lambda: engine.answering(1)) for i, engine in enumerate(engines)]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            columns = enumerate(zip(q.split(1, 2), k.split(1, 1), v.split(1, 1)))
            return torch.cat([attempt(i, lambda: answers[i](layer, *column), column[0]) for i, column in columns], 2)

        return engines[0].model(tokens, attend, every=True), failed


def answer_together(engines: Sequence[Engine], logits: Tensor, max_new: int, stop: Collection[int]) -> list[list[int] | Exception]:
    """Each engine's greedy continuation of what it read, given its last logits, [E, vocab]; or why there is none.

    Up to max_new tokens, ended by one of `stop`. An engine that has ended, or failed, steps aside.
    """
    ids: list[list[int]] = [[] for _ in engines]
    failed: dict[int, Exception] = {}
    going = list(range(len(engines)))
    while True:
        tokens = greedy(logits)[:, 0]
        for i, token in zip(going, tokens.tolist()):
            ids[i].append(token)
        on = [n for n, i in enumerate(going) if i not in failed and ids[i][-1] not in stop and len(ids[i]) < max_new]
        if not on:
            return [failed.get(i, found) for i, found in enumerate(ids)]
        going = [going[n] for n in on]
        logits, errors = decode_together([engines[i] for i in going], tokens[on])
        failed |= {going[n]: error for n, error in errors.items()}


def answer(engine: Engine, logits: Tensor, max_new: int, stop: Collection[int]) -> list[int]:
    """The greedy continuation of what one engine read, given its last logits [vocab]."""
    (found,) = answer_together([engine], logits[None], max_new, stop)
    if isinstance(found, Exception):
        raise found
    return found
