"""What forgetting costs and saves, every policy beside every other: found, perplexity, bytes, milliseconds.

Found: the prompts of `needle`, one code in varied prose, the question after the text. Perplexity: the first --read
tokens of a text are read like a prompt, and each of the others is predicted from what is still remembered of those before
it, so that policies which listen to prompts alone have one to listen to. Bytes of keys and values, and milliseconds for
a token: after --tokens tokens; the engines take turns, one step each, and the median step counts. `full` is the control.

All policies and budgets are measured at once: they read together, and decode together, as one batch.
"""

import argparse
import datetime
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from nanokv import load
from nanokv.bench import machine, progress
from nanokv.bench._board import Board, html, markdown
from nanokv.bench._cells import Cell, ask, cells, read
from nanokv.bench._haystack import Prompt, prompts
from nanokv.bench._output import Finished, add_resume, figure, reported
from nanokv.bench._policies import at_least, called, kv_held, numbers, pairs, parsed, parser, reason
from nanokv.bench._text import SAMPLE, add_text, first_tokens
from nanokv.bench._together import decode_together
from nanokv.bench.needle import hits
from nanokv.bench.speed import in_turn, step
from nanokv.options import usage
from nanokv.tokenizer import Tokenizer

WARM = 3  # steps of each engine that are not timed
QUICK = {"budgets": "128,512", "prompts": 4, "tokens": 768, "read": 512, "rounds": 10}


def retrieve(every: Sequence[Cell], asked: Sequence[Prompt], tokenizer: Tokenizer, finished: Finished, rows: Sequence[dict]) -> None:
    """Ask every cell every prompt, and write into its row what it found, of all of them or until an interruption."""
    try:
        ask(every, asked, tokenizer, finished)
    finally:
        for cell, row in zip(every, rows):
            row |= given(cell, lambda: {"found": hits(cell, asked).count("1"), "hits": hits(cell, asked)} if cell.answers else {})


@torch.no_grad()
def perplexities(every: Sequence[Cell], tokens: Tensor, first: int) -> Iterator[list[dict]]:
    """After each token from index `first` on: how well every cell predicted those so far. Those before are its prompt."""
    able = read(every, tokens[:first].tolist(), len(tokens) - first)
    if not able:
        yield [given(cell, dict) for cell in every]
        return
    engines, place = [cell.engine for cell, _ in able], {id(cell): i for i, (cell, _) in enumerate(able)}
    logits = torch.stack([own for _, own in able])
    lost = torch.zeros(len(able), dtype=torch.float64)  # the sum of -ln p
    for n, target in enumerate(tokens[first:], 1):
        progress(f"perplexity: token {n} of {len(tokens) - first}")
        lost += F.cross_entropy(logits.float(), target.expand(len(able)), reduction="none").double().cpu()
        for i in (~lost.isfinite()).nonzero()[:, 0].tolist():
            fail(able[i][0], f"before token {first + n - 1} the logits are no longer finite")
        ppl = (lost / n).exp().tolist()
        yield [given(cell, lambda: {"ppl": ppl[place[id(cell)]], "targets": n}) for cell in every]
        if n < len(tokens) - first:
            logits, failed = decode_together(engines, target.expand(len(able)))
            for i, error in failed.items():
                fail(able[i][0], reason(error))


def costs(every: Sequence[Cell], tokens: Tensor, rounds: int) -> Iterator[list[dict]]:
    """Bytes and milliseconds of every cell that has read these tokens, over `rounds` steps of each in turn."""
    progress(f"reading {len(tokens)} tokens")
    able = [cell for cell, _ in read(every, tokens.tolist(), WARM + rounds)]
    held = {id(cell): kv_held(cell.engine, len(tokens), WARM + rounds) for cell in able}

    def timed(cell: Cell) -> Callable[[], object]:
        action = step(cell.engine, tokens)
        return lambda: cell.failed or cell.attempt(action)

    actions = {called(cell.policy, cell.budget): timed(cell) for cell in able}
    in_turn(actions, WARM, "warming up")
    seconds = in_turn(actions, rounds, "decode")

    def found(cell: Cell) -> dict:
        mine, full = seconds[called(cell.policy, cell.budget)], seconds.get("full")
        return {**held[id(cell)], "ms": mine * 1e3, "over_full": mine / full if full else None}

    yield [given(cell, lambda: found(cell)) for cell in every]


def fail(cell: Cell, why: str) -> None:
    """The cell is out, for the first reason that there was."""
    if not cell.failed:
        cell.fail(why)


def given(cell: Cell, found: Callable[[], dict]) -> dict:
    """What was found of a cell, or why there is nothing."""
    return {"failed": cell.failed} if cell.failed else found()


def noted(rows: Sequence[dict], steps: Iterable[list[dict]]) -> list[dict]:
    """Write into the rows what each step knows, so that an interruption leaves them with the last -> the last."""
    found: list[dict] = []
    for found in steps:
        for row, new in zip(rows, found):
            row |= new
    return found


def notes(every: Sequence[Cell]) -> list[str]:
    """What the policies say of themselves, where they say the same at every budget."""
    said: dict[str, set[str]] = {}
    for cell in every:
        said.setdefault(cell.policy, set()).add("" if cell.failed else cell.attempt(lambda: cell.engine.policy.note) or "")
    return [text for texts in said.values() if len(texts) == 1 for text in texts if text]


def draw(path: str, rows: list[dict]) -> None:
    """What is found, and perplexity, against the budget; a line for each policy."""
    with figure(path, 2) as panels:
        for axes, measure in zip(panels, ("found", "ppl")):
            for name in dict.fromkeys(r["policy"] for r in rows):
                points = [(r["budget"], r[measure]) for r in rows if r["policy"] == name and measure in r]
                if points and points[0][0] is None:
                    axes.axhline(points[0][1], color="black", linestyle="dotted", label=name)
                elif points:
                    axes.plot(*zip(*points), marker="o", label=name)
            axes.set(xlabel="budget", ylabel=measure)
        panels[0].legend(fontsize="small")


def options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line. ValueError for what there is none of."""
    p = parser("leaderboard", __doc__, "128,256,512,1024")
    add_text(p, 2048)
    p.add_argument("--read", type=int, default=1280, help="how many of them are the prompt (default: %(default)s)")
    p.add_argument("--prompts", type=int, default=20, help="that hide a code (default: %(default)s)")
    p.add_argument("--lengths", default="1000,2000", help="tokens of such a prompt, in equal parts (default: %(default)s)")
    p.add_argument("--rounds", type=int, default=30, help="steps of each engine that are timed (default: %(default)s)")
    p.add_argument("--markdown", metavar="FILE", help="write the table as Markdown, too")
    p.add_argument("-o", "--html", metavar="FILE", help="write a page that stands on its own, too")
    add_resume(p)
    args = parsed(p, argv, QUICK)
    args.lengths = numbers("lengths", args.lengths)
    at_least(1, args, "prompts", "rounds", "read")
    if args.read >= args.tokens:
        raise ValueError(f"--read must be less than --tokens, {args.tokens}, not {args.read}")
    return args


def write(args: argparse.Namespace, rows: Sequence[dict], facts: dict) -> None:
    """The board on stdout, and into the files that were asked for."""
    board = Board(rows, args.budgets, {"model": args.model, "dtype": args.dtype, "seed": args.seed, "machine": machine(), **facts})
    print(markdown(board), flush=True)
    for name, text in ((args.markdown, markdown), (args.html, html)):
        if name:
            Path(name).write_text(text(board), encoding="utf-8")


def main(argv: Sequence[str]) -> int:
    """Run the bench. Interrupted, it reports what it has."""
    with usage():
        args = options(argv)
        finished = Finished("leaderboard", args)
    print(__doc__, flush=True)
    model, tokenizer = load(args.model, args.dtype)
    with usage():
        asked = prompts(tokenizer, args.prompts, args.lengths, "prose", "after", args.seed)
        tokens = torch.tensor(first_tokens(args, model, tokenizer, least=2), device=model.like.device)

    def every() -> list[Cell]:
        return list(cells(model, args.policies, args.budgets, args.set))

    facts = {"date": datetime.date.today().isoformat(), "text": args.text or SAMPLE, "tokens": args.tokens, "read": args.read}
    facts |= {"prompts": args.prompts, "lengths": args.lengths, "rounds": args.rounds, "notes": notes(every())}
    with reported("leaderboard", args, draw, **facts) as rows:
        rows += [{"policy": name, "budget": budget} for name, budget in pairs(args.policies, args.budgets)]
        try:
            retrieve(every(), asked, tokenizer, finished, rows)
            for name, measure in (("perplexity", lambda: perplexities(every(), tokens, args.read)),
                                  ("costs", lambda: costs(every(), tokens, args.rounds))):  # fmt: skip
                noted(rows, [finished.once(name, lambda: noted(rows, measure()))])
        finally:
            progress("")
            write(args, rows, facts)
    return 0
