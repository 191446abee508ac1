"""The vocabulary inside a GGUF file becomes the tokenizer it once was.

The insight: a GGUF keeps the tables and drops the algorithm, leaving a name for it. `gpt2` is
byte-level BPE, so tokens and merges go back into a `tokenizers` pipeline; which texts may merge
at all is the pre-tokeniser's business, and `tokenizer.ggml.pre` names it. `llama` is
SentencePiece BPE, whose file is nothing but these very tables: they are written as one again,
and `sentencepiece` itself does the work.

Where readers of GGUF files disagree, this one follows the model's original tokenizer.json:
- smollm: every digit is its own token, then GPT-2's rule. So does llama.cpp; transformers
  (5.24) leaves the digits' rule out, and disagrees where two spaces stand before a number
  (`a  1`: it splits the spaces) and on numbers outside ASCII after a space.
- qwen2: the text is brought to Unicode's NFC first; llama.cpp does not.
- default: read as GPT-2's rule; llama.cpp has one of its own for it.
A byte that the vocabulary has no token for is dropped, as in the original: SmolLM2 has none for
a few ASCII control codes and for the planes of Unicode without characters.
"""

import struct
from typing import TYPE_CHECKING

from nanokv.files import brief, typed, typed_list
from nanokv.vocabulary import CONTROL_LIKE, PipelineVocabulary, SentencePieceVocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Pipeline

TABLES = {"tokens": str, "merges": str, "scores": float, "token_type": int}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # GGUF's token types are SentencePiece's
SPLIT = (  # Llama 3 and Qwen 2 differ only in how many digits stand together
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {
    "smollm": "digits", "gpt-2": "gpt2", "default": "gpt2", "qwen2": "qwen2",
    "llama-bpe": "llama3", "llama3": "llama3", "llama-v3": "llama3",
}  # fmt: skip


def gguf_vocabulary(metadata: dict) -> PipelineVocabulary | SentencePieceVocabulary:
    """metadata: as `GGUF(path).metadata` holds it. Raises ValueError for a kind that is not known."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return PipelineVocabulary(_byte_level(metadata))
    if kind == "llama":
        return _sentencepiece(metadata)
    raise ValueError(f"the GGUF's tokenizer is {brief(kind)}; known: 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE)")


def adds_bos(metadata: dict) -> bool:
    """Does a text begin with BOS? What the file says, else llama.cpp's rule for files that do not."""
    says = typed(metadata, "tokenizer.ggml.add_bos_token", bool)
    if says is not None:
        return says
    llama3 = PRE_TOKENIZERS.get(metadata.get("tokenizer.ggml.pre")) == "llama3"
    return metadata["tokenizer.ggml.model"] == "llama" or llama3


def _table(metadata: dict, name: str) -> list:
    table = typed_list(metadata, f"tokenizer.ggml.{name}", TABLES[name])
    if table is None:
        raise ValueError(f"the GGUF's vocabulary has no {name} (tokenizer.ggml.{name})")
    if name != "merges" and len(table) != (n := len(metadata["tokenizer.ggml.tokens"])):
        raise ValueError(f"the GGUF's vocabulary has {n} tokens, but {len(table)} entries in tokenizer.ggml.{name}")
    return table


def _byte_level(metadata: dict) -> "Pipeline":
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = typed(metadata, "tokenizer.ggml.pre", str)
    if pre not in PRE_TOKENIZERS:
        raise ValueError(f"the GGUF's pre-tokeniser is {brief(pre)} (tokenizer.ggml.pre); known: {', '.join(PRE_TOKENIZERS)}")
    rule, tokens = PRE_TOKENIZERS[pre], _table(metadata, "tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in _table(metadata, "merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    try:  # a word of Llama 3's vocabulary is one token even where no merges lead to it
        pipeline = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule == "llama3"))
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"the GGUF's tokens and merges do not fit together: {error}") from error

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule in ("gpt2", "digits"))
    if rule == "digits":
        first = [pre_tokenizers.Digits(individual_digits=True)]
    elif rule == "gpt2":
        first = []
    else:
        regex = SPLIT.format(digits="{1,3}" if rule == "llama3" else "")
        first = [pre_tokenizers.Split(Regex(regex), behavior="isolated")]
    pipeline.pre_tokenizer = pre_tokenizers.Sequence([*first, gpt2])
    if rule == "qwen2":
        pipeline.normalizer = normalizers.NFC()
    pipeline.decoder = decoders.ByteLevel()
    types = _table({"tokenizer.ggml.token_type": [NORMAL] * len(tokens)} | metadata, "token_type")
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, types)
        if kind in (CONTROL, USER_DEFINED)
    ]
    pipeline.add_tokens(added)
    return pipeline


def _sentencepiece(metadata: dict) -> SentencePieceVocabulary:
    """The tables as a SentencePiece model file: a few nested protocol-buffer messages."""
    from sentencepiece import SentencePieceProcessor

    tokens, scores, types = (_table(metadata, name) for name in ("tokens", "scores", "token_type"))
    model = b""
    pieces = []
    for token, score, kind in zip(tokens, scores, types):
        if kind == USER_DEFINED and CONTROL_LIKE.fullmatch(token):
            kind = CONTROL  # SentencePiece would match it in any text
        pieces.append(_message(1, _message(1, token.encode()) + b"\x15" + struct.pack("<f", score) + _number(3, kind)))
    bpe = _number(3, 2) + _number(4, len(tokens)) + _number(35, BYTE in types)
    space = typed(metadata, "tokenizer.ggml.add_space_prefix", bool, True)
    rules = _message(1, b"identity") + _number(3, space) + _number(4, False) + _number(5, True)
    model = b"".join(pieces) + _message(2, bpe) + _message(3, rules)
    processor = SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except RuntimeError as error:
        raise ValueError(f"the GGUF's tokens make no SentencePiece model: {error}") from error
    return SentencePieceVocabulary(processor, added={}, special=set())


def _varint(n: int) -> bytes:
    """Seven bits a byte, the lowest first, the eighth bit saying that more follow."""
    return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + _varint(n >> 7)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(int(value))


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content
