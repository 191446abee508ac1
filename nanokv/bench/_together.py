"""Many engines on one model at nearly the price of one: they read a prompt together, and decode together.

The insight: a prompt is read with full attention before anything is forgotten, so its queries, keys and values do
not depend on the policy. They are computed once, and each engine watches and keeps what its policy wants. While
decoding, nearly all the time goes into moving the weights; so the engines' next tokens pass the model as one batch,
and only inside attention does each engine answer for its own column, from its own slots.
"""

from collections.abc import Collection, Sequence
from contextlib import ExitStack

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


@torch.no_grad()
def decode_together(engines: Sequence[Engine], tokens: Tensor) -> Tensor:
    """Let each of E engines on one model read its own next token, tokens [E], as its `decode` would -> logits [E, vocab]."""
    assert all(e.model is engines[0].model for e in engines), "engines on one model"
    with ExitStack() as steps:
        for engine in engines:
            steps.enter_context(engine.stepping(1))
        answers = [engine.answering(1) for engine in engines]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            columns = zip(answers, q.split(1, 2), k.split(1, 1), v.split(1, 1))
            return torch.cat([answer(layer, *column) for answer, *column in columns], 2)

        return engines[0].model(tokens, attend, every=True)


def answer_together(engines: Sequence[Engine], logits: Tensor, max_new: int, stop: Collection[int]) -> list[list[int]]:
    """Each engine's greedy continuation of what it read, given the last logits [E, vocab]: as `Engine.generate` would.

    Up to max_new tokens, ended by one of `stop`; an engine that has ended steps aside.
    """
    ids: list[list[int]] = [[] for _ in engines]
    going = list(range(len(engines)))
    while True:
        tokens = greedy(logits)[:, 0]
        for i, token in zip(going, tokens.tolist()):
            ids[i].append(token)
        rest = [n for n, i in enumerate(going) if ids[i][-1] not in stop and len(ids[i]) < max_new]
        if not rest:
            return ids
        going = [going[n] for n in rest]
        logits = decode_together([engines[i] for i in going], tokens[rest])


def answer(engine: Engine, logits: Tensor, max_new: int, stop: Collection[int]) -> list[int]:
    """The greedy continuation of what one engine read, given its last logits [vocab]."""
    return answer_together([engine], logits[None], max_new, stop)[0]
