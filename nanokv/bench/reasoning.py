"""How far does a long answer stay right when only `budget` tokens are remembered?

Retrieval asks for a few tokens, right after the prompt. Here the answer is hundreds of tokens long, so a policy must
also choose well while decoding: among its prompt and its own words. Every line of the right answer follows from what
stands before it, and an answer counts up to its first wrong line (`right`, and `share`, of all there is to say). `anywhere`
is the share of the lines that it says at all, in whatever order. `full` is the control: where it errs, the model does.
counter     a number that grows by one with every step: all that is needed stands in the last line
rota        days that are counted and names that take turns: it takes the last few lines
copy        a numbered list of sentences, word for word once more: every line is needed once, long after it was read
chain       variables, each the one before it plus one of a few numbers in turn: arithmetic; only for a model that can do it
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random

from nanokv import load
from nanokv.bench._cells import Cell, ask, cells, print_notes
from nanokv.bench._haystack import FILL, sentences
from nanokv.bench._output import Finished, add_resume, figure, reported
from nanokv.bench._policies import at_least, parsed, parser
from nanokv.options import usage
from nanokv.tokenizer import Tokenizer

Lines = Iterator[str]


@dataclass(frozen=True)
class Task:
    """A text to be continued line by line. lines: all of it; given: how many of them the prompt ends with."""

    lines: Lines
    given: int
    opening: Callable[[Sequence[str]], str]  # of all its lines -> what the prompt begins with


def copy(rng: Random) -> Task:
    """A list of sentences, once more."""
    numbered = (f"{i}. {s}" for i, s in enumerate(sentences(rng), 1))

    def opening(lines: Sequence[str]) -> str:
        return "\n".join(("The story, sentence by sentence:\n", *lines, "\nThe same story again, sentence by sentence:\n\n"))

    return Task(numbered, 1, opening)


def counter(rng: Random) -> Task:
    """One more at each step."""
    first = rng.randrange(10, 100)
    return Task((f"Step {i}: the counter shows {first + i}." for i in count(1)), 5, lambda lines: "")


def rota(rng: Random, n: int = 3) -> Task:
    """Days that are counted, and n names that take turns."""
    first, names = rng.randrange(10, 100), rng.sample(FILL["name"], n)
    return Task((f"Day {first + i}: {names[i % n]} keeps the watch." for i in count()), 3 * n, lambda lines: "")


def chain(rng: Random, n: int = 3) -> Task:
    """Variables, each from the one before it."""
    first, steps = rng.randrange(10, 100), rng.sample(range(2, 10), n)

    def lines() -> Lines:
        value = first
        for i in count(1):
            value += (step := steps[i % n])
            yield f"x{i} = x{i - 1} + {step} = {value}"

    return Task(lines(), 2 * n, lambda _: f"x0 = {first}\n")


KINDS: dict[str, Callable[[Random], Task]] = {"counter": counter, "rota": rota, "copy": copy, "chain": chain}
EASY = ("counter", "rota", "copy")  # what a small model can do with the full cache


@dataclass(frozen=True)
class Puzzle:
    """A prompt and the lines that should follow."""

    kind: str
    tokens: list[int]
    lines: list[str]
    max_new: int  # tokens of the right answer

    def right(self, answer: str) -> int:
        """Lines before the first that is wrong."""
        said = answer.strip().split("\n")
        return next((i for i, (a, b) in enumerate(zip(said, self.lines)) if a.strip() != b), min(len(said), len(self.lines)))

    def said(self, answer: str) -> int:
        """Lines that the answer holds, wherever."""
        return len({line.strip() for line in answer.split("\n")} & {*self.lines})


def puzzle(tokenizer: Tokenizer, kind: str, length: int, rng: Random) -> Puzzle:
    """A task whose right answer is the first of its lines that are `length` tokens together, or a few more."""
    task, lines, size = KINDS[kind](rng), [], 0
    while size < length:
        lines.append(next(task.lines))
        if len(lines) > task.given:
            size = len(tokenizer.encode("\n".join(lines[task.given :]), bos=False))
    begun = "".join(f"{line}\n" for line in lines[: task.given])
    return Puzzle(kind, tokenizer.encode(task.opening(lines) + begun), lines[task.given :], size)


def rows(every: Sequence[Cell], asked: Sequence[Puzzle]) -> list[dict]:
    """Of each kind, a row for each cell: right lines of all that were answered, their share of what there is to say, and each answer's."""
    found = []
    for kind in dict.fromkeys(p.kind for p in asked):
        for cell in every:
            mine = [(p, a) for p, a in zip(asked, cell.answers) if p.kind == kind]
            right = [p.right(a) for p, a in mine]
            most = sum(len(p.lines) for p, _ in mine)
            shares = {"share": sum(right) / most, "anywhere": sum(p.said(a) for p, a in mine) / most} if mine else {"share": None, "anywhere": None}
            found.append({"measure": kind} | cell.row(right=sum(right), **shares, lines=right))
    return found


def draw(path: str, rows: list[dict]) -> None:
    """The share that was right against the budget, one panel for each kind; a policy without a budget is a level."""
    kinds = list(dict.fromkeys(r["measure"] for r in rows))
    with figure(path, max(len(kinds), 1)) as panels:
        for axes, kind in zip(panels, kinds):
            found = [r for r in rows if r["measure"] == kind and r["share"] is not None]
            for name in dict.fromkeys(r["policy"] for r in found):
                mine = [r for r in found if r["policy"] == name]
                if mine[0]["budget"] is None:
                    axes.axhline(mine[0]["share"], label=name, color="black", linewidth=1)
                else:
                    axes.plot([r["budget"] for r in mine], [r["share"] for r in mine], "o-", label=name)
            axes.set(xlabel="budget", ylabel="share of the answer before its first error", title=kind, ylim=(0, 1.02))
            axes.legend(fontsize="small")


def options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line. ValueError for what there is none of."""
    p = parser("reasoning", __doc__, "48,96,192")
    p.add_argument("--kinds", default=",".join(EASY), help=f"some of {', '.join(KINDS)} (default: %(default)s)")
    p.add_argument("--prompts", type=int, default=3, help="of each kind (default: %(default)s)")
    p.add_argument("--tokens", type=int, default=200, help="of a right answer, or a few more (default: %(default)s)")
    add_resume(p)
    args = parsed(p, argv, {"prompts": 1, "tokens": 120, "budgets": "48,96"})
    args.kinds = args.kinds.split(",")
    for kind in args.kinds:
        if kind not in KINDS:
            raise ValueError(f"no kind of answer is called {kind!r}; there are {', '.join(KINDS)}")
    at_least(1, args, "prompts", "tokens")
    return args


def main(argv: Sequence[str]) -> int:
    """Run the bench. Interrupted, it reports what it has."""
    with usage():
        args = options(argv)
        finished = Finished("reasoning", args)
    print(__doc__)
    model, tokenizer = load(args.model, args.dtype)
    asked = [puzzle(tokenizer, kind, args.tokens, Random(f"{kind} {args.seed} {i}")) for kind in args.kinds for i in range(args.prompts)]
    every = list(cells(model, args.policies, args.budgets, args.set))
    print_notes(every)
    sizes = {kind: sum(len(p.lines) for p in asked if p.kind == kind) for kind in args.kinds}
    print("; ".join(f"{kind}: {n} lines in {args.prompts} answers of about {args.tokens} tokens" for kind, n in sizes.items()), "\n", flush=True)
    with reported("reasoning", args, draw, tokens=args.tokens, prompts=args.prompts, lines=sizes) as found:
        try:
            ask(every, asked, tokenizer, finished)
        finally:
            found += rows(every, asked)
    return 0
