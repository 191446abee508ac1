"""Stop texts: whatever the borders between pieces, the same text comes out, and never too late."""

import random

import pytest

from nanokv.stop_text import StopText


def out(pieces: list[str], *stops: str) -> str:
    stream = StopText(stops)
    return "".join([*map(stream.push, pieces), stream.flush()])


def first_complete(text: str, stops: tuple[str, ...]) -> str:
    """The oracle: read letter by letter until the text read so far ends with a stop text."""
    for n in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:n].endswith(stop):
                return text[: n - len(stop)]
    return text


def test_any_pieces_give_the_same_text():
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(14)))
        stops = tuple("".join(rng.choice("ab") for _ in range(rng.randrange(1, 5))) for _ in range(rng.randrange(3)))
        borders = sorted(rng.randrange(len(text) + 1) for _ in range(4))
        pieces = [text[a:b] for a, b in zip([0, *borders], [*borders, len(text)])]
        assert out(pieces, *stops) == first_complete(text, stops), (pieces, stops)


def test_only_what_may_begin_a_stop_text_is_held_back():
    stream = StopText(["END", "\n\n"])
    assert [stream.push(p) for p in ("one E", "N", "T two", "\n", "x EN", "D more", "more")] == ["one ", "", "ENT two", "", "\nx ", "", ""]
    assert stream.found and stream.flush() == ""


def test_an_empty_stop_text_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopText(["a", ""])
