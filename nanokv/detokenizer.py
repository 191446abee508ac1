"""Token ids to text, one id at a time, each piece as soon as it can be known.

The insight: a token is a few bytes, and text is those bytes through an incremental UTF-8
decoder. It holds back exactly the bytes of an unfinished character, never a finished one (a
genuine U+FFFD included), and its pieces add up to the decoding of everything at once. So
nothing is ever decoded twice, and the full decode is the sum of its pieces by construction.
"""

import codecs
from collections.abc import Callable


class Detokenizer:
    def __init__(self, token_bytes: Callable[[int], bytes], strip_space: bool):
        """token_bytes: the bytes of an id (none for a special one). strip_space: the text's first
        space is not the text's own, encoding put it there."""
        self._bytes, self._strip = token_bytes, strip_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that has become certain with this id: often a word, sometimes nothing yet."""
        return self._piece(self._utf8.decode(self._bytes(token)))

    def flush(self) -> str:
        """The end of the text: U+FFFD for a character that was never finished, else nothing."""
        return self._piece(self._utf8.decode(b"", final=True))

    def _piece(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
