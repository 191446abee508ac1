"""Text to ids and an id to bytes, for the two libraries that know how: `tokenizers`, `sentencepiece`.

The insight: only encoding needs a library. For decoding, every id stands for a few bytes
whatever the neighbours, so one small function per family replaces their decoders (and streams
for free, see detokenizer.py). Two families: byte-level BPE, which spells each byte as a
printable character, and SentencePiece, which spells a space as U+2581 and a stray byte as <0x0A>.

A control string is one that steers the model (`<|im_end|>`) and that only a template may turn
into its id: `plain` never does, `whole` does.
"""

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from nanokv.chat_template import BREAK

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer as Pipeline

CONTROL_LIKE = re.compile(r"<[|\uff5c].+[|\uff5c]>")  # DeepSeek's <｜User｜> steers the model, but is not marked special
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the rest in order from U+0100 on."""
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


BYTE_OF = _byte_alphabet()


def piece_bytes(piece: str) -> bytes:
    """The bytes of a SentencePiece piece: U+2581 is a space, <0x0A> a byte, the rest itself."""
    byte = BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level BPE token; one that is not spelled in its alphabet is itself."""
    spelled = [BYTE_OF.get(c) for c in token]
    return token.encode() if None in spelled else bytes(spelled)


class Vocabulary:
    """What both families share. `size`: ids it knows. `strip_space`: encoding puts a space in front."""

    size: int
    strip_space: bool

    def __init__(self, control: dict[str, int], hidden: set[int], added: dict[int, str]):
        """control: strings with their ids; hidden: ids that print nothing; added: ids that are spelled as they are."""
        self.control, self._hidden = control, hidden
        self._added = {i: text.encode() for i, text in added.items()}
        longest_first = sorted(control, key=len, reverse=True)
        # never one that break_control broke, not even one of a single character
        self.pattern = re.compile("|".join(re.escape(s) + f"(?!{BREAK})" for s in longest_first) or r"(?!)")

    def plain(self, text: str) -> list[int]:
        """The ids of text alone: a control string in it is spelled out like any other."""
        raise NotImplementedError

    def whole(self, text: str) -> list[int]:
        """The ids of rendered text: control strings become their ids, except broken ones."""
        ids, at = [], 0
        for match in self.pattern.finditer(text):
            ids += self.plain(text[at : match.start()].replace(BREAK, ""))
            ids.append(self.control[match[0]])
            at = match.end()
        return ids + self.plain(text[at:].replace(BREAK, ""))

    def token_bytes(self, token: int) -> bytes:
        """The bytes an id stands for: none for a special one, and none for a padded logit's."""
        if token in self._hidden or not 0 <= token < self.size:
            return b""
        return self._added[token] if token in self._added else self._spelled(token)

    def id_of(self, token: str) -> int | None:
        """The id of a special token's text; None if there is no such token."""
        return self.control.get(token)

    def _spelled(self, token: int) -> bytes:
        raise NotImplementedError


class PipelineVocabulary(Vocabulary):
    """A `tokenizers` pipeline: tokenizer.json, or one rebuilt from a GGUF."""

    def __init__(self, pipeline: "Pipeline"):
        pipeline.no_truncation()  # a tokenizer.json may carry its training's maximal length
        pipeline.no_padding()
        self._pipeline = pipeline
        added = pipeline.get_added_tokens_decoder()
        hidden = {i for i, token in added.items() if token.special}
        control = {i: t for i, t in added.items() if i in hidden or CONTROL_LIKE.fullmatch(t.content)}
        pipeline.add_special_tokens(list(control.values()))  # they keep their ids; from now on plain() can leave them alone
        super().__init__({t.content: i for i, t in control.items()}, hidden, {i: t.content for i, t in added.items()})
        self.size = max(pipeline.get_vocab_size(), max(added, default=-1) + 1)
        self._bytes, self.strip_space = _decoding(pipeline)

    def plain(self, text: str) -> list[int]:
        self._pipeline.encode_special_tokens = True  # the library's words for: encode their text, do not match them
        return self._pipeline.encode(text, add_special_tokens=False).ids

    def whole(self, text: str) -> list[int]:
        if BREAK in text:  # rare, so whatever its added tokens do to spaces around them is given up only here
            return super().whole(text)
        self._pipeline.encode_special_tokens = False
        return self._pipeline.encode(text, add_special_tokens=False).ids

    def first_id(self) -> int | None:
        """The id that the pipeline's own post-processor puts in front of a text, if any."""
        framed, bare = (self._pipeline.encode("a", add_special_tokens=add).ids for add in (True, False))
        return framed[0] if framed[:1] != bare[:1] else None

    def _spelled(self, token: int) -> bytes:
        piece = self._pipeline.id_to_token(token)
        return b"" if piece is None else self._bytes(piece)


def _decoding(pipeline: "Pipeline") -> tuple[Callable[[str], bytes], bool]:
    """How a pipeline spells bytes, and whether its first space is its own, read off its decoder."""
    decoder = json.loads(pipeline.decoder.__getstate__()) if pipeline.decoder else {"type": "nothing"}
    parts = decoder.get("decoders", [decoder])
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return byte_level_bytes, False
    if kinds & {"ByteFallback", "Metaspace", "Replace"}:
        strips = (p["type"] == "Strip" or p.get("prepend_scheme", "never") != "never" for p in parts)
        return piece_bytes, any(strips)
    raise ValueError(f"this tokenizer decodes by {', '.join(kinds)}; known: byte-level BPE and SentencePiece")


class SentencePieceVocabulary(Vocabulary):
    """A SentencePiece model: tokenizer.model, or one rebuilt from a GGUF.

    Every stretch of text between control ids gets the model's leading space, as in llama.cpp and
    Llama 2's tokenizer.json. A piece the model calls user-defined is matched in any text.
    """

    def __init__(self, model: "SentencePieceProcessor", added: dict[str, int], special: set[int]):
        """added: strings whose ids lie beyond the model's own pieces; special: those that print nothing."""
        self._model = model
        self._n_pieces = n = model.get_piece_size()
        own = {model.id_to_piece(i): i for i in range(n) if model.is_control(i)}
        hidden = special | set(own.values()) | {i for i in range(n) if model.is_unknown(i)}
        super().__init__(own | added, hidden, {i: s for s, i in added.items()})
        self.size = max([n, *(i + 1 for i in added.values())])
        self.strip_space = model.encode("a", out_type=str)[0].startswith("\u2581")

    def plain(self, text: str) -> list[int]:
        return self._model.encode(text)

    def _spelled(self, token: int) -> bytes:
        return piece_bytes(self._model.id_to_piece(token)) if token < self._n_pieces else b""
