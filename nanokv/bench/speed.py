"""How fast is each policy, and what does deciding cost?

Decoding one token moves every weight and every live key and value through the processor once, and
little else: time is bytes over bandwidth. So the floor is printed first. Then the engines take
turns, one step (or one prompt) each, round after round: whatever else the machine does hits all
alike, and the ratio of two medians is a number to trust where single times are not. Other
engines (`--peers transformers,llama.cpp`, where they are installed) take their turns with them.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nanokv import load
from nanokv.bench import progress
from nanokv.bench._cells import cells, read
from nanokv.bench._output import figure, reported
from nanokv.bench._peers import Peer, check_peers, peers
from nanokv.bench._policies import at_least, called, kv_held, numbers, parsed, parser
from nanokv.engine import Engine
from nanokv.options import usage
from nanokv.reading import settle

SPARE = 8  # steps that are not timed


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


def ratios(median: Mapping[str, float], name: str, budget: int | None, bases: Sequence[str]) -> dict[str, float | None]:
    """Times of a row over those of other policies at its budget, in the same run; None where those were not run."""
    mine, found = median[called(name, budget)], {}
    for base in dict.fromkeys(bases):
        other = median.get(called(base, budget), median.get(called(base, None)))
        found[f"over_{base}"] = mine / other if other else None
    return found


def step(engine: Engine, tokens: torch.Tensor) -> Callable[[], object]:
    """An action: decode the next token of a text."""
    return lambda: engine.decode(tokens[engine.seen % len(tokens)].view(1))


def floor(engine: Engine, context: int, new: int) -> int:
    """Bytes that a decode step must read: every weight, and the keys and values that the policy reads."""
    c, policy = engine.model.config, engine.policy
    weights = sum(p.numel() * p.element_size() for p in {id(p): p for p in engine.model.parameters()}.values())
    rows = sum(policy.reads(layer, n, context) for layer, n in enumerate(policy.plan(c.n_layers, context, new)))
    return weights + 2 * c.n_kv_heads * c.head_dim * rows * engine.like.element_size()


def decode_rows(args: argparse.Namespace, model: torch.nn.Module, others: Mapping[str, Peer], tokens: torch.Tensor, rate: float, context: int) -> list[dict]:
    """Milliseconds a token after `context` tokens, each policy in turn."""
    every, new, rows = list(cells(model, args.policies, args.budgets, args.set)), args.rounds + SPARE, []
    progress(f"reading {context} tokens")
    read(every, tokens[:context].tolist(), new)
    for peer in others.values():
        peer.read(tokens[:context].tolist())
    actions = {called(c.policy, c.budget): step(c.engine, tokens) for c in every if not c.failed}
    actions |= {name: lambda peer=peer: peer.step(int(tokens[context])) for name, peer in others.items()}
    in_turn(actions, 3, "warming up")
    median = in_turn(actions, args.rounds, "decode")
    for cell in every:
        row = {"measure": "decode", "policy": cell.policy, "budget": cell.budget, "context": context}
        if cell.failed:
            rows.append(row | {"failed": cell.failed})
            continue
        seconds, least = median[called(cell.policy, cell.budget)], floor(cell.engine, context, new) / rate
        row |= {"floor_ms": least * 1e3, "ms": seconds * 1e3, "over_floor": seconds / least}
        rows.append(row | ratios(median, cell.policy, cell.budget, ("full", args.base)) | kv_held(cell.engine, context, new))
    return rows + peer_rows("decode", others, median, context)


def peer_rows(measure: str, others: Mapping[str, Peer], median: Mapping[str, float], context: int) -> list[dict]:
    """What the other engines took."""
    return [
        {"measure": measure, "policy": name, "budget": None, "context": context, "ms": median[name] * 1e3} | ratios(median, name, None, ("full",))
        for name in others
    ]


def prefill_rows(args: argparse.Namespace, model: torch.nn.Module, others: Mapping[str, Peer], tokens: torch.Tensor, length: int) -> list[dict]:
    """Milliseconds to read a prompt, each policy in turn."""
    every, text = list(cells(model, args.policies, args.budgets, args.set)), tokens[:length].tolist()

    def reading(engine: Engine) -> Callable[[], object]:
        def action() -> None:
            engine.reset(length, SPARE)
            engine.extend(text)

        return action

    able = [c for c in every if not c.failed]
    actions = {called(c.policy, c.budget): reading(c.engine) for c in able if c.attempt(lambda: c.engine.reset(length, SPARE)) or not c.failed}
    actions |= {name: lambda peer=peer: peer.read(text) for name, peer in others.items()}
    next(iter(actions.values()), dict)()  # what torch does once, whoever comes first
    median = in_turn(actions, args.prefill_rounds, "prefill")
    rows = []
    for cell in every:
        row = {"measure": "prefill", "policy": cell.policy, "budget": cell.budget, "context": length}
        if cell.failed:
            rows.append(row | {"failed": cell.failed})
            continue
        seconds = median[called(cell.policy, cell.budget)]
        row |= {"ms": seconds * 1e3, "tokens_per_s": length / seconds}
        rows.append(row | ratios(median, cell.policy, cell.budget, ("full",)) | kv_held(cell.engine, length, SPARE))
    return rows + peer_rows("prefill", others, median, length)


@torch.no_grad()
def attention_rows(args: argparse.Namespace, model: torch.nn.Module) -> list[dict]:
    """One layer's attention of one query after `attention` tokens, and the bytes that it must read, each policy in turn."""
    c, T, actions, read_bytes = model.config, args.attention, {}, {}
    H, G, D, dtype = c.n_kv_heads, c.n_heads // c.n_kv_heads, c.head_dim, model.like.dtype
    k, v, q = (torch.randn(H, T, D, dtype=dtype), torch.randn(H, T, D, dtype=dtype), torch.randn(H, G, 1, D, dtype=dtype))
    layer = min(2, c.n_layers - 1)  # quest's first layers are dense
    every = list(cells(model, args.policies, args.budgets, args.set))
    for cell in every:
        if cell.failed or cell.attempt(lambda: cell.engine.reset(T, 1)) or cell.failed:
            continue
        kv = cell.engine.slots[layer]
        text = kv.beside(T)
        text.append(k, v)
        settle(cell.engine.policy, text, kv)
        name = called(cell.policy, cell.budget)
        actions[name] = lambda e=cell.engine, kv=kv: e.attend(kv, q, kv.now - 1)
        rows = cell.engine.policy.plan(c.n_layers, T, 1)[layer]
        read_bytes[name] = 2 * H * D * dtype.itemsize * cell.engine.policy.reads(layer, rows, T)
    in_turn(actions, 20, "warming up")
    median = in_turn(actions, args.rounds, "attention")
    found = []
    for cell in every:
        row, name = {"measure": "attention", "policy": cell.policy, "budget": cell.budget, "context": T}, called(cell.policy, cell.budget)
        if cell.failed:
            found.append(row | {"failed": cell.failed})
        else:
            row |= {"read_bytes": read_bytes[name], "ms": median[name] * 1e3}
            found.append(row | ratios(median, cell.policy, cell.budget, ("full",)))
    return found


def draw(path: str, rows: list[dict]) -> None:
    """Milliseconds against length: left a decode step, right the prompt."""
    with figure(path, 2) as panels:
        for axes, measure, title in zip(panels, ("decode", "prefill"), ("One more token", "The prompt")):
            found = [r for r in rows if r["measure"] == measure and "ms" in r]
            for name in dict.fromkeys(called(r["policy"], r["budget"]) for r in found):
                mine = [r for r in found if called(r["policy"], r["budget"]) == name]
                axes.plot([r["context"] for r in mine], [r["ms"] for r in mine], "o-", label=name)
            axes.set(xlabel="tokens", ylabel="ms", title=title, ylim=(0, None))
            if found:
                axes.legend(fontsize="small")


def options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line. ValueError for what there is none of."""
    p = parser("speed", __doc__, "1024")
    p.add_argument("--budget", dest="budgets", metavar="N", help="the same as --budgets")
    p.add_argument("--base", default="window", help="whose decode step is 1, beside full's (default: %(default)s)")
    p.add_argument("--lengths", metavar="N,N", help="time decoding after, and reading of, each of so many tokens")
    p.add_argument("--context", type=int, default=2048, help="without --lengths: tokens read before decoding is timed (0: not timed)")
    p.add_argument("--prefill", type=int, default=0, help="without --lengths: tokens of the prompt whose reading is timed (0: not timed)")
    p.add_argument("--rounds", type=int, default=200, help="of decoding (default: %(default)s)")
    p.add_argument("--prefill-rounds", type=int, default=3, help="(default: %(default)s)")
    p.add_argument("--attention", type=int, default=0, help="tokens over which one layer's attention is timed (0: not timed)")
    p.add_argument("--peers", default="", metavar="NAME,NAME", help="transformers, llama.cpp: other engines in the same run")
    args = parsed(p, argv, {"context": 512, "rounds": 20, "prefill_rounds": 1})
    at_least(0, args, "context", "prefill", "attention")
    at_least(1, args, "rounds", "prefill_rounds")
    given = numbers("lengths", args.lengths) if args.lengths else None
    args.contexts, args.prefills = (given, given) if given else ([args.context], [args.prefill])
    args.peers = args.peers.split(",") if args.peers else []
    check_peers(args.peers)
    return args


def main(argv: Sequence[str]) -> int:
    """Run the bench."""
    with usage():
        args = options(argv)
    print(__doc__)
    model, _ = load(args.model, args.dtype, "cpu")
    torch.manual_seed(args.seed)
    longest = max(args.contexts + args.prefills) + args.rounds + 64
    tokens = torch.randint(0, model.config.vocab_size, (longest,))
    others = peers(args.peers, args.model, model.like.dtype, longest)
    rate = bandwidth()
    print(f"memory gives {rate / 1e9:.1f} GB/s\n", flush=True)
    with reported("speed", args, draw, bytes_per_s=rate) as rows:
        for context in filter(None, args.contexts):
            rows += decode_rows(args, model, others, tokens, rate, context)
        for length in filter(None, args.prefills):
            rows += prefill_rows(args, model, others, tokens, length)
        rows += attention_rows(args, model) if args.attention else []
    return 0
