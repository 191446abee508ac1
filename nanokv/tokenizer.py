"""Text to token ids and back, from whichever file a model brings: one small interface.

The insight: what a user typed and what a template wrote are different things. `encode(text)`
treats control strings like `<|im_end|>` as the text they are; only with `special` do they
become ids, and `chat` sees to it that those are the template's and never a message's.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nanokv.chat_template import break_control, render
from nanokv.detokenizer import Detokenizer
from nanokv.files import checked, read_json, refuse_pointer, typed
from nanokv.gguf_file import read_metadata
from nanokv.gguf_vocabulary import adds_bos, gguf_vocabulary
from nanokv.vocabulary import PipelineVocabulary, SentencePieceVocabulary, Vocabulary

TIKTOKEN = re.compile(rb"[A-Za-z0-9+/=]+ \d+\r?\n")  # a base64 token and its rank: Llama 3's tokenizer.model


@dataclass(frozen=True)
class Tokenizer:
    """bos_id: None where the model has none. eos_ids: those the tokenizer's files name."""

    vocabulary: Vocabulary
    bos_id: int | None = None
    add_bos: bool = False  # does a text begin with BOS, by the model's own rule?
    eos_ids: frozenset[int] = frozenset()
    chat_template: str | None = None
    bos_token: str = ""  # as text, for the template
    eos_token: str = ""

    @property
    def vocab_size(self) -> int:
        """Number of ids that mean something; a model's logits may be padded beyond it."""
        return self.vocabulary.size

    def encode(self, text: str, bos: bool = True, special: bool = False) -> list[int]:
        """Ids of a text. bos: begin with BOS if the model's rule says so, but never with two.

        special: control strings become their ids, as in a rendered template; else they are text.
        Raises ValueError for text that is not Unicode (a lone surrogate, as a shell may pass it).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not valid Unicode at character {error.start}") from error
        ids = self.vocabulary.whole(text) if special else self.vocabulary.plain(text)
        if bos and self.add_bos and not (special and ids[:1] == [self.bos_id]):
            ids = [self.bos_id, *ids]
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; special tokens print nothing, broken UTF-8 prints as U+FFFD."""
        stream = self.stream()
        return "".join([*map(stream.push, ids), stream.flush()])

    def stream(self) -> Detokenizer:
        """A new detokenizer, whose pieces add up to `decode` of all ids pushed."""
        return Detokenizer(self.vocabulary.token_bytes, self.vocabulary.strip_space)

    def chat(self, messages: list[dict], generate: bool = True) -> list[int]:
        """Ids of a conversation through the model's template; `generate` opens the assistant's turn.

        messages: {"role": "user", "content": "..."}. A control string in a message stays text.
        BOS leads if the template writes it or the model's rule says so, once. (transformers
        leaves it away unless the template writes it; llama.cpp does as we do.)
        Raises ValueError without a template, and with the template's words where it refuses.
        """
        if self.chat_template is None:
            raise ValueError("this model brings no chat template: give it plain text instead")
        broken = break_control(messages, self.vocabulary.pattern)
        text = render(self.chat_template, broken, generate, self.bos_token, self.eos_token)
        return self.encode(text, special=True)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model: a directory (tokenizer.json, else tokenizer.model) or a .gguf file."""
    path = Path(path)
    if path.is_dir():
        return _from_directory(path)
    if path.is_file():
        return _from_gguf(path)
    raise FileNotFoundError(f"no such model: {path}")


def _from_gguf(path: Path) -> Tokenizer:
    metadata = read_metadata(path)
    try:
        vocabulary = gguf_vocabulary(metadata)
        tokens = metadata["tokenizer.ggml.tokens"]
        ids = (typed(metadata, f"tokenizer.ggml.{name}_token_id", int) for name in ("bos", "eos", "eot"))
        bos, eos, eot = (i if i is not None and 0 <= i < len(tokens) else None for i in ids)  # some write 2**32 - 1 for none
        return Tokenizer(
            vocabulary,
            bos_id=bos,
            add_bos=bos is not None and adds_bos(metadata),
            eos_ids=frozenset(i for i in (eos, eot) if i is not None),
            chat_template=_template(metadata.get("tokenizer.chat_template")),
            bos_token="" if bos is None else tokens[bos],
            eos_token="" if eos is None else tokens[eos],
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _from_directory(path: Path) -> Tokenizer:
    config = _settings(path / "special_tokens_map.json") | _settings(path / "tokenizer_config.json")
    if (path / "tokenizer.json").exists():
        vocabulary = _pipeline(path / "tokenizer.json")
        first = vocabulary.first_id()
    elif (path / "tokenizer.model").exists():
        vocabulary = _sentencepiece(path / "tokenizer.model", config.get("added", {}), _added(path / "added_tokens.json"))
        first = vocabulary.id_of("<s>")  # Llama's rule, unless the config says otherwise
    else:
        raise FileNotFoundError(f"{path} has no tokenizer.json and no tokenizer.model")
    bos_token, eos_token = (config.get(name, "") for name in ("bos_token", "eos_token"))
    bos, eos = vocabulary.id_of(bos_token), vocabulary.id_of(eos_token)
    if bos is None and "bos_token" not in config:
        bos = first
    says, jinja = config.get("add_bos_token"), path / "chat_template.jinja"  # which wins
    return Tokenizer(
        vocabulary,
        bos_id=bos,
        add_bos=bos is not None and (first == bos if says is None else says),
        eos_ids=frozenset(() if eos is None else (eos,)),
        chat_template=_jinja(jinja) if jinja.exists() else config.get("chat_template"),
        bos_token=bos_token,
        eos_token=eos_token,
    )


def _read(path: Path) -> bytes:
    """The bytes of a file, which must not be a git-lfs pointer."""
    refuse_pointer(path)
    return path.read_bytes()


def _settings(path: Path) -> dict:
    """What a JSON file says that matters here, special tokens as text; {} without the file. ValueError names the file."""
    if not path.exists():
        return {}
    given = read_json(path)
    try:
        found = {name: _token(given, name) for name in ("bos_token", "eos_token") if name in given}
        added = {int(i): checked(f"token {i}", token, dict) for i, token in typed(given, "added_tokens_decoder", dict, {}).items()}
        found["added"] = {i: (checked("content", token.get("content"), str), token.get("special")) for i, token in added.items()}
        return found | {"add_bos_token": typed(given, "add_bos_token", bool), "chat_template": _template(given.get("chat_template"))}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _token(config: dict, name: str) -> str:
    """A special token's text, whichever way it is written; "" for none."""
    value = config.get(name) or ""
    return checked(name, value.get("content") if isinstance(value, dict) else value, str)


def _template(value: object) -> str | None:
    """A chat template, which may be one of several named ones; None for an empty one."""
    if isinstance(value, list):
        named = [checked("every entry of chat_template", entry, dict) for entry in value]
        value = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    return checked("chat_template", value or "", str) or None


def _jinja(path: Path) -> str | None:
    try:
        return _template(_read(path).decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error


def _pipeline(path: Path) -> PipelineVocabulary:
    data = _read(path)
    from tokenizers import Tokenizer as Pipeline

    try:
        pipeline = Pipeline.from_buffer(data)
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"{path} ({len(data):,} bytes) is no tokenizer.json, or only part of one: {error}") from error
    try:
        return PipelineVocabulary(pipeline)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _added(path: Path) -> dict[str, int]:
    """The tokens of added_tokens.json with their ids; {} without the file."""
    listed = read_json(path) if path.exists() else {}
    return {token: checked(f"{path}: the id of {token}", i, int) for token, i in listed.items()}


def _sentencepiece(path: Path, listed: dict[int, tuple], added: dict[str, int]) -> SentencePieceVocabulary:
    """listed: id -> (text, is it special?), and added: text -> id; they may name ids beyond the model's own."""
    data = _read(path)
    if TIKTOKEN.match(data):
        raise ValueError(f"{path} is a tiktoken file, as Llama 3 brings it, not SentencePiece: use tokenizer.json")
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor()
    try:
        model.LoadFromSerializedProto(data)
    except RuntimeError as error:
        raise ValueError(f"{path} ({len(data):,} bytes) is no SentencePiece model, or only part of one") from error
    added = {text: i for i, (text, _) in listed.items()} | added
    beyond = {text: i for text, i in added.items() if i >= model.get_piece_size()}
    return SentencePieceVocabulary(model, beyond, {i for i, (_, special) in listed.items() if special})
