"""What a model's files say, and each thing they say as the kind of value that it must be.

Files are written by other programs, so nothing in them is taken on trust: a list where a number
belongs is one sentence with the name of the file in it, as early as it is read.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as brief  # a value from a file may be of any length
from typing import Any

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list", dict: "an object"}


def typed(given: Mapping, key: str, kind: type, default: Any = None) -> Any:
    """given[key], of this kind (float: finite, and a whole number will do); the default where it is missing or null.

    Raises ValueError, naming the key, for any other value.
    """
    value = given.get(key)
    return default if value is None else checked(key, value, kind)


def typed_list(given: Mapping, key: str, kind: type, default: Any = None) -> list | None:
    """given[key], a list of values of this kind; the default where it is missing or null. ValueError names the key."""
    values = typed(given, key, list, default)
    if kind is float or {*map(type, values or ())} != {kind}:  # a vocabulary is long, and nearly always right
        for value in values or ():
            checked(f"every entry of {key}", value, kind)
    return values


def checked(name: str, value: Any, kind: type) -> Any:
    """The value, if it is of this kind. ValueError calls it by `name` if it is not."""
    fits = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
    if not fits or kind is float and not abs(value) <= sys.float_info.max:
        raise ValueError(f"{name} must be {KINDS[kind]}, not {brief(value)}")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises FileNotFoundError, or ValueError naming the file."""
    if not path.exists():
        raise FileNotFoundError(f"{path.parent} has no {path.name}")
    refuse_pointer(path)
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value


def refuse_pointer(path: Path) -> None:
    """Raises ValueError for a file that only says where git-lfs keeps the real one."""
    with open(path, "rb") as file:
        if file.read(23) == b"version https://git-lfs":
            raise ValueError(f"{path} is a git-lfs pointer, not the file itself; run `git lfs pull`")
