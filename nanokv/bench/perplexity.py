"""What does forgetting cost the next word?

Perplexity is the number of tokens that a model wavers between, on average, before it reads the next one:
exp of the mean of -ln p(token that came). In one forward pass over a text nothing is ever forgotten, so eviction
would not show. Here every token takes the path of an answer: slots start empty, the text's own tokens are fed
one at a time, and each is predicted from what the policy still remembers of those before it. `full` is the
control. There is no prompt, so what listens to prompts alone (SnapKV and its kin; TriAttention without statistics)
hears nothing. The curve in the JSON is the mean of -ln p over 64 places at a time: it shows where the budget ran out.
`--forms` asks the same of weights of fewer bits: what does rounding cost, beside forgetting?
"""

import argparse
from collections.abc import Iterator
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from nanokv.bench import progress
from nanokv.bench._output import Finished, add_resume, figure, reported
from nanokv.bench._policies import called, kv_held, loaded, measured, parsed, parser
from nanokv.bench._text import SAMPLE, add_text, first_tokens
from nanokv.engine import Engine
from nanokv.options import usage
from nanokv.policy import Policy

BUCKET = 64  # places that make one point of the curve


def losses(engine: Engine, tokens: Tensor, title: str = "") -> Tensor:
    """-ln p of every token [N] but the first, each decoded from those before it: [N - 1], float64."""
    engine.reset(0, len(tokens) - 1)
    found = torch.empty(len(tokens) - 1, dtype=torch.float64)
    for i in range(len(found)):
        if i % 16 == 0:
            progress(f"{title}: token {i} of {len(found)}")
        logits = engine.decode(tokens[i : i + 1])
        found[i] = F.cross_entropy(logits.float(), tokens[i + 1])
        if not found[i].isfinite():
            raise ValueError(f"after token {i} the logits are no longer finite")
    return found


def curve(found: Tensor, first: int) -> list[list]:
    """[place of its first target, mean loss] for every BUCKET of targets; those before `first` do not count."""
    place = torch.arange(1, len(found) + 1)
    groups = [(place // BUCKET == b) & (place >= first) for b in range(len(found) // BUCKET + 1)]
    return [[int(place[g][0]), float(found[g].mean())] for g in groups if g.any()]


def row(found: Tensor, first: int) -> dict:
    """What counts of one policy's losses."""
    counted = found[max(first, 1) - 1 :]
    return {"ppl": float(counted.mean().exp()), "targets": len(counted), "curve": curve(found, first)}


def draw(path: str, rows: list[dict]) -> None:
    """The curves."""
    with figure(path) as (axes,):
        for r in rows:
            if "curve" in r:
                axes.plot(*zip(*r["curve"]), label=called(r["policy"], r["budget"], r.get("form")))
        axes.set(xlabel="token", ylabel=f"-ln p, mean of {BUCKET}", title="What forgetting costs the next word")
        axes.legend(fontsize="small")


def options(argv: list[str]) -> argparse.Namespace:
    """The command line. ValueError for what there is none of."""
    p = parser("perplexity", __doc__, "64,256", forms=True)
    add_text(p, 1024)
    add_resume(p)
    p.add_argument("--from", dest="first", type=int, default=0, metavar="K", help="only tokens from index K on count (default: %(default)s)")
    args = parsed(p, argv, {"tokens": 256, "budgets": "64"})
    if not 0 <= args.first < args.tokens:
        raise ValueError(f"--from takes an index below --tokens, {args.tokens}, not {args.first}")
    return args


def main(argv: list[str]) -> int:
    """Run the bench. Interrupted, it reports what it has."""
    with usage():
        args = options(argv)
        finished = Finished("perplexity", args)
    print(__doc__)
    torch.manual_seed(args.seed)

    def of_form(form: str) -> Iterator[dict]:
        model, tokenizer = loaded(args, form)
        tokens = torch.tensor(first_tokens(args, model, tokenizer, least=2), device=model.like.device)

        def measure(title: str, policy: Policy) -> dict:
            def read() -> dict:
                engine = Engine(model, policy)
                return row(losses(engine, tokens, title), args.first) | kv_held(engine, 0, len(tokens) - 1)

            return finished.once(title, read)

        return measured(args, measure, form)

    first, *others = args.forms
    begun = of_form(first)  # a text that is none is said before there is a report
    print(f"{args.tokens} tokens, those from {max(args.first, 1)} on count\n")
    with reported("perplexity", args, draw, text=args.text or SAMPLE, tokens=args.tokens) as rows:
        for found in chain(begun, chain.from_iterable(map(of_form, others))):
            rows.append(found)
    return 0
