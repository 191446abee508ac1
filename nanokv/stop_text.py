"""Stop texts in a stream: print up to one, and never a part of one.

The insight: a stop text may begin in one piece and end in another, so the stream is cut only
where nothing that was held back could still become one. The first text to be *complete* counts;
so it does not matter where the borders between pieces fall.
"""

from collections.abc import Sequence


class StopText:
    """`found` turns True at a stop text; from then on nothing comes out any more."""

    def __init__(self, stops: Sequence[str]):
        if not all(stops):
            raise ValueError("a stop text must not be empty")
        self._stops, self._held, self.found = list(stops), "", False

    def push(self, piece: str) -> str:
        """The text that is certain not to belong to a stop text, now that `piece` has come."""
        if self.found:
            return ""
        text = self._held + piece
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self._held, self.found = "", True
            return text[: min(ends)[1]]
        certain = len(text) - max((_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """What was held back: the stream has ended, it was no stop text after all."""
        text, self._held = self._held, ""
        return text


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
