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


def report(bench: str, rows: Sequence[Mapping], model: str, dtype: str, seed: int) -> None:
    """Print the rows as a table, then everything as one line of JSON."""
    names = list(dict.fromkeys(n for row in rows for n in row))
    cells = [names] + [[_cell(row.get(n)) for n in names] for row in rows]
    widths = [max(len(c) for c in column) for column in zip(*cells)]
    for line in cells:
        print("  ".join(c.rjust(w) for c, w in zip(line, widths)))
    print(json.dumps({"bench": bench, "model": model, "dtype": dtype, "seed": seed, "machine": machine(), "rows": list(rows)}))


def progress(text: str) -> None:
    """One line on stderr that overwrites the last, if somebody is looking."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
