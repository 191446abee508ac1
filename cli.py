"""The front door: a prompt in, text out, and not one byte on stdout that is not the answer.

The insight that keeps it short: a run is described once, as the dictionary that `--json` prints;
the line of statistics is the same dictionary read aloud. What a user can get wrong (an option, a
dial, the prompt) is checked, and a run that does not fit is refused, before torch is imported.

Exit codes: 0, 1 (a file or the machine), 2 (the command line), 130 (Ctrl-C).
"""

import argparse
import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING, NoReturn

import nanokv
from nanokv.options import (
    Parser, UsageError, add_memory_options, exit_code, leave, list_policies, policy_asked, positive, usage,
)  # fmt: skip
from nanokv.process import return_large_pieces, sleep_while_waiting

if TYPE_CHECKING:  # these cost seconds of importing torch: only once there is something to run
    from nanokv.engine import Engine
    from nanokv.loading import Source
    from nanokv.plan import Plan
    from nanokv.policy import Policy
    from nanokv.sample import Sampler
    from nanokv.tokenizer import Tokenizer


SAMPLING = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": None}  # options of drawing a token, and their defaults


def parser() -> Parser:
    p = Parser("nanokv", nanokv.__doc__)
    add = p.add_argument
    add("prompt", nargs="?", help="what to answer; - or a pipe: standard input (its last newline is left away)")
    add("-p", "--prompt", dest="prompt_option", metavar="PROMPT", help="the same; one that begins with a dash: --prompt=-x")
    add("-f", "--prompt-file", metavar="FILE", help="read the prompt from a UTF-8 text file")
    add("-sys", "--system", metavar="TEXT", help="the system message")
    add("--raw", action="store_true", help="continue the text as it is, without the model's chat template")
    add("-m", "--model", default="smollm2-135m", help="a name, a directory, or a .gguf file (default: %(default)s)")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    add("--threads", type=positive, metavar="N", help="CPU threads")
    add("--compile", action="store_true", help="compile the decode step: a minute or two before the first run, seconds before the next")
    add_memory_options(p)

    answer = p.add_argument_group("answer")
    answer.add_argument("-n", "--max-new-tokens", type=positive, default=256, metavar="N", help="(default: %(default)s)")
    answer.add_argument("-t", "--temperature", type=float, default=0.0, metavar="X", help="0, the default, is greedy")
    answer.add_argument("--top-k", type=int, metavar="N", help="of the N likeliest tokens (0: all)")
    answer.add_argument("--top-p", type=float, metavar="X", help="of the likeliest with this share (1: all)")
    answer.add_argument("--min-p", type=float, metavar="X", help="of those X times as likely as the best (0: all)")
    answer.add_argument("-s", "--seed", type=int, metavar="N", help="drawn and printed unless given")
    answer.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    answer.add_argument("--ignore-eos", action="store_true", help="go on when the model would end")
    p.set_defaults(**SAMPLING)

    output = p.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object instead of a stream of text")
    shown = output.add_mutually_exclusive_group()
    shown.add_argument("--stats", action="store_true", help="statistics on stderr, even if it is no terminal")
    shown.add_argument("--quiet", action="store_true", help="neither statistics nor notes on stderr")
    output.add_argument("--policies", action="store_true", help="list the policies with their dials and papers")
    output.add_argument("--debug", action="store_true", help="show where an error came from")
    output.add_argument("--version", action="version", version=f"nanokv {nanokv.__version__}")
    return p


# ---- what the user asks for ----


def prompt_text(o: argparse.Namespace) -> str:
    """The prompt, from whichever one place it was given at."""
    given = [o.prompt, o.prompt_option, o.prompt_file]
    if sum(x is not None for x in given) > 1:
        raise UsageError("the prompt was given twice: give it as an argument, with --prompt, or with --prompt-file")
    text = o.prompt if o.prompt_option is None else o.prompt_option
    piped = sys.stdin is not None and not sys.stdin.isatty()
    if text is None and o.prompt_file is None and not piped:
        raise UsageError("there is no prompt: give it as an argument, with --prompt-file, or through a pipe (see --help)")
    if o.prompt_file == "":
        raise UsageError("--prompt-file needs the name of a file")
    if o.prompt_file not in (None, "-"):
        with open(o.prompt_file, "rb") as file:
            text = decoded(file.read(), o.prompt_file)
    elif text in (None, "-"):
        if sys.stdin is None:
            raise UsageError("standard input is closed: there is no prompt")
        text = decoded(sys.stdin.buffer.read(), "standard input")
    for what, words in (("prompt", text), ("system message", o.system or "")):
        if any("\ud800" <= c <= "\udfff" for c in words):  # what Python makes of arguments that are not UTF-8
            raise UsageError(f"the {what} is not UTF-8")
    if not text:
        raise UsageError("the prompt is empty")
    return text


def decoded(data: bytes, source: str) -> str:
    """A text without its byte order mark and its last newline. UsageError names the first bad byte."""
    try:
        return re.sub(r"\r?\n\Z", "", data.decode().removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}") from None


def prompt_ids(o: argparse.Namespace, prompt: str, tokenizer: "Tokenizer") -> list[int]:
    """The prompt's tokens: through the chat template where the model has one, unless --raw."""
    from nanokv.models import is_instruct

    chat = tokenizer.chat_template is not None and not o.raw and is_instruct(o.model)
    if o.system is not None and not chat:
        raise UsageError(f"--system needs a chat template, and {o.model} has none")
    system = [] if o.system is None else [{"role": "system", "content": o.system}]
    ids = tokenizer.chat([*system, {"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt)
    if not ids:
        raise UsageError("the prompt holds no token")
    return ids


def idle(o: argparse.Namespace) -> list[str]:
    """The options given for drawing a token."""
    return ["--" + name.replace("_", "-") for name, usual in SAMPLING.items() if getattr(o, name) != usual]


# ---- the run ----


@dataclass
class Answer:
    """What came out, up to the end or to Ctrl-C."""

    ids: list[int]
    text: str
    finish_reason: str


def answered(o: argparse.Namespace, engine: "Engine", tokenizer: "Tokenizer", ids: list[int], sample: "Sampler") -> Answer:
    """Generate; unless --json, print each piece of text as soon as it is certain."""
    from nanokv.progress import reading
    from nanokv.stop_text import StopText

    answer, stream, stops = Answer([], "", "interrupted"), tokenizer.stream(), StopText(o.stop)

    def show(piece: str) -> None:
        answer.text += piece
        if piece and not o.json:
            print(piece, end="", flush=True)

    tokens = engine.generate(ids, o.max_new_tokens, sample, () if o.ignore_eos else tokenizer.eos_ids)
    long = len(ids) >= 512 and sys.stderr.isatty() and not o.quiet
    try:
        with reading(engine, len(ids)) if long else nullcontext():
            first = next(tokens)
        for token in chain([first], tokens):
            answer.ids.append(token)
            show(stops.push(stream.push(token)))
            if stops.found:
                break
        answer.finish_reason = "stop" if stops.found else engine.stats.finish_reason
    except KeyboardInterrupt:
        pass  # what there is, is the answer
    show(stops.push(stream.flush()) + stops.flush())
    if not o.json:
        print(flush=True)
    return answer


def plan_of(o: argparse.Namespace, source: "Source", policy: "Policy", prompt: int, new: int) -> "Plan":
    """What a run of so many tokens takes."""
    from nanokv.memory import ITEMSIZE, remade
    from nanokv.plan import Plan

    made = remade(o.weights, source.dtype, source.device)
    return Plan(source.config, policy, prompt, new, o.chunk, ITEMSIZE[source.dtype], o.weights, ITEMSIZE.get(o.kv_dtype), made)


def planned(o: argparse.Namespace) -> int:
    """Print what a run would take -> 0, or 1 if it does not fit."""
    from nanokv.loading import device_named, find
    from nanokv.plan import available, show, size

    with usage():
        policy, device = policy_asked(o), device_named(o.device)
        limit = available(device) if o.memory is None else size(o.memory)
    source = find(o.model, o.dtype, o.device, read=False)
    tokens = o.context or source.config.max_context
    new = min(o.max_new_tokens, tokens // 2)
    plan = plan_of(o, source, policy, tokens - new, new)
    problem = show(plan, o.model, limit)
    if problem:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problem else 0


def run(o: argparse.Namespace) -> int:
    if o.context:
        raise UsageError("--context goes with --plan")
    prompt = prompt_text(o)
    if o.system is not None and o.raw:
        raise UsageError("--system does not go with --raw")

    def note(text: object, *_: object) -> None:
        if not o.quiet:
            print(f"note: {text}", file=sys.stderr, flush=True)

    warnings.showwarning = note
    from nanokv.loading import device_named, find
    from nanokv.plan import available, size, table, verdict
    from nanokv.sample import Sampler

    with usage():
        policy, device = policy_asked(o), device_named(o.device)
        limit = available(device) if o.memory is None else size(o.memory)
        sample = Sampler(o.temperature, o.top_k, o.top_p, o.min_p, o.seed)
        if not all(o.stop):
            raise ValueError("--stop needs a text")
    if o.threads and o.threads > 1024:
        raise UsageError(f"{o.threads} threads are too many: 1024 at most")
    source = find(o.model, o.dtype, device, read=not o.random_weights, weights=o.weights)
    if o.random_weights:
        note("random weights: memory and speed are real, the text is noise")
    if o.dtype == "auto" and source.path is not None and source.path.is_file():
        short = source.dtype == "bfloat16"
        note(f"computing in {source.dtype}{', which this processor has instructions for (--dtype)' if short else '; --dtype bfloat16 takes half the memory'}")
    tokenizer = source.tokenizer()
    ids = prompt_ids(o, prompt, tokenizer)
    if max(ids) >= source.config.vocab_size:
        raise ValueError(f"{o.model}: its tokenizer has a token {max(ids)}, its model only {source.config.vocab_size}")
    plan = plan_of(o, source, policy, len(ids), o.max_new_tokens)
    if problem := verdict(plan, limit):
        print(table(plan), file=sys.stderr)
        raise MemoryError(problem)
    remark = policy.note  # now: it may be that a file is missing
    import torch  # and not before the verdict: it takes longer than all that led to it

    from nanokv.summary import stats_line, summary

    if o.threads:
        torch.set_num_threads(o.threads)
    start = perf_counter()
    model = source.model()
    load_s = perf_counter() - start
    if remark:
        note(remark)
    if not o.temperature and (unused := idle(o)):
        note(f"at temperature 0, which is greedy, nothing is changed by {', '.join(unused)}")
    if len(ids) + o.max_new_tokens > (trained := model.config.max_context):
        note(f"{len(ids)} prompt + {o.max_new_tokens} new tokens go beyond the {trained} that {o.model} was trained on")
    engine = nanokv.Engine(model, policy, o.chunk, o.compile, o.kv_dtype)
    if o.compile:
        note("compiling the decode step; torch keeps the result, so the next run with this model and budget starts sooner")
    answer = answered(o, engine, tokenizer, ids, replace(sample, valid_vocab=tokenizer.vocab_size))
    r = summary(engine, plan, ids, answer.ids, load_s)
    r |= {"text": answer.text, "finish_reason": answer.finish_reason, "seed": sample.seed if o.temperature else None, "model": o.model}
    interrupted = answer.finish_reason == "interrupted"
    if o.json:
        print(json.dumps(r, ensure_ascii=False), flush=True)
    if o.stats or (sys.stderr.isatty() and not o.quiet and not o.json):
        print(stats_line(r), file=sys.stderr)
    elif interrupted:
        print("interrupted", file=sys.stderr)
    elif o.temperature and o.seed is None and not o.json:
        note(f"seed {sample.seed}")
    return 130 if interrupted else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line -> exit code."""
    sleep_while_waiting()
    return_large_pieces()
    if sys.stderr is None:  # closed: print would turn to stdout, which is the answer's
        sys.stderr = open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that speaks no UTF-8 gets what it can show
            stream.reconfigure(encoding="utf-8", errors="replace")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a script started it in the background
    arguments = sys.argv[1:] if arguments is None else arguments
    return exit_code(lambda: answer_to(arguments), debug="--debug" in arguments)


def answer_to(arguments: Sequence[str]) -> int:
    """Do what the arguments ask -> exit code."""
    o = parser().read(arguments)
    if o.policies:
        list_policies()
        print(end="", flush=True)
        return 0
    return planned(o) if o.plan else run(o)


def command() -> NoReturn:
    """The command `nanokv`."""
    leave(main())


if __name__ == "__main__":
    command()
