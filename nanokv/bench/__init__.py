"""Measurements. Each module here is one bench: `python -m nanokv.bench NAME [options]`.

A bench prints a short lesson of what it measures, its table, and as last line of stdout one JSON
object {"bench", "model", "dtype", "seed", "machine", "rows": [...]}. Progress goes to stderr.
"""

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence


def machine() -> str:
    """What the numbers were measured on, in words."""
    import torch

    return f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"


def report(bench: str, rows: Sequence[Mapping], model: str, dtype: str, seed: int, **facts: object) -> None:
    """Print the rows as tables, one for each `measure`, then everything, and other facts, as one line of JSON."""
    for measure in dict.fromkeys(row.get("measure") for row in rows):
        table([row for row in rows if row.get("measure") == measure])
    head = {"bench": bench, "model": model, "dtype": dtype, "seed": seed, "machine": machine()}
    print(json.dumps({**head, **facts, "rows": list(rows)}))


def table(rows: Sequence[Mapping]) -> None:
    """Print rows under the names of their columns; what is no single value (a curve) is left to the JSON."""
    names = [n for n in dict.fromkeys(n for row in rows for n in row) if not any(_many(row.get(n)) for row in rows)]
    cells = [names] + [[_cell(row.get(n)) for n in names] for row in rows]
    widths = [max(len(c) for c in column) for column in zip(*cells)]
    for line in cells:
        print("  ".join(c.rjust(w) for c, w in zip(line, widths)))
    print()


def progress(text: str) -> None:
    """One line on stderr that overwrites the last, if somebody is looking."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)


def _many(value: object) -> bool:
    return isinstance(value, (list, tuple, dict))


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
