"""Does an answer still find a fact when only `budget` tokens of the prompt are remembered?

A five-digit code stands somewhere in a long text, and the prompt asks for it. The whole prompt is read with full
attention; then each policy keeps what it thinks worth keeping, and the model answers from that alone. `full` is
the control: what it misses, the model cannot do. The prompts are a grid: every length, and for each of them every
depth in equal parts; in `hits` they stand length by length, each from its start to its end. Where the question stands
decides much: after the text it is in the window that SnapKV and R-KV listen to, before it nobody knows yet what will
be asked (`--question`). `--forms` asks the same prompts of weights of fewer bits.
"""

import argparse
from collections.abc import Sequence
from functools import partial

from nanokv.bench import table
from nanokv.bench._cells import Cell, ask, cells, grid, print_notes
from nanokv.bench._haystack import KINDS, Prompt, prompts
from nanokv.bench._output import Finished, add_resume, panels, reported
from nanokv.bench._policies import at_least, called, loaded, numbers, parsed, parser
from nanokv.options import usage

BANDS = 5  # of depth, in a heat map


def hits(cell: Cell, asked: Sequence[Prompt]) -> str:
    """1 or 0 for each prompt that it answered: was everything found?"""
    return "".join(str(int(p.found(a))) for p, a in zip(asked, cell.answers))


def row(cell: Cell, asked: Sequence[Prompt]) -> dict:
    """What the report says of a cell."""
    found = hits(cell, asked)
    return cell.row(found=found.count("1"), hits=found)


def heat(row: dict, asked: Sequence[Prompt]) -> list[list[float]]:
    """Share of prompts found, for each band of depth (the text's start first) and each length; NaN where none was asked."""
    lengths = list(dict.fromkeys(p.length for p in asked))
    found: dict[tuple[int, int], list[int]] = {}
    for p, hit in zip(asked, row["hits"]):
        found.setdefault((min(int(p.depth * BANDS), BANDS - 1), p.length), []).append(int(hit))
    return [[sum(h) / len(h) if (h := found.get((band, n))) else float("nan") for n in lengths] for band in range(BANDS)]


def draw(asked: Sequence[Prompt], path: str, rows: list[dict]) -> None:
    """A heat map for each policy, in each form of the weights (down), and budget (across)."""
    names = list(dict.fromkeys((r["policy"], r.get("form")) for r in rows))
    across = {n: [r for r in rows if (r["policy"], r.get("form")) == n] for n in names}
    lengths, several = list(dict.fromkeys(p.length for p in asked)), len({form for _, form in names}) > 1
    with panels(path, max(map(len, across.values()), default=1), max(len(names), 1)) as axes:
        drawing = axes[0][0].figure
        drawing.supxlabel("tokens of the prompt (yellow: found, dark: not)", fontsize="small")
        drawing.supylabel("where the code stands", fontsize="small")
        for name, line in zip(names, axes):
            for r, one in zip(across[name], line):
                one.imshow(heat(r, asked), cmap="viridis", vmin=0, vmax=1, aspect="auto")
                one.set_xticks(range(len(lengths)), [str(n) for n in lengths], fontsize="x-small")
                one.set_yticks((-0.5, BANDS - 0.5), ("start", "end"), fontsize="x-small")
                one.set_title(called(name[0], r["budget"], name[1] if several else None) + (": failed" if "failed" in r else f": {r['found']}"), fontsize="small")


def options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line. ValueError for what there is none of."""
    p = parser("needle", __doc__, "64,128,256,512,1024", forms=True)
    p.add_argument("--prompts", type=int, default=20, help="(default: %(default)s)")
    p.add_argument("--lengths", default="1000,2000", help="tokens of a prompt, in equal parts (default: %(default)s)")
    p.add_argument("--kind", default="prose", choices=list(KINDS), help="(default: %(default)s)")
    p.add_argument("--question", default="after", choices=("after", "before"), help="where it stands: after or before the text")
    add_resume(p)
    args = parsed(p, argv, {"prompts": 4, "budgets": "128,512"})
    args.lengths = numbers("lengths", args.lengths)
    at_least(1, args, "prompts")
    return args


def main(argv: Sequence[str]) -> int:
    """Run the bench. Interrupted, it reports what it has."""
    with usage():
        args = options(argv)
        finished = Finished("needle", args)
    print(__doc__)
    model, tokenizer = loaded(args, args.forms[0])
    with usage():
        asked = prompts(tokenizer, args.prompts, args.lengths, args.kind, args.question, args.seed)
    lengths = " and ".join(map(str, args.lengths))
    print(f"found of {len(asked)}, {args.kind}, {lengths} tokens, the question {args.question} the text\n", flush=True)
    facts = {"kind": args.kind, "question": args.question, "lengths": args.lengths}
    facts["prompts"] = [[p.length, round(p.depth, 4)] for p in asked]
    with reported("needle", args, partial(draw, asked), **facts) as rows:
        for form in args.forms:
            model = model or loaded(args, form)[0]
            every = list(cells(model, args.policies, args.budgets, args.set, form))
            print_notes(every)
            try:
                ask(every, asked, tokenizer, finished, f"{form} prompt")
            finally:
                rows += [row(c, asked) for c in every]
                print(form)
                table(grid(every, args.budgets, lambda c: hits(c, asked).count("1")))
            model = every = None  # the next form takes its place in memory
    return 0
