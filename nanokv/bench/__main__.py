"""`python -m nanokv.bench NAME`: the benches are the modules of this package."""

import ast
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

from nanokv import bench
from nanokv.options import UsageError, exit_code, leave
from nanokv.process import sleep_while_waiting

USAGE = "usage: python -m nanokv.bench NAME [options]     (NAME --help: what it measures, and its options)"


def lessons() -> dict[str, str]:
    """The first line of what each bench says of itself, by name. Nothing is imported for it."""
    files = {m.name: Path(bench.__path__[0], f"{m.name}.py") for m in pkgutil.iter_modules(bench.__path__) if not m.name.startswith("_")}
    said = {name: ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "" for name, file in sorted(files.items())}
    return {name: text.partition("\n")[0] for name, text in said.items()}


def run(argv: Sequence[str]) -> int:
    """Run the bench that argv names -> exit code. UsageError if there is none of that name."""
    known = lessons()
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE, "", *(f"{name:12} {lesson}" for name, lesson in known.items()), sep="\n", flush=True)
        return 0
    if not argv or argv[0] not in known:
        asked = f"no bench is called {argv[0]!r}" if argv else "which bench?"
        raise UsageError(f"{asked} (there are {', '.join(known)}; see --help)")
    code = importlib.import_module(f"nanokv.bench.{argv[0]}").main(argv[1:])
    print(end="", flush=True)  # a reader who has gone is noticed here, not when Python ends
    return code


def main(argv: Sequence[str]) -> int:
    """Run the command line -> exit code."""
    sleep_while_waiting()
    return exit_code(lambda: run(argv))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
