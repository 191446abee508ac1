"""How fast is each policy, and what does deciding cost?

Decoding one token moves every weight and every live key and value through the processor once, and
little else: time is bytes over bandwidth. So the floor is printed first. Then the engines take
turns, one step (or one prompt) each, round after round: whatever else the machine does hits all
alike, and the ratio of two medians is a number to trust where single times are not.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from nanokv import load, make
from nanokv.bench import progress, report
from nanokv.engine import Engine
from nanokv.policies.full import Full
from nanokv.policy import REGISTRY
from nanokv.reading import settle

ORDER = ("full", "window", "streaming_llm", "scissorhands", "h2o", "snapkv", "pyramidkv", "adakv", "quest", "rkv", "triattention")


def in_turn(actions: Mapping[str, Callable[[], object]], rounds: int, what: str) -> dict[str, float]:
    """Median seconds of each action, run in turn."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for i in range(rounds):
        progress(f"{what}: round {i + 1} of {rounds}")
        for name, action in actions.items():
            start = time.perf_counter()
            action()
            times[name].append(time.perf_counter() - start)
    progress("")
    return {name: statistics.median(t) for name, t in times.items()}


def bandwidth(rounds: int = 5) -> float:
    """Bytes per second that this machine reads from memory: a sum over 512 MiB, best of some rounds."""
    x = torch.ones(1 << 27)
    best = min(in_turn({str(i): x.sum for i in range(rounds)}, 2, "bandwidth").values())
    return x.numel() * x.element_size() / best


def step(engine: Engine, tokens: torch.Tensor) -> Callable[[], object]:
    """An action: decode the next token of a text."""
    return lambda: engine.decode(tokens[engine.seen % len(tokens)].view(1))


def decode_rows(args: argparse.Namespace, model: torch.nn.Module, tokens: torch.Tensor, rate: float) -> list[dict]:
    """Milliseconds a token after `context` tokens, each policy in turn."""
    engines, rows = {}, []
    for name in args.policies:
        dials = {} if name == "full" else {"budget": args.budget}
        engines[name] = Engine(model, make(name, **dials, **args.set.get(name, {})))
        engines[name].reset(args.context, args.rounds + 8)
        progress(f"{name} reads {args.context} tokens")
        engines[name].extend(tokens[: args.context])
    actions = {name: step(engine, tokens) for name, engine in engines.items()}
    in_turn(actions, 3, "warming up")
    median = in_turn(actions, args.rounds, "decode")
    weights = sum(p.numel() * p.element_size() for p in {id(p): p for p in model.parameters()}.values())
    for name, engine in engines.items():
        if isinstance(engine.policy, Full) and name != "full":  # quest reads its budget and its boxes
            itemsize, policy, c = engine.like.element_size(), engine.policy, model.config
            read = min(policy.budget, args.context) + 2 * args.context // (2 * policy.page)
            moved = 2 * c.n_layers * c.n_kv_heads * c.head_dim * read * itemsize
        else:
            moved = sum(kv.bytes for kv in engine.slots)
        floor = (weights + moved) / rate
        base = median.get(args.base) or median[args.policies[0]]
        rows.append({
            "measure": "decode", "policy": name, "budget": engine.policy.budget, "context": args.context,
            "ms": median[name] * 1e3, f"over_{args.base}": median[name] / base,
            "floor_ms": floor * 1e3, "over_floor": median[name] / floor,
        })
    return rows


def prefill_rows(args: argparse.Namespace, model: torch.nn.Module, tokens: torch.Tensor) -> list[dict]:
    """Seconds to read a prompt, each policy in turn; the ratio is over `full`."""
    def read(name: str) -> Callable[[], object]:
        dials = {} if name == "full" else {"budget": args.budget}
        engine = Engine(model, make(name, **dials, **args.set.get(name, {})))

        def action() -> None:
            engine.reset(args.prefill, 8)
            engine.extend(tokens[: args.prefill])

        return action

    actions = {name: read(name) for name in args.policies}
    actions[args.policies[0]]()  # what torch does once, whoever comes first
    median = in_turn(actions, args.prefill_rounds, "prefill")
    base = median.get("full") or median[args.policies[0]]
    return [
        {"measure": "prefill", "policy": name, "budget": None if name == "full" else args.budget, "context": args.prefill,
         "ms": s * 1e3, "tokens_per_s": args.prefill / s, "over_full": s / base}
        for name, s in median.items()
    ]


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


def attention_rows(args: argparse.Namespace, model: torch.nn.Module) -> list[dict]:
    """One layer's attention of one query after `attention` tokens, and the bytes that it must read, each policy in turn."""
    c, actions, rows = model.config, {}, []
    H, G, D, T, dtype = c.n_kv_heads, c.n_heads // c.n_kv_heads, c.head_dim, args.attention, model.embed.weight.dtype
    k, v, q = (torch.randn(H, T, D, dtype=dtype), torch.randn(H, T, D, dtype=dtype), torch.randn(H, G, 1, D, dtype=dtype))
    for name in args.policies:
        dials = {} if name == "full" else {"budget": args.budget}
        engine = Engine(model, make(name, **dials, **args.set.get(name, {})))
        engine.reset(T, 1)
        kv = engine.slots[min(2, c.n_layers - 1)]  # quest's first layers are dense
        text = kv.beside(T)
        text.append(k, v)
        settle(engine.policy, text, kv)
        actions[name] = lambda e=engine, kv=kv: e.attend(kv, q, kv.now - 1)
        row = 2 * H * D * dtype.itemsize  # bytes of one token's key and value
        live = int(kv.live[0].sum())
        page = getattr(engine.policy, "page", 0)
        read = (min(args.budget, live) + live / page) * row if page else live * row
        rows.append({"measure": "attention", "policy": name, "budget": engine.policy.budget, "context": T, "read_bytes": int(read)})
    in_turn(actions, 20, "warming up")
    median = in_turn(actions, args.rounds, "attention")
    base = median[args.policies[0]]
    return [row | {"ms": median[row["policy"]] * 1e3, f"{args.policies[0]}_over": base / median[row["policy"]]} for row in rows]


def main(argv: list[str]) -> None:
    """Run the bench."""
    p = argparse.ArgumentParser(prog="python -m nanokv.bench speed", description=__doc__, allow_abbrev=False)
    p.add_argument("--model", default="smollm2-135m")
    p.add_argument("--dtype", default="float32")
    p.add_argument("--policies", default="all")
    p.add_argument("--budget", type=int, default=1024)
    p.add_argument("--set", action="append", default=[], metavar="policy.dial=value")
    p.add_argument("--base", default="window", help="whose decode step is 1")
    p.add_argument("--context", type=int, default=2048, help="tokens read before decoding is timed (0: not timed)")
    p.add_argument("--rounds", type=int, default=200)
    p.add_argument("--prefill", type=int, default=0, help="tokens of the prompt whose reading is timed (0: not timed)")
    p.add_argument("--prefill-rounds", type=int, default=3)
    p.add_argument("--attention", type=int, default=0, help="tokens over which one layer's attention is timed (0: not timed)")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(argv)
    args.policies = list(ORDER) if args.policies == "all" else args.policies.split(",")
    for name in args.policies:
        if name not in REGISTRY:
            raise ValueError(f"no policy is called {name!r}; there are {', '.join(sorted(REGISTRY))}")
    args.set = dials(args.set)
    print(__doc__)
    model, tokenizer = load(args.model, args.dtype, "cpu")
    torch.manual_seed(args.seed)
    tokens = torch.randint(0, model.config.vocab_size, (max(args.context + args.rounds + 64, args.prefill),))
    rate = bandwidth()
    print(f"memory gives {rate / 1e9:.1f} GB/s\n")
    rows = decode_rows(args, model, tokens, rate) if args.context else []
    rows += prefill_rows(args, model, tokens) if args.prefill else []
    with torch.no_grad():
        rows += attention_rows(args, model) if args.attention else []
    report("speed", rows, args.model, args.dtype, args.seed)
