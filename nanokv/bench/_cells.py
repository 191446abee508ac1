"""Cells: every policy at every budget, all asked the same prompts; one that fails is out, says why, and ends nothing.

A prompt is read once for all cells (its exact prefill is no policy's own), and each answers from what it kept.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from nanokv.bench import progress
from nanokv.bench._output import Finished
from nanokv.bench._policies import CANNOT, called, kv_held, made, pairs, reason
from nanokv.bench._together import answer_together, apart, read_together
from nanokv.engine import Engine
from nanokv.model import Transformer
from nanokv.tokenizer import Tokenizer


class Question(Protocol):
    """What can be asked."""

    tokens: list[int]
    max_new: int  # tokens that an answer may take


@dataclass
class Cell:
    """One policy at one budget, and what it answered. budget None: it has no such dial; form: of the weights, where there are several."""

    policy: str
    budget: int | None
    engine: Engine | None = None
    answers: list[str] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)  # bytes of keys and values, planned and allocated, of the largest prompt
    failed: str = ""  # why there is nothing more
    form: str | None = None

    @property
    def name(self) -> str:
        return called(self.policy, self.budget, self.form)

    @property
    def place(self) -> dict:
        """What a row of it begins with."""
        return {"policy": self.policy, "budget": self.budget} | ({"form": self.form} if self.form else {})

    def attempt(self, action: Callable[[], Any]) -> Any:
        """What the action returns; None if it cannot be done, and then the cell says why and is out."""
        try:
            return action()
        except CANNOT as error:
            self.fail(reason(error))
            return None

    def fail(self, why: str) -> None:
        """It is out, and its memory is free."""
        self.failed, self.engine = why, None

    def take(self, said: Mapping[str, Any]) -> None:
        """Note what one prompt brought: an answer and bytes, or why there is none."""
        if "failed" in said:
            return self.fail(said["failed"])
        self.answers.append(said["answer"])
        self.held = max(self.held, said["held"], key=lambda held: held.get("kv_bytes", 0))

    def row(self, **found: object) -> dict:
        """What the report says of it: nothing of what was found if it failed."""
        if self.failed:
            found = {name: value if isinstance(value, (str, list)) else None for name, value in found.items()} | {"failed": self.failed}
        return {**self.place, **found, **self.held}


def cells(
    model: Transformer, policies: Sequence[str], budgets: Sequence[int], dials: Mapping[str, Mapping], form: str | None = None, **given: Any
) -> Iterator[Cell]:
    """An engine for every policy and budget; one for a policy without a budget. dials: by policy; given: to every engine."""
    for name, budget in pairs(policies, budgets):
        cell = Cell(name, budget, form=form)
        cell.engine = cell.attempt(lambda: Engine(model, made(name, budget, dials), **given))
        yield cell


def print_notes(every: Sequence[Cell]) -> None:
    """What their policies have to say to the user, once each, on stderr."""
    for note in dict.fromkeys(c.engine.policy.note for c in every if c.engine and c.engine.policy.note):
        print(note, file=sys.stderr)


def read(every: Sequence[Cell], tokens: Sequence[int], max_new: int) -> list[tuple[Cell, Tensor]]:
    """Let the cells that can read a prompt -> each with the logits of its last token."""
    for cell in every:
        if not cell.failed:
            cell.attempt(lambda: cell.engine.reset(len(tokens), max_new))
    able = [c for c in every if not c.failed]
    together = [c for c in able if not apart(c.engine, len(tokens))]
    try:
        logits = read_together([c.engine for c in together], tokens) if together else None
    except CANNOT:  # one of them, or all of them side by side, are too much: who can, alone?
        for cell in together:
            cell.attempt(lambda: cell.engine.reset(len(tokens), max_new))
        together = []
    last = [(cell, logits if cell in together else cell.attempt(lambda: cell.engine.extend(tokens))) for cell in able]
    return [(cell, own) for cell, own in last if not cell.failed]


def answers(every: Sequence[Cell], question: Question, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """What each cell says to a question, greedily: {"answer", "held"}, or {"failed"}."""
    tokens, new = question.tokens, question.max_new
    able = read(every, tokens, new)
    logits = torch.stack([own for _, own in able]) if able else None
    found = answer_together([cell.engine for cell, _ in able], logits, new, tokenizer.eos_ids) if able else []
    said = {}
    for (cell, _), ids in zip(able, found):
        if isinstance(ids, Exception):
            cell.fail(reason(ids))
        else:
            said[id(cell)] = {"answer": tokenizer.decode(ids), "held": kv_held(cell.engine, len(tokens), new)}
    return [said.get(id(cell), {"failed": cell.failed}) for cell in every]


def ask(every: Sequence[Cell], questions: Sequence[Question], tokenizer: Tokenizer, finished: Finished, title: str = "prompt") -> None:
    """Ask every cell every question; each one takes its answers. A question, under this title, is a piece of the run that can be finished."""
    for i, question in enumerate(questions):
        progress(f"{title} {i + 1} of {len(questions)}, {len(question.tokens)} tokens")
        said = finished.once(f"{title} {i}", lambda: answers(every, question, tokenizer))
        for cell, one in zip(every, said):
            cell.take(one)


def grid(every: Sequence[Cell], budgets: Sequence[int], shown: Callable[[Cell], object]) -> list[dict]:
    """What the cells show, a row for each policy and a column for each budget; "-" where one failed."""
    found = {(c.policy, c.budget): "-" if c.failed else shown(c) for c in every}
    names = dict.fromkeys(c.policy for c in every)
    return [{"policy": n} | {str(b): found.get((n, b), found.get((n, None))) for b in budgets} for n in names]
