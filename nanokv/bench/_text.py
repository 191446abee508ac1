"""The text that is read: the first tokens of any file, or of the one that comes with nanokv."""

import argparse
from importlib.resources import files
from pathlib import Path

from nanokv.model import Transformer
from nanokv.options import UsageError
from nanokv.tokenizer import Tokenizer

SAMPLE = "sample.txt"  # written for nanokv: a short story with a recipe, a letter, some history and some physics in it


def add_text(parser: argparse.ArgumentParser, tokens: int) -> None:
    """--text and --tokens."""
    parser.add_argument("--text", metavar="FILE", help="UTF-8 (default: a story that comes with nanokv)")
    parser.add_argument("--tokens", type=int, default=tokens, help="how many of its first tokens are read (default: %(default)s)")


def first_tokens(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer, least: int) -> list[int]:
    """The first args.tokens tokens, nothing put before them. UsageError if there are fewer, or they are fewer than `least`; OSError."""
    if args.tokens < least:
        raise UsageError(f"at least {least} tokens must be read, not {args.tokens}")
    name = args.text or SAMPLE
    try:
        text = (Path(args.text) if args.text else files("nanokv.bench") / SAMPLE).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{name} is not UTF-8") from None
    tokens = tokenizer.encode(text, bos=False)
    if len(tokens) < args.tokens:
        raise UsageError(f"{name} has {len(tokens)} tokens, not {args.tokens}")
    tokens = tokens[: args.tokens]
    if max(tokens) >= model.config.vocab_size:
        raise ValueError(f"the tokenizer has a token {max(tokens)}, the model only {model.config.vocab_size}")
    return tokens
