"""The shape of the code: who may import whom, how long things may get, what must be said."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = sorted((ROOT / "nanokv").rglob("*.py"))
EVERYTHING = CODE + sorted((ROOT / "tests").rglob("*.py")) + sorted(ROOT.glob("*.py"))

# An import goes down only. Files on one floor may use each other; a floor that is not named here stands on its own
# below the command line and above the engine.
FLOORS = [
    {"later", "pages", "shape", "processor", "rope", "sweep", "attention", "model"},
    {"slots", "budget"},
    {"policy", "query_stats"},
    {"policies"},
    {"reading", "compiled", "engine"},
    {"checkpoint", "tokenizer", "sample", "models", "memory"},
    {"calibrate"},
    {"trace"},
    {"report"},
    {"bench", "cli"},
]
MIDDLE = 5


def floor(name: str) -> int:
    return next((i for i, names in enumerate(FLOORS) if name in names), MIDDLE)


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module(path: Path) -> tuple[str, ...]:
    """nanokv/policies/window.py -> ("policies", "window")."""
    parts = path.relative_to(ROOT / "nanokv").with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(path: Path) -> set[str]:
    """Everything a file imports, absolute dotted names; relative ones resolved; lazy ones too."""
    found, package = set(), ["nanokv", *path.relative_to(ROOT / "nanokv").parent.parts] if path in CODE else []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            found |= {base} if node.module else {f"{base}.{a.name}" for a in node.names}
    return found


def inside(path: Path) -> set[tuple[str, ...]]:
    """What a file of nanokv imports of nanokv, without the package's name."""
    return {tuple(n.split(".")[1:]) for n in imports(path) if n.startswith("nanokv.")}


by_file = pytest.mark.parametrize("path", CODE, ids=lambda p: str(p.relative_to(ROOT)))


@by_file
def test_imports_go_down_only(path):
    me = module(path)
    if not me:
        return  # nanokv/__init__.py looks names up when they are asked for
    for other in inside(path):
        assert floor(other[0]) <= floor(me[0]), f"{'.'.join(me)} must not import {'.'.join(other)}"


@by_file
def test_walls_between_neighbours(path):
    me, others = module(path), {n[0] for n in inside(path)}
    if me == ("model",):
        assert {n.partition(".")[0] for n in imports(path)} <= {"torch", "collections", "nanokv"} and others == {"shape", "processor", "sweep"}
    if me == ("slots",):
        assert not others & {"policy", "engine"}
    if me and me[0] in ("slots", "attention", "rope", "budget"):
        assert "model" not in others
    if me[:1] == ("policies",) and len(me) == 2:
        assert not others & {"engine", "model", "trace", "report", "calibrate"}
        extended = {b.id.lower() for c in ast.walk(tree(path)) if isinstance(c, ast.ClassDef) for b in c.bases if isinstance(b, ast.Name)}
        for other in inside(path):
            if other[0] == "policies" and len(other) == 2:
                assert other[1].replace("_", "") in extended, f"{me[1]} imports {other[1]}, which it does not extend"
    if me == ("engine",):
        assert "policies" not in others and "isinstance" not in path.read_text(encoding="utf-8")
    if me == ("trace",):
        assert "engine" not in others


@by_file
def test_nanokv_stands_alone(path):
    roots = {n.partition(".")[0] for n in imports(path)}
    assert not roots & {"tests", "conftest", "oracle", "pytest"}
    assert "cli" not in roots or module(path) == ("__main__",)
    assert "transformers" not in roots or module(path) == ("bench", "_peers")
    if module(path) not in (("models",), ("process",)):  # the latter for what thread libraries and malloc read
        used = {a.attr for a in ast.walk(tree(path)) if isinstance(a, ast.Attribute)}
        assert not used & {"environ", "getenv"}, "only models.py and process.py read the environment"


@by_file
def test_every_file_and_public_name_says_what_it_is(path):
    code = tree(path)
    assert ast.get_docstring(code), "a file without a docstring"
    for node, owner in public(code):
        if owner and (owner.bases or short_property(node)):
            continue  # a method of a subclass answers the question that its base asks in words
        if isinstance(node, ast.ClassDef) and (module(path)[:1] == ("policies",) or "nn.Module" in map(ast.unparse, node.bases)):
            continue  # the file's docstring speaks for its one class; a module's forward says its shapes
        init = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        assert any(map(ast.get_docstring, [node, *init])), f"{node.name} (line {node.lineno}) has no docstring"


def public(code: ast.AST, owner: ast.ClassDef | None = None) -> list[tuple]:
    """Functions and classes that can be reached by a public name, each with the class that it stands in."""
    found = []
    for node in ast.iter_child_nodes(code):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            found += [(node, owner), *(public(node, node) if isinstance(node, ast.ClassDef) else [])]
    return found


def short_property(node: ast.FunctionDef) -> bool:
    """One that its name and unit explain: a property of a single return."""
    return any(ast.unparse(d) == "property" for d in node.decorator_list) and len(node.body) == 1


@by_file
def test_every_signature_is_annotated(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef):
            a = node.args
            for arg in [*a.posonlyargs, *a.args, *a.kwonlyargs]:
                assert arg.annotation or arg.arg in ("self", "cls"), f"{node.name}({arg.arg}), line {node.lineno}"
            assert node.returns or node.name in ("__init__", "__post_init__"), f"{node.name} (line {node.lineno}) does not say what it returns"


@by_file
def test_files_fit_a_few_screens(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= (80 if module(path)[:1] == ("policies",) else 300)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 50, f"{node.name} is {node.end_lineno - node.lineno + 1} lines long"


@pytest.mark.parametrize("path", EVERYTHING, ids=lambda p: str(p.relative_to(ROOT)))
def test_exceptions_are_caught_by_name(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"bare except in line {node.lineno}"


def test_no_name_that_says_nothing():
    for path in CODE:
        for word in ("manager", "helper", "utils"):
            assert word not in path.stem.lower()
            for node in ast.walk(tree(path)):
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    assert word not in node.name.lower()
