"""Results: on stdout, with `--csv FILE` for a spreadsheet, with `--plot FILE` for the eye (matplotlib, the extra `plot`).

A run may take an hour. So what could go wrong with a file is asked before it begins, and what was measured
before an interruption is reported like a whole run.
"""

import argparse
import csv
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanokv.bench import progress, report


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """--csv and --plot."""
    parser.add_argument("--csv", metavar="FILE", help="write the rows as comma-separated values, too")
    parser.add_argument("--plot", metavar="FILE", help="draw them into a .png or .svg file (needs matplotlib)")


def check_outputs(args: argparse.Namespace) -> None:
    """ValueError if a file could not be written in the end."""
    for name in filter(None, (args.csv, args.plot)):
        if not Path(name).parent.is_dir():
            raise ValueError(f"there is no directory {Path(name).parent} to write {Path(name).name} into")
    if args.plot and Path(args.plot).suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"--plot draws a .png or .svg file, not {args.plot}")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError('--plot draws with matplotlib, which is not installed: pip install matplotlib')


@contextmanager
def reported(bench: str, args: argparse.Namespace, draw: Callable[[str, list[dict]], None], **facts: object) -> Iterator[list[dict]]:
    """An empty list for the rows of a run: what it holds in the end is reported, complete or not."""
    rows: list[dict] = []
    complete = False
    try:
        yield rows
        complete = True
    finally:
        progress("")
        if not complete:
            print("interrupted: this is what was measured before", file=sys.stderr)
        if args.csv:
            write_csv(args.csv, rows)
        if args.plot:
            draw(args.plot, rows)
        report(bench, rows, args.model, args.dtype, args.seed, **facts, complete=complete)


def write_csv(path: str, rows: Sequence[Mapping]) -> None:
    """The rows under the names of all their fields. A field that is a list says it as JSON does."""
    names = list(dict.fromkeys(n for row in rows for n in row))
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows({n: json.dumps(x) if isinstance(x, (list, dict)) else x for n, x in row.items()} for row in rows)


@contextmanager
def figure(path: str, panels: int = 1) -> Iterator[list[Any]]:
    """Axes to draw on, side by side; the file is written in the end."""
    from matplotlib.figure import Figure  # without pyplot: no display is needed, and nothing global is left behind

    drawing = Figure(figsize=(7 * panels, 5), layout="constrained")
    yield list(drawing.subplots(1, panels, squeeze=False)[0])
    drawing.savefig(path)
