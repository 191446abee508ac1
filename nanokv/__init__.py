"""nanokv: a small engine that owns its KV memory, and every published way of shrinking it."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["Engine", "load", "make"]

# Looked up on first use, so that `import nanokv` costs nothing.
_HOME = {"Engine": "engine", "load": "loading", "make": "policy"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'nanokv' has no attribute {name!r}")
    import_module(".policies", __name__)
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
