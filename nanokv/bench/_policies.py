"""Policies side by side: the options that say which, and one row for each of them at each budget.

A policy that cannot be run at some budget says so in its row, and the run goes on.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping

from nanokv import make
from nanokv.bench._output import add_outputs, check_outputs
from nanokv.bench.speed import ORDER, dials
from nanokv.policy import REGISTRY, Policy


def parser(bench: str, lesson: str | None, budgets: str) -> argparse.ArgumentParser:
    """The options that every bench of policies takes; `budgets` unless told otherwise."""
    p = argparse.ArgumentParser(prog=f"python -m nanokv.bench {bench}", description=lesson, allow_abbrev=False)
    p.add_argument("--model", default="smollm2-135m")
    p.add_argument("--dtype", default="float32")
    p.add_argument("--policies", default="all", help="names with commas between them")
    p.add_argument("--budgets", default=budgets, help="of each policy that has one")
    p.add_argument("--set", action="append", default=[], metavar="policy.dial=value")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--quick", action="store_true", help="less of everything that is not given")
    add_outputs(p)
    return p


def parsed(p: argparse.ArgumentParser, argv: list[str], quick: Mapping[str, object]) -> argparse.Namespace:
    """The command line, understood; with --quick other defaults hold. ValueError for what there is none of."""
    if "--quick" in argv:
        p.set_defaults(**quick)
    args = p.parse_args(argv)
    known = [*ORDER, *sorted(set(REGISTRY) - set(ORDER))]
    args.policies = known if args.policies == "all" else args.policies.split(",")
    args.set = dials(args.set)
    for name in [*args.policies, *args.set]:
        if name not in known:
            raise ValueError(f"no policy is called {name!r}; there are {', '.join(known)}")
    if not all(n.strip().isdecimal() and int(n) for n in args.budgets.split(",")):
        raise ValueError(f"--budgets takes whole numbers with commas between them, not {args.budgets!r}")
    args.budgets = [int(n) for n in args.budgets.split(",")]
    check_outputs(args)
    return args


def measured(args: argparse.Namespace, measure: Callable[[str, Policy], dict]) -> Iterator[dict]:
    """A row for every policy and budget (one without a budget: once): what `measure(title, policy)` returns, or why not."""
    noted: set[str] = set()
    for name in args.policies:
        own = "budget" in {f.name for f in dataclasses.fields(REGISTRY[name])}
        for budget in args.budgets if own else [None]:
            row = {"policy": name, "budget": budget}
            try:
                given = args.set.get(name, {}) | ({"budget": budget} if own else {})
                policy = make(name, **given)
                if policy.note and name not in noted:
                    print(policy.note, file=sys.stderr)
                    noted.add(name)
                row["sink"] = policy.sink
                row |= measure(f"{name} at {budget}" if own else name, policy)
            except (ValueError, RuntimeError) as error:  # RuntimeError: what torch says of memory it cannot get
                row["failed"] = " ".join(str(error).split())
            yield row
