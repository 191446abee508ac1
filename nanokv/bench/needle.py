"""Does an answer still find a fact when only `budget` tokens of the prompt are remembered?

A five-digit code stands somewhere in a long text, and the prompt asks for it. The whole prompt is read with full
attention; then each policy keeps what it thinks worth keeping, and the model answers from that alone. `full` is
the control: what it misses, the model cannot do. Where the question stands decides much: after the text it is in
the window that SnapKV and R-KV listen to, before it nobody knows yet what will be asked (`--question`).
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nanokv import load, make
from nanokv.bench import progress, report, table
from nanokv.bench._haystack import KINDS, Prompt, prompts
from nanokv.bench._together import answer, apart, read_together
from nanokv.bench.speed import ORDER, dials
from nanokv.engine import Engine
from nanokv.model import Transformer
from nanokv.policy import REGISTRY
from nanokv.tokenizer import Tokenizer

Dials = Mapping[str, Mapping[str, object]]  # by policy


@dataclass
class Cell:
    """One policy at one budget, and what it found. budget None: it has no such dial."""

    policy: str
    budget: int | None
    engine: Engine | None = None
    hits: str = ""  # 1 or 0 for each prompt
    failed: str = ""  # why there is no count

    def attempt(self, action: Callable[[], object]) -> object:
        """What the action returns; None if it cannot be done, and then the cell says why and is out."""
        try:
            return action()
        except ValueError as error:
            self.failed, self.engine = str(error), None
            return None

    @property
    def count(self) -> int | None:
        """Prompts whose key was found; None if the cell failed."""
        return None if self.failed else self.hits.count("1")

    @property
    def row(self) -> dict:
        """What the report says of it."""
        row = {"policy": self.policy, "budget": self.budget, "found": self.count, "hits": self.hits}
        return row | ({"failed": self.failed} if self.failed else {})


def cells(model: Transformer, policies: Sequence[str], budgets: Sequence[int], dials: Dials) -> Iterator[Cell]:
    """An engine for every policy and budget; one for a policy without a budget."""
    for name in policies:
        own = "budget" in {f.name for f in dataclasses.fields(REGISTRY[name])}
        for budget in budgets if own else [None]:
            given = dict(dials.get(name, {})) | ({"budget": budget} if own else {})
            cell = Cell(name, budget)
            cell.engine = cell.attempt(lambda: Engine(model, make(name, **given)))
            yield cell


def ask(every: Sequence[Cell], prompt: Prompt, tokenizer: Tokenizer) -> None:
    """Let every cell that can read the prompt and answer; note which ones found the key."""
    tokens, max_new = prompt.tokens, prompt.max_new
    for cell in every:
        if not cell.failed:
            cell.attempt(lambda: cell.engine.reset(len(tokens), max_new))
    able = [c for c in every if not c.failed]
    together = [c for c in able if not apart(c.engine, len(tokens))]
    logits = read_together([c.engine for c in together], tokens) if together else None
    for cell in able:
        own = logits if cell in together else cell.attempt(lambda: cell.engine.extend(tokens))
        ids = None if cell.failed else cell.attempt(lambda: answer(cell.engine, own, max_new, tokenizer.eos_ids))
        if ids is not None:
            cell.hits += str(int(prompt.found(tokenizer.decode(ids))))


def grid(every: Sequence[Cell], budgets: Sequence[int]) -> list[dict]:
    """What was found, a row for each policy and a column for each budget."""
    found = {(c.policy, c.budget): "-" if c.failed else c.count for c in every}
    names = dict.fromkeys(c.policy for c in every)
    return [{"policy": n} | {str(b): found.get((n, b), found.get((n, None))) for b in budgets} for n in names]


def options(argv: list[str]) -> argparse.Namespace:
    """The command line. ValueError for what there is none of."""
    p = argparse.ArgumentParser(prog="python -m nanokv.bench needle", description=__doc__, allow_abbrev=False)
    p.add_argument("--model", default="smollm2-135m")
    p.add_argument("--dtype", default="float32")
    p.add_argument("--policies", default="all")
    p.add_argument("--budgets", default="64,128,256,512,1024")
    p.add_argument("--set", action="append", default=[], metavar="policy.dial=value")
    p.add_argument("--prompts", type=int, default=20)
    p.add_argument("--lengths", default="1000,2000", help="tokens of a prompt, in equal parts")
    p.add_argument("--kind", default="prose", choices=list(KINDS))
    p.add_argument("--question", default="after", choices=("after", "before"), help="where it stands: after or before the text")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--quick", action="store_true", help="4 prompts, budgets 128 and 512")
    args = p.parse_args(argv)
    if args.quick:
        args.prompts, args.budgets = 4, "128,512"
    known = [*ORDER, *sorted(set(REGISTRY) - set(ORDER))]
    args.policies = known if args.policies == "all" else args.policies.split(",")
    args.set = dials(args.set)
    for name in [*args.policies, *args.set]:
        if name not in known:
            raise ValueError(f"no policy is called {name!r}; there are {', '.join(known)}")
    args.budgets, args.lengths = numbers("budgets", args.budgets), numbers("lengths", args.lengths)
    if args.prompts < 1:
        raise ValueError(f"at least 1 prompt must be asked, not {args.prompts}")
    return args


def numbers(name: str, text: str) -> list[int]:
    """The whole numbers of an option."""
    if not all(n.strip().isdecimal() and int(n) for n in text.split(",")):
        raise ValueError(f"--{name} takes whole numbers with commas between them, not {text!r}")
    return [int(n) for n in text.split(",")]


def main(argv: list[str]) -> None:
    """Run the bench."""
    args = options(argv)
    print(__doc__)
    model, tokenizer = load(args.model, args.dtype)
    asked = prompts(tokenizer, args.prompts, args.lengths, args.kind, args.question, args.seed)
    every = list(cells(model, args.policies, args.budgets, args.set))
    for note in dict.fromkeys(c.engine.policy.note for c in every if c.engine and c.engine.policy.note):
        print(note, file=sys.stderr)
    for i, prompt in enumerate(asked):
        progress(f"prompt {i + 1} of {len(asked)}, {len(prompt.tokens)} tokens")
        ask(every, prompt, tokenizer)
    progress("")
    print(f"found of {len(asked)}, {args.kind}, {' and '.join(map(str, args.lengths))} tokens, the question {args.question} the text\n")
    table(grid(every, args.budgets))
    facts = {"kind": args.kind, "question": args.question, "lengths": args.lengths}
    report("needle", [c.row for c in every], args.model, args.dtype, args.seed, **facts)
