"""Results: on stdout, with `--csv FILE` for a spreadsheet, with `--plot FILE` for the eye (matplotlib, the extra `plot`).

A run may take an hour. So what could go wrong with a file is asked before it begins, what was measured before an
interruption is reported like a whole run, and with `--resume FILE` what is finished needs no second measurement.
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
from nanokv.options import UsageError

OUTPUTS = ("csv", "plot", "resume", "markdown", "html")  # options that do not change what is measured


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """--csv and --plot."""
    parser.add_argument("--csv", metavar="FILE", help="write the rows as comma-separated values, too")
    parser.add_argument("--plot", metavar="FILE", help="draw them into a .png or .svg file (needs matplotlib)")


def check_outputs(args: argparse.Namespace) -> None:
    """ValueError or ImportError if a file could not be written in the end."""
    for name in filter(None, (getattr(args, option, None) for option in OUTPUTS)):
        if not Path(name).parent.is_dir():
            raise ValueError(f"there is no directory {Path(name).parent} to write {Path(name).name} into")
    if args.plot and Path(args.plot).suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"--plot draws a .png or .svg file, not {args.plot}")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--plot draws with matplotlib, which is not installed: pip install matplotlib")


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
        report(bench, rows, args.model, args.dtype, args.seed, **facts, complete=complete)
        if args.csv:
            write_csv(args.csv, rows)
        if args.plot:
            draw(args.plot, rows)


def add_resume(parser: argparse.ArgumentParser) -> None:
    """--resume."""
    parser.add_argument("--resume", metavar="FILE", help="write what is finished into it, and go on from there if there is something")


class Finished:
    """The finished pieces of a long run: `value = finished.once(key, measure)` measures each key only once.

    With `--resume FILE` they are lines of JSON in it, the question first: the bench and every option that bears on
    an answer. So values must be what JSON can hold, and come back as JSON gives them (a tuple as a list).
    What fails is not finished: the next run tries it again.
    """

    def __init__(self, bench: str, args: argparse.Namespace):
        """Read args.resume, if one was given. UsageError if it is an answer to another question; OSError."""
        self._file = args.resume and Path(args.resume)
        self._known: dict[str, Any] = {}
        question = json.loads(json.dumps({"bench": bench} | {n: x for n, x in vars(args).items() if n not in OUTPUTS}))
        if not self._file:
            return
        if self._file.exists():
            self._read(question)
        else:
            self._write(question)

    def once(self, key: str, measure: Callable[[], Any]) -> Any:
        """What the piece called `key` gave: from the file, or measured now and written down."""
        if key not in self._known:
            self._known[key] = measure()
            if self._file:
                self._write([key, self._known[key]])
        return self._known[key]

    def _read(self, question: dict) -> None:
        text = self._file.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]  # a run that was killed may have left half a line
        try:
            asked, *pieces = map(json.loads, whole.splitlines())
            self._known = dict(pieces)
            other = [n for n in {**asked, **question} if asked.get(n) != question.get(n)]
        except (ValueError, TypeError):
            raise UsageError(f"{self._file} is not what --resume wrote; give it a new file") from None
        if other:
            was = ", ".join(f"{n}: {asked.get(n)} there, {question.get(n)} here" for n in other)
            raise UsageError(f"{self._file} belongs to another question ({was}); give --resume a new file")
        if whole != text:
            self._file.write_text(whole, encoding="utf-8")

    def _write(self, line: Any) -> None:
        with open(self._file, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def write_csv(path: str, rows: Sequence[Mapping]) -> None:
    """The rows under the names of all their fields. A field that is a list says it as JSON does."""
    names = list(dict.fromkeys(n for row in rows for n in row))
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows({n: json.dumps(x) if isinstance(x, (list, dict)) else x for n, x in row.items()} for row in rows)


@contextmanager
def panels(path: str, columns: int, rows: int, size: tuple[float, float] = (2, 1.8)) -> Iterator[list[list[Any]]]:
    """Rows of axes to draw on, each of a size in inches; those that stay empty are left white, and the file is written in the end."""
    from matplotlib.figure import Figure  # without pyplot: no display is needed, and nothing global is left behind

    drawing = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    axes = drawing.subplots(rows, columns, squeeze=False)
    yield [list(line) for line in axes]
    for one in axes.flat:
        if not one.has_data():
            one.set_axis_off()
    drawing.savefig(path, dpi=150)


@contextmanager
def figure(path: str, columns: int = 1) -> Iterator[list[Any]]:
    """Axes to draw on, side by side; the file is written in the end."""
    with panels(path, columns, 1, (7, 5)) as (line,):
        yield line
