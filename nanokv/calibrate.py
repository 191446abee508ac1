"""Where a model's queries point, for TriAttention: `python -m nanokv.calibrate --model M text.txt -o stats.safetensors`.

The insight: the model hands its queries over before RoPE and does not care who answers. So calibration
is an engine reading a text, and someone on the way who adds the queries up.

A text of any length takes one pass and bounded memory: it is read in segments of 4,096 tokens (or the
model's context, if that is shorter), each a text of its own under full attention; sums are float64.
50,000 tokens are enough, whatever they are about: the statistics are the model's, not the text's.

Exit codes: 0, 1 (a file or the machine), 2 (the command line), 130 (Ctrl-C). Only a whole file is written.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from nanokv.engine import Engine
from nanokv.loading import device_named, load
from nanokv.model import Attend, Transformer
from nanokv.options import Parser, UsageError, exit_code, leave, positive, usage
from nanokv.policies.full import Full
from nanokv.query_stats import QueryStats, add, means, plain, sums
from nanokv.tokenizer import Tokenizer

SEGMENT = 4096  # tokens that see each other
BLOCK = 1 << 16  # characters tokenized at a time


class Counted:
    """A model whose queries are counted in before they are answered; to an engine it is the model."""

    def __init__(self, model: Transformer):
        c = model.config
        self.model, self.config, self.like = model, c, model.like
        shapes = sums(c.n_kv_heads, c.n_heads // c.n_kv_heads, c.head_dim)
        self.sums = [{name: self.like.new_zeros(s, dtype=torch.float64) for name, (s, _) in shapes.items()} for _ in range(c.n_layers)]

    def __call__(self, tokens: Tensor, attend: Attend) -> Tensor:
        def count(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            add(self.sums[layer], q)
            return attend(layer, q, k, v)

        return self.model(tokens, count)


def calibrate(model: Transformer, segments: Iterable[Sequence[int]], chunk: int | None = None, name: str = "",
              progress: Callable[[int], None] = lambda n: None) -> QueryStats:
    """Statistics over all tokens of some texts, each at most as long as the model's context.

    chunk: read them this many tokens at a time. progress: told how many tokens were read so far.
    """
    counted = Counted(model)
    engine, read = Engine(counted, Full(), chunk), 0
    for tokens in segments:
        if max(tokens) >= model.config.vocab_size:
            raise ValueError(f"the tokenizer has a token {max(tokens)}, the model only {model.config.vocab_size}")
        engine.reset(len(tokens), 0)
        engine.extend(tokens)
        read += len(tokens)
        progress(read)
    if not read:
        raise ValueError("there is no text to read")
    mean, size = zip(*map(means, counted.sums))
    mean, size = (torch.stack(x).flatten(1, 2).float().cpu() for x in (mean, size))  # [L, Hq, D], [L, Hq, D/2]
    return QueryStats(mean, size, engine.freqs.cpu(), name)


def ids_of(file: TextIO, tokenizer: Tokenizer) -> Iterator[int]:
    """The tokens of a text of any length, cut at the ends of lines."""
    while text := file.read(BLOCK):
        yield from tokenizer.encode(text + file.readline(BLOCK), bos=False)


def segments(ids: Iterator[int], length: int, bos: list[int]) -> Iterator[list[int]]:
    """Texts of at most so many tokens, each with its own beginning."""
    while part := list(islice(ids, length - len(bos))):
        yield bos + part


def options() -> Parser:
    """The command line."""
    p = Parser("python -m nanokv.calibrate", "Gather where a model's queries point: statistics for --policy triattention.")
    p.epilog = None
    p.add_argument("text", help="a UTF-8 text file; 50,000 tokens are enough")
    p.add_argument("-m", "--model", required=True, help="a name, a directory with config.json, or a .gguf file")
    p.add_argument("-o", "--output", required=True, metavar="FILE", help="a .safetensors file, for --set stats=FILE")
    p.add_argument("--tokens", type=positive, metavar="N", help="read at most N tokens (default: all)")
    p.add_argument("--chunk", type=positive, metavar="C", default=512, help="read C tokens at a time (default: %(default)s)")
    p.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    p.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    return p


def run(o: argparse.Namespace) -> int:
    """Read, and write the file -> 0. UsageError, ValueError or OSError, in one sentence."""
    output, part = Path(o.output), Path(f"{o.output}.part")
    if output.suffix != ".safetensors":
        raise UsageError(f"the output is a .safetensors file, not {o.output}")
    with usage():
        device_named(o.device)
    with open(o.text, encoding="utf-8-sig") as file:
        part.touch()  # if it cannot be written, better now than in an hour
        try:
            model, tokenizer = load(o.model, o.dtype, o.device)
            stats = gathered(o, file, model, tokenizer)
            stats.save(part)
            os.replace(part, output)
        finally:
            part.unlink(missing_ok=True)
    print(f"wrote {output}: {len(stats.mean)} layers, {stats.mean.shape[1]} heads of {stats.model}", file=sys.stderr)
    return 0


def gathered(o: argparse.Namespace, file: TextIO, model: Transformer, tokenizer: Tokenizer) -> QueryStats:
    """The statistics over the file. ValueError if there is no text in it."""
    bos, start = [tokenizer.bos_id] if tokenizer.add_bos else [], time.perf_counter()
    texts = segments(islice(ids_of(file, tokenizer), o.tokens), min(SEGMENT, model.config.max_context), bos)

    def progress(read: int) -> None:
        ends = ("\r", "") if sys.stderr.isatty() else ("", "\n")
        rate = read / (time.perf_counter() - start)
        print(f"{ends[0]}read {read:,} tokens, {rate:.0f} a second ", end=ends[1], file=sys.stderr, flush=True)

    try:
        first = next(texts, None)
        if first is None:
            raise ValueError(f"{o.text} holds no text")
        return calibrate(model, chain([first], texts), o.chunk, plain(o.model), progress)
    except UnicodeDecodeError:
        raise ValueError(f"{o.text} is not UTF-8") from None
    finally:
        if sys.stderr.isatty():
            print(file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line -> exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return exit_code(lambda: run(options().read(arguments)), interrupted="interrupted: nothing was written")


if __name__ == "__main__":
    leave(main())
