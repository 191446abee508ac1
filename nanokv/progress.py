"""How far something long has come: one line of a terminal, gone when it is done."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch, which nobody needs who only fetches a file
    from .engine import Engine


def bar(title: str, size: int) -> Callable[[int | None], None]:
    """A function that draws a bar of so many steps on stderr (None: done)."""

    def show(done: int | None) -> None:
        part = min((done or 0) / size, 1.0)
        line = f"{title} [{'#' * int(30 * part):30}] {100 * part:3.0f} %"
        print("\r" + (line if done is not None else " " * len(line) + "\r"), end="", file=sys.stderr, flush=True)

    return show


@contextmanager
def reading(engine: "Engine", tokens: int) -> Iterator[None]:
    """Show how far a text is read in here: every layer of every piece of it is a step."""
    blocks = engine.model.blocks
    show, done = bar(f"reading {tokens:,} tokens", len(blocks) * -(-tokens // (engine.chunk or tokens))), count(1)
    hooks = [block.register_forward_hook(lambda *_: show(next(done))) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        show(None)
