"""Does a stream cost the same at its end as at its start?

Two engines on one model with the same policy: one young, one that has already streamed `--tokens`
tokens. They step in turn, so that whatever else the machine does hits both alike; the ratio of
their median step times says whether age costs anything. Allocated bytes are counted all the way.
"""

import argparse
import resource
import statistics
import sys
import time
from dataclasses import replace

import torch

from nanokv import make
from nanokv.bench import progress, report
from nanokv.engine import Engine
from nanokv.model import ModelConfig, Transformer

LAST = 1_000  # so many tokens before the measured steps are decoded one by one in any case
SHAPES = {
    "smollm2-135m": ModelConfig(49152, 576, 30, 9, 3, 64, 1536, tied=True, max_context=8192),
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
        raise ValueError(f"logits stopped being finite at token {engine.seen}")
    return elapsed


def measure(policy: str, args: argparse.Namespace, model: Transformer) -> dict:
    """Stream, then let the old and a young engine step in turn."""
    tokens = torch.randint(0, model.config.vocab_size, (4096,))
    engines = []
    for length in (args.at, args.tokens):
        engine = Engine(model, make(policy, budget=args.budget))
        engine.extend(tokens[:8])
        engines.append(engine)
        first, low, high = allocated(engine), None, None
        while engine.seen < length:
            if args.chunk and length - engine.seen > LAST + args.chunk:
                engine.extend(tokens[: args.chunk])
            else:
                step(engine, tokens)
            if engine.seen % 1000 < max(args.chunk, 1):
                progress(f"{policy}: {engine.seen} of {length} tokens")
            if low is None and engine.seen >= length // 4:
                low, since = rss(), engine.seen
        high = rss()
        if allocated(engine) != first:
            raise ValueError(f"{policy} allocated {first} bytes at first and {allocated(engine)} in the end")
    young, old = [], []
    for _ in range(args.pairs):
        young.append(step(engines[0], tokens))
        old.append(step(engines[1], tokens))
    progress("")
    a, b = statistics.median(young), statistics.median(old)
    return {
        "policy": policy, "budget": args.budget, "tokens": args.tokens, "allocated_bytes": first,
        "rss_bytes_per_token": (high - low) / (length - since),
        f"ms_at_{args.at}": a * 1e3, f"ms_at_{args.tokens}": b * 1e3, "ratio": b / a,
    }


def main(argv: list[str]) -> None:
    """Run the bench."""
    p = argparse.ArgumentParser(prog="python -m nanokv.bench stream", description=__doc__, allow_abbrev=False)
    p.add_argument("--policies", default="window,streaming_llm")
    p.add_argument("--budget", type=int, default=1024)
    p.add_argument("--tokens", type=int, default=100_000, help="how far the old engine has streamed")
    p.add_argument("--at", type=int, default=2_000, help="how far the young one has")
    p.add_argument("--chunk", type=int, default=0, help="stream in chunks of so many tokens (0: one by one), but the last thousand")
    p.add_argument("--pairs", type=int, default=1_000, help="steps of each that are timed")
    p.add_argument("--shape", default="smollm2-135m", choices=list(SHAPES))
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(argv)
    print(__doc__, file=sys.stdout)
    torch.manual_seed(args.seed)
    model = Transformer(replace(SHAPES[args.shape], n_layers=args.layers)).to(getattr(torch, args.dtype)).eval()
    rows = [measure(policy, args, model) for policy in args.policies.split(",")]
    report("stream", rows, f"random weights, the shape of {args.shape} with {args.layers} layers", args.dtype, args.seed)
