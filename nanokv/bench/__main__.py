"""`python -m nanokv.bench NAME`: the benches are the modules of this package."""

import importlib
import pkgutil
import sys

from nanokv import bench


def main(argv: list[str]) -> int:
    """Run the bench that argv names; 2 if there is none of that name."""
    names = sorted(m.name for m in pkgutil.iter_modules(bench.__path__) if not m.name.startswith("_"))
    if not argv or argv[0] not in names:
        asked = f"no bench is called {argv[0]!r}" if argv else "which bench?"
        print(f"error: {asked} There are: {', '.join(names)}. Try: python -m nanokv.bench {names[0]} --help", file=sys.stderr)
        return 2
    try:
        importlib.import_module(f"nanokv.bench.{argv[0]}").main(argv[1:])
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
