"""Policies side by side: the options that say which, and one row for each of them at each budget.

A policy that cannot be run at some budget says so in its row, and the run goes on. Some benches put the forms of the
weights (`--forms`) side by side as well: policies forget tokens, forms forget digits, and both are seen in the same run.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from nanokv import load, make
from nanokv.bench._output import add_outputs, check_outputs
from nanokv.engine import Engine
from nanokv.memory import BITS, pool_bytes
from nanokv.model import Transformer
from nanokv.options import Parser
from nanokv.policy import REGISTRY, Policy
from nanokv.shape import DTYPES
from nanokv.tokenizer import Tokenizer

ORDER = ("full", "window", "streaming_llm", "scissorhands", "h2o", "snapkv", "pyramidkv", "adakv", "quest", "rkv", "triattention")
CANNOT = (ValueError, RuntimeError, MemoryError)  # what a policy may fail with; RuntimeError: torch gets no memory
FORMS = {d: (d, "native") for d in ("auto", *DTYPES)} | {f: ("bfloat16", f) for f in BITS}  # of weights: a dtype, and what is stored


def parser(bench: str, lesson: str | None, budgets: str, model: str | None = "smollm2-135m", forms: bool = False) -> Parser:
    """The options that every bench of policies takes; budgets and model unless told otherwise (None: it makes its own).

    forms: the weights may come in several forms, one beside the other; else in one dtype.
    """
    p = Parser(f"python -m nanokv.bench {bench}", lesson)
    p.epilog, p.formatter_class = None, argparse.RawDescriptionHelpFormatter
    if model:
        p.add_argument("--model", default=model, help="a name, a directory, or a .gguf file (default: %(default)s)")
    if forms:
        add_forms(p)
    else:
        p.add_argument("--dtype", default="float32", help="float32, bfloat16, float16 or auto (default: %(default)s)")
    p.add_argument("--policies", default="all", help="names with commas between them (default: %(default)s)")
    p.add_argument("--budgets", default=budgets, help="of each policy that has one (default: %(default)s)")
    p.add_argument("--set", action="append", default=[], metavar="policy.dial=value", help="a dial of a policy; repeatable")
    p.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    p.add_argument("--quick", action="store_true", help="less of everything that is not given")
    add_outputs(p)
    return p


def parsed(p: Parser, argv: Sequence[str], quick: Mapping[str, object], fit: Callable[[Policy], bool] = lambda _: True) -> argparse.Namespace:
    """The command line, understood; with --quick other defaults hold. `all` policies: those that are fit. ValueError for what there is none of."""
    if "--quick" in argv:
        p.set_defaults(**quick)
    args = p.read(argv)
    known = [*ORDER, *sorted(set(REGISTRY) - set(ORDER))]
    args.policies = [name for name in known if fit(REGISTRY[name]())] if args.policies == "all" else args.policies.split(",")
    args.set = dials(args.set)
    for name in [*args.policies, *args.set]:
        if name not in known:
            raise ValueError(f"no policy is called {name!r}; there are {', '.join(known)}")
    args.budgets = numbers("budgets", args.budgets)
    if hasattr(args, "forms"):
        take_forms(args)
    check_outputs(args)
    return args


def add_forms(p: Parser) -> None:
    """--forms."""
    said = f"of the weights: {', '.join(FORMS)}, with commas between them; int8 and int4 are codes, and compute in bfloat16 (default: %(default)s)"
    p.add_argument("--forms", "--dtype", default="float32", help=said)


def take_forms(args: argparse.Namespace) -> None:
    """Read what --forms says. ValueError for a form that there is none of."""
    args.dtype, args.forms = args.forms, list(dict.fromkeys(args.forms.split(",")))
    for form in args.forms:
        if form not in FORMS:
            raise ValueError(f"no form of weights is called {form!r}; there are {', '.join(FORMS)}")


def loaded(args: argparse.Namespace, form: str, device: str = "auto") -> tuple[Transformer, Tokenizer]:
    """The model with its weights in this form, and its tokenizer."""
    dtype, weights = FORMS[form]
    return load(args.model, dtype, device, weights)


def numbers(name: str, text: str) -> list[int]:
    """The whole numbers of an option. ValueError if one is none, or 0."""
    if not all(n.strip().isdecimal() and len(n) < 10 and int(n) for n in text.split(",")):
        raise ValueError(f"--{name} takes whole numbers with commas between them, not {text!r}")
    return [int(n) for n in text.split(",")]


def at_least(least: int, args: argparse.Namespace, *names: str) -> None:
    """ValueError if an option is a number below the least that makes sense."""
    for name in names:
        if (n := getattr(args, name)) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, not {n}")


def dials(texts: list[str]) -> dict[str, dict[str, str]]:
    """`--set policy.dial=value`, by policy."""
    found: dict[str, dict[str, str]] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        policy, dot, dial = key.partition(".")
        if not equals or not dot:
            raise ValueError(f"--set takes policy.dial=value, not {text!r}")
        found.setdefault(policy, {})[dial] = value
    return found


def pairs(policies: Sequence[str], budgets: Sequence[int]) -> list[tuple[str, int | None]]:
    """Every policy with every budget; None for one that has no such dial."""
    own = {name: "budget" in {f.name for f in dataclasses.fields(REGISTRY[name])} for name in policies}
    return [(name, budget) for name in policies for budget in (budgets if own[name] else [None])]


def made(name: str, budget: int | None, given: Mapping[str, Mapping[str, object]]) -> Policy:
    """The policy of a row, with the dials that were given for its name. ValueError if it cannot be."""
    return make(name, **dict(given.get(name, {})) | ({} if budget is None else {"budget": budget}))


def called(name: str, budget: int | None, form: str | None = None) -> str:
    """How a row is named where there is one line for it."""
    return " ".join(str(part) for part in (name, budget, form) if part)


def reason(error: Exception) -> str:
    """Why a policy failed, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def kv_held(engine: Engine, prompt: int, new: int) -> dict[str, int]:
    """Bytes of keys and values: what is planned for a prompt and an answer of so many tokens, and what was allocated."""
    c = engine.model.config
    planned = pool_bytes(c, engine.policy.plan(c.n_layers, prompt, new), engine.like.element_size())
    return {"kv_bytes": sum(kv.bytes for kv in engine.slots), "kv_bytes_planned": planned}


def measured(args: argparse.Namespace, measure: Callable[[str, Policy], dict], form: str | None = None) -> Iterator[dict]:
    """A row for every policy and budget (one without a budget: once): what `measure(title, policy)` returns, or why not."""
    noted: set[str] = set()
    for name, budget in pairs(args.policies, args.budgets):
        row: dict[str, object] = {"policy": name, "budget": budget} | ({"form": form} if form else {})
        try:
            policy = made(name, budget, args.set)
            if policy.note and policy.note not in noted:
                print(policy.note, file=sys.stderr)
                noted.add(policy.note)
            row["sink"] = policy.sink
            row |= measure(called(name, budget, form), policy)
        except CANNOT as error:
            row["failed"] = reason(error)
        yield row
