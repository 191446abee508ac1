"""Does a stream cost the same at its end as at its start?

Two engines on one model with the same policy: one young, one that has already streamed `--tokens`
tokens. They step in turn, so that whatever else the machine does hits both alike; the ratio of
their step times says whether age costs anything. Allocated bytes are counted all the way.

A policy that evicts m tokens at a time pays for it in one step of m, so whole cycles of m steps are timed. Of each
place in the cycle the median over the cycles counts, and the step time is the mean of those.
The weights are random, and the tokens to choose from few: so the step's time is that of layers and policy, not of the head.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from nanokv.bench import progress
from nanokv.bench._output import figure, reported
from nanokv.bench._policies import at_least, called, kv_held, measured, parsed, parser
from nanokv.engine import Engine
from nanokv.model import ModelConfig, Transformer
from nanokv.options import MOST, positive, usage
from nanokv.policy import Policy

LAST = 1_000  # so many tokens before the measured steps are decoded one by one in any case
CYCLES = 3  # so many are timed at least
SHAPES = {
    "smollm2-135m": ModelConfig(49152, 576, 30, 9, 3, 64, 1536, tied=True, max_context=8192),
    "layer": ModelConfig(256, 576, 30, 9, 3, 64, 1536, tied=True, max_context=8192),  # the same, with few tokens to choose from
    "tiny": ModelConfig(256, 64, 2, 4, 2, 16, 128, tied=True, max_context=8192),
}


def allocated(engine: Engine) -> int:
    """Bytes of every tensor that the slots own, counted from their storages."""
    tensors = [t for kv in engine.slots for t in (*vars(kv).values(), *kv.marks.values(), *kv.state.values())]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if isinstance(t, torch.Tensor)}
    return sum(storages.values())


def rss() -> int:
    """Resident bytes of this process now."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize()


def step(engine: Engine, tokens: torch.Tensor) -> float:
    """Decode one token; seconds."""
    start = time.perf_counter()
    logits = engine.decode(tokens[engine.seen % len(tokens)].view(1))
    elapsed = time.perf_counter() - start
    if not bool(torch.isfinite(logits).all()):
        raise RuntimeError(f"logits stopped being finite at token {engine.seen}")
    return elapsed


def streamed(engine: Engine, length: int, tokens: torch.Tensor, chunk: int, title: str) -> dict:
    """Let a fresh engine stream until it has seen `length` tokens -> what it allocated, and how its process grew on the way."""
    engine.extend(tokens[:8])
    first, low = allocated(engine), None
    while engine.seen < length:
        if chunk and length - engine.seen > LAST + chunk:
            engine.extend(tokens[:chunk])
        else:
            step(engine, tokens)
        if engine.seen % 1000 < max(chunk, 1):
            progress(f"{title}: {engine.seen} of {length} tokens")
        if low is None and engine.seen >= length // 4:
            low, since = rss(), engine.seen
    if allocated(engine) != first:
        raise RuntimeError(f"{title} allocated {first} bytes at first and {allocated(engine)} in the end")
    return {"allocated_bytes": first, "rss_bytes_per_token": (rss() - low) / max(length - since, 1)}


def evicts(policy: Policy) -> bool:
    """Do its rows suffice for a text of any length?"""
    return policy.plan(1, 1, MOST)[0] < MOST


def steady(seconds: Sequence[float], cycle: int) -> float:
    """The mean step of a cycle, given the steps of whole cycles: each of its places counts with its median."""
    assert len(seconds) % cycle == 0, "whole cycles"
    return statistics.fmean(statistics.median(seconds[place::cycle]) for place in range(cycle))


def measure(args: argparse.Namespace, model: Transformer, title: str, policy: Policy) -> dict:
    """Stream, then let the old and a young engine step in turn."""
    tokens = torch.randint(0, model.config.vocab_size, (max(4096, args.chunk),), generator=torch.Generator().manual_seed(args.seed))
    young, old = Engine(model, policy), Engine(model, policy)
    streamed(young, args.at, tokens, args.chunk, title)
    grown = streamed(old, args.tokens, tokens, args.chunk, title)
    times: tuple[list[float], list[float]] = ([], [])
    cycle = policy.interval
    pairs = cycle * max(CYCLES, -(-args.pairs // cycle))
    for i in range(pairs):
        if i % 100 == 0:
            progress(f"{title}: {i} of {pairs} pairs of steps")
        for engine, seconds in list(zip((young, old), times))[:: 1 if i % 2 else -1]:  # who comes first finds other caches
            seconds.append(step(engine, tokens))
    a, b = (steady(seconds, cycle) for seconds in times)
    held = kv_held(old, 8, model.config.max_context - 8)  # as a stream without an end is planned
    found = {"tokens": args.tokens, "cycle": cycle, "pairs": pairs} | held | grown
    return found | {f"ms_at_{args.at}": a * 1e3, f"ms_at_{args.tokens}": b * 1e3, "ratio": b / a}


def draw(path: str, rows: list[dict]) -> None:
    """What age costs: 1 is nothing."""
    found = [r for r in rows if "ratio" in r]
    with figure(path) as (axes,):
        axes.bar([called(r["policy"], r["budget"]) for r in found], [r["ratio"] for r in found])
        axes.axhline(1, color="black", linewidth=1)
        axes.set(ylabel="a step late / a step early", title="What age costs")


def options(argv: list[str]) -> argparse.Namespace:
    """The command line. ValueError for what there is none of."""
    p = parser("stream", __doc__, "1024", model=None)
    p.set_defaults(policies="window,streaming_llm")
    p.add_argument("--tokens", type=positive, default=100_000, help="how far the old engine has streamed (default: %(default)s)")
    p.add_argument("--at", type=positive, default=2_000, help="how far the young one has (default: %(default)s)")
    p.add_argument("--chunk", type=int, default=1024, help="tokens read at a time on the way, but for the last thousand (0: one by one; default: %(default)s)")
    p.add_argument("--pairs", type=positive, default=1_000, help=f"steps of each that are timed, or a few more: whole cycles, {CYCLES} at least (default: %(default)s)")
    p.add_argument("--shape", default="layer", choices=list(SHAPES), help="of the random model: smollm2-135m, its layers alone, or a tiny one (default: %(default)s)")
    p.add_argument("--layers", type=positive, default=2, help="how many layers it has (default: %(default)s)")
    p.add_argument("--budget", dest="budgets", help="the same as --budgets")
    args = parsed(p, argv, {"tokens": 5_000, "at": 1_100, "pairs": 200}, evicts)
    at_least(0, args, "chunk")
    at_least(9, args, "at")
    if args.tokens < args.at:
        raise ValueError(f"--tokens, {args.tokens}, is how far the old engine has streamed: at least --at, {args.at}")
    if args.dtype not in ("float32", "bfloat16"):
        raise ValueError(f"--dtype takes float32 or bfloat16, not {args.dtype!r}")
    return args


def main(argv: list[str]) -> int:
    """Run the bench."""
    with usage():
        args = options(argv)
    print(__doc__)
    torch.manual_seed(args.seed)
    model = Transformer(replace(SHAPES[args.shape], n_layers=args.layers)).to(getattr(torch, args.dtype)).eval()
    args.model = f"random weights, the shape of {args.shape} with {args.layers} layers"
    with reported("stream", args, draw) as rows:
        for row in measured(args, lambda title, policy: measure(args, model, title, policy)):
            rows.append(row)
    return 1 if any("failed" in row for row in rows) else 0
