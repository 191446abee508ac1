"""The command line's conventions, shared by the front door and the benches.

The insight: options of other engines are spellings, not options. Aliases and underscores are
resolved in the list of arguments, before argparse sees it, so each option exists once, in --help
and in every message. Nothing here imports torch: `--help` is instant.
"""

import argparse
import dataclasses
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from reprlib import repr as brief
from typing import TYPE_CHECKING, NoReturn

import nanokv

if TYPE_CHECKING:
    from .policy import Policy

# What other engines call the same thing.
ALIASES = {
    "--policy": ("--method", "--kv-eviction", "--cache-strategy"),
    "--budget": ("--kv-budget", "--max-kv-size", "--max-cache-length", "--token-budget"),
    "--sink": ("--keep", "--start-size", "--global-tokens", "--first-tokens"),
    "--window": ("--recent-size", "--recent-window", "--window-size"),
    "--max-new-tokens": ("--max-tokens", "--n-predict"),
    "--temperature": ("--temp",),
    "--prompt-file": ("--file",),
}
MOST = 10**12  # of anything
DIALS = ("budget", "sink", "window", "interval", "layers", "heads")  # those with an option of their own


class UsageError(ValueError):
    """The command line asks for something that cannot be."""


@contextmanager
def usage() -> Iterator[None]:
    """A ValueError in here is about what the user typed."""
    try:
        yield
    except ValueError as error:
        raise UsageError(error) from error


def exit_code(program: Callable[[], int], interrupted: str = "interrupted", debug: bool = False) -> int:
    """Run a program -> its exit code; what goes wrong is one line on stderr: 1 a file or the machine, 2 the user, 130 Ctrl-C."""
    try:
        return program()
    except BrokenPipeError:  # the reader has what it wanted; Python must not try again when it ends
        for descriptor in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        return 0
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130
    except (ValueError, OSError, RuntimeError, MemoryError, ImportError) as error:
        if debug:
            traceback.print_exc()
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def one_line(error: Exception) -> str:
    """What an exception says, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def leave(code: int) -> NoReturn:
    """End the process: it is done, so from here on Ctrl-C has nothing to interrupt but Python's own tidying up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line, and a reader who leaves during --help is no mistake."""

    def __init__(self, name: str, description: str | None):
        also = "; ".join(f"{name}: {', '.join(others)}" for name, others in ALIASES.items())
        epilog = f"Underscores work as well as dashes. Also understood: {also}."
        super().__init__(name, description=description, epilog=epilog, allow_abbrev=False)

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The options. Raises UsageError; SystemExit after --help and --version."""
        return self.parse_args(spelled(arguments))

    def error(self, message: str) -> NoReturn:
        """argparse found a mistake. Raises UsageError."""
        raise UsageError(f"{message} (see --help)")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """--help or --version was printed. Raises SystemExit, or BrokenPipeError where nobody reads it."""
        print(end="", flush=True)
        sys.exit(status)


def spelled(arguments: Sequence[str]) -> list[str]:
    """The arguments with long options as the parser spells them: dashes for underscores, aliases resolved."""
    names = {alias: name for name, aliases in ALIASES.items() for alias in aliases}

    def ours(option: re.Match) -> str:
        name = option[1].replace("_", "-")
        return names.get(name, name) + option[2]

    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [re.sub(r"(?s)^(--\w[\w-]*)(=.*|\Z)", ours, a) for a in arguments[:end]] + list(arguments[end:])


def positive(text: str) -> int:
    """The type of an option that takes a whole number of at least 1."""
    if not text.isdecimal() or not (n := int(text[:20])):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {brief(text)}")
    if n > MOST:
        raise argparse.ArgumentTypeError(f"must be at most {MOST:,}, not {brief(text)}")
    return n


def add_memory_options(p: Parser) -> None:
    """--policy and its dials, and --chunk."""
    add = p.add_argument_group("memory").add_argument
    add("--policy", default="full", help="which tokens are remembered: see --policies (default: %(default)s)")
    add("--budget", metavar="N", help="slots per head, averaged over the model; hard")
    add("--sink", metavar="N", help="so many first tokens are never evicted")
    add("--window", metavar="N", help="so many last tokens are never evicted")
    add("--interval", metavar="N", help="slots freed at a time")
    add("--layers", metavar="SPLIT", help="uniform, or pyramid: more of the budget for the lower layers")
    add("--heads", metavar="SPLIT", help="uniform, or adaptive: more of the budget for heads that need it")
    add("--set", action="append", default=[], metavar="DIAL=VALUE", help="any other dial of the policy; repeatable")
    add("--chunk", type=positive, metavar="N", help="read the prompt N tokens at a time, for a lower peak; a policy that evicts "
        "then chooses after each piece, so its answer may differ")
    add("--kv-dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="of keys and values (default: the model's)")
    add("--memory", metavar="SIZE", help="refuse to start if more than this would be needed, such as 24GiB (default: what the machine has)")
    add("--plan", action="store_true", help="say what a run would take, and whether it fits, without reading weights")
    add("--context", type=positive, metavar="N", help="with --plan: tokens of prompt and answer together")
    add("--weights", default="native", choices=("native", "int8", "int4"), help="how the matrices are kept: as they are, or as codes of 8 or 4 bits (default: %(default)s)")
    add("--random-weights", action="store_true", help="a model's real size with random weights, which need not be there: the text is noise")


def policy_asked(o: argparse.Namespace) -> "Policy":
    """The policy with the dials that the user turned. ValueError for one that it does not have."""
    dials = {name: value for name in DIALS if (value := getattr(o, name)) is not None}
    if o.policy == "full" and (dials or o.set):
        asked = ", ".join([f"--{name}" for name in dials] + ["--set"] * bool(o.set))
        raise ValueError(f"full, the default policy, keeps everything and has no dials: {asked} needs another, such as --policy streaming_llm")
    for text in o.set:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise ValueError(f"--set takes DIAL=VALUE, not {text!r}")
        if name in dials:
            raise ValueError(f"the dial {name} was given twice")
        if not value.strip():
            raise ValueError(f"--set {name}= needs a value")
        dials[name] = value.strip()
    return nanokv.make(o.policy.replace("-", "_"), **dials)


def followed(dial: "dataclasses.Field", usual: "Policy") -> str:
    """A remark on a dial that follows the budget unless it is set."""
    return " (by budget)" if dial.default is None and getattr(usual, dial.name) is not None else ""


def list_policies() -> None:
    """Print every policy of the registry: its idea, its dials and their defaults, its paper."""
    import nanokv.policies
    from nanokv.policy import REGISTRY

    for name, cls in sorted(REGISTRY.items()):
        lesson = sys.modules[cls.__module__].__doc__ or ""
        usual = cls()
        dials = ", ".join(f"{f.name}={getattr(usual, f.name)}" + followed(f, usual) for f in dataclasses.fields(cls))
        paper = re.search(r"Paper:.*?(https?://[^\s),;]+)", lesson, re.S)
        print(f"{name}\n    {lesson.strip().splitlines()[0]}\n    dials: {dials or 'none'}")
        print(f"    paper: {paper[1].rstrip('.') if paper else 'none'}")
