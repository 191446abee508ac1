"""How fast is each policy, and what does deciding cost?

Decoding one token moves every weight and every live key and value through the processor once, and
little else: time is bytes over bandwidth. So the floor is printed first. Then the engines take
turns, some steps (or one prompt) each, round after round: whatever else the machine does hits all
alike, and the ratio of two medians is a number to trust where single times are not. The first step of a turn (`--turn`)
is not timed: it finds the caches full of another engine's data, as no second token of an answer does. The forms of the
weights (`--forms float32,bfloat16,int8,int4`) and other engines (`--peers transformers,llama.cpp`, where they are
installed) take their turns with them: NAME_over is that engine's time over the row's, at the same context and, where
that can be chosen, in the same dtype.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nanokv.bench import progress
from nanokv.bench._cells import Cell, cells, read
from nanokv.bench._output import figure, reported
from nanokv.bench._peers import Peer, check_peers, peers
from nanokv.bench._policies import at_least, called, kv_held, loaded, numbers, parsed, parser
from nanokv.engine import Engine
from nanokv.model import Transformer
from nanokv.options import usage
from nanokv.pages import Room
from nanokv.reading import settle

SPARE = 8  # steps that are not timed


def in_turn(actions: Mapping[str, Callable[[], object]], rounds: int, what: str, turn: int = 1) -> dict[str, float]:
    """Median seconds of each action, run in turn; several times in a row where a turn is longer, and the first of these does not count."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for i in range(rounds):
        progress(f"{what}: round {i + 1} of {rounds}")
        for name, action in actions.items():
            for n in range(turn):
                start = time.perf_counter()
                action()
                if n or turn == 1:
                    times[name].append(time.perf_counter() - start)
    progress("")
    return {name: statistics.median(t) for name, t in times.items()}


def bandwidth(rounds: int = 5) -> float:
    """Bytes per second that this machine reads from memory: a sum over 512 MiB in large pages, as weights are; best of some rounds."""
    x = Room(1 << 29, 1).empty((1 << 27,), torch.float32).fill_(1)
    best = min(in_turn({str(i): x.sum for i in range(rounds)}, 2, "bandwidth").values())
    return x.numel() * x.element_size() / best


def ratios(median: Mapping[str, float], row: Mapping[str, Any], bases: Sequence[str]) -> dict[str, float | None]:
    """Times of a row over those of other policies at its budget and in its form, in the same run; None where those were not run."""
    mine, found = median[called(row["policy"], row["budget"], row["form"])], {}
    for base in dict.fromkeys(bases):
        other = median.get(called(base, row["budget"], row["form"]), median.get(called(base, None, row["form"])))
        found[f"over_{base}"] = mine / other if other else None
    return found


def peers_over(median: Mapping[str, float], cell: Cell, others: Sequence[Peer]) -> dict[str, float]:
    """Times of the other engines over a cell's, in the same run: of those that compute in its dtype, or in their own."""
    mine, dtype = median[cell.name], dtype_of(cell.engine.model)
    return {f"{p.name}_over": median[called(p.name, None, p.dtype)] / mine for p in others if p.dtype in ("", dtype)}


def dtype_of(model: Transformer) -> str:
    """What it computes in, by name."""
    return str(model.like.dtype).removeprefix("torch.")


def step(engine: Engine, tokens: torch.Tensor) -> Callable[[], object]:
    """An action: decode the next token of a text."""
    return lambda: engine.decode(tokens[engine.seen % len(tokens)].view(1))


def weight_bytes(model: Transformer) -> int:
    """Bytes of weights that reading one token takes: every parameter and every buffer of codes, what is shared once.

    Of the embedding it is the token's own row, unless the head is tied to it: then the head reads the whole table anyway.
    """

    def tensors(part: torch.nn.Module) -> dict[int, torch.Tensor]:
        return {t.data_ptr(): t for t in (*part.parameters(), *part.buffers())}

    table, head = tensors(model.embed), tensors(model.head)
    whole = head | {place: t for place, t in tensors(model).items() if place not in table}
    return sum(t.nbytes for t in (*whole.values(), *(t[0] for place, t in table.items() if place not in head)))


def floor(engine: Engine, context: int, new: int) -> int:
    """Bytes that a decode step must read: the weights, and the keys and values that the policy reads."""
    c, policy = engine.model.config, engine.policy
    rows = sum(policy.reads(layer, n, context) for layer, n in enumerate(policy.plan(c.n_layers, context, new)))
    return weight_bytes(engine.model) + 2 * c.n_kv_heads * c.head_dim * rows * engine.like.element_size()


Models = Mapping[str, Transformer]  # by the form of their weights; a compiled step is a form of its own, with a model of its own
COMPILED = " compiled"


def entrants(args: argparse.Namespace, models: Models) -> list[Cell]:
    """Every policy at every budget in every form."""
    asked = (args.policies, args.budgets, args.set)
    return [
        cell for form, model in models.items()
        for cell in cells(model, *asked, form, compile=form.endswith(COMPILED), kv_dtype=args.kv_dtype)
    ]  # fmt: skip


def decode_rows(args: argparse.Namespace, models: Models, others: Sequence[Peer], tokens: torch.Tensor, rate: float, context: int) -> list[dict]:
    """Milliseconds a token after `context` tokens, each policy in turn."""
    every, new, rows = entrants(args, models), args.rounds * args.turn + SPARE, []
    prompt, rest = tokens[:context].tolist(), tokens[context:].tolist()
    progress(f"reading {context} tokens")
    for model in models.values():
        read([cell for cell in every if cell.engine and cell.engine.model is model], prompt, new)
    for peer in others:
        peer.read(prompt)
    actions = {cell.name: step(cell.engine, tokens) for cell in every if not cell.failed}
    actions |= {called(p.name, None, p.dtype): lambda p=p, coming=iter(rest): p.step(next(coming)) for p in others}
    in_turn(actions, 3, "warming up")
    median = in_turn(actions, args.rounds, "decode", args.turn)
    for cell in every:
        row = {"measure": "decode", **cell.place, "context": context}
        if cell.failed:
            rows.append(row | {"failed": cell.failed})
            continue
        seconds, least = median[cell.name], floor(cell.engine, context, new) / rate
        row |= {"floor_ms": least * 1e3, "ms": seconds * 1e3, "over_floor": seconds / least}
        row |= {"compile_s": cell.engine.compile_s, "threads": cell.engine.threads} if args.compile else {}
        row |= ratios(median, row, ("full", args.base)) | peers_over(median, cell, others)
        rows.append(row | kv_held(cell.engine, context, new))
    return rows + peer_rows("decode", others, median, context)


def peer_rows(measure: str, others: Sequence[Peer], median: Mapping[str, float], context: int) -> list[dict]:
    """What the other engines took; the form of their weights is a dtype, or their own."""
    rows = [{"measure": measure, "policy": p.name, "budget": None, "form": p.dtype or None, "context": context} for p in others]
    return [row | {"ms": median[called(row["policy"], None, row["form"])] * 1e3} | ratios(median, row, ("full",)) for row in rows]


def prefill_rows(args: argparse.Namespace, models: Models, others: Sequence[Peer], tokens: torch.Tensor, length: int) -> list[dict]:
    """Milliseconds to read a prompt, each policy in turn."""
    every, text = entrants(args, models), tokens[:length].tolist()

    def reading(engine: Engine) -> Callable[[], object]:
        def action() -> None:
            engine.reset(length, SPARE)
            engine.extend(text)

        return action

    able = [c for c in every if not c.failed]
    actions = {c.name: reading(c.engine) for c in able if c.attempt(lambda: c.engine.reset(length, SPARE)) or not c.failed}
    actions |= {called(p.name, None, p.dtype): lambda p=p: p.read(text) for p in others}
    for peer in others:
        peer.read(text[:SPARE])
    next(iter(actions.values()), dict)()  # what is done once, whoever comes first
    median = in_turn(actions, args.prefill_rounds, "prefill")
    rows = []
    for cell in every:
        row = {"measure": "prefill", **cell.place, "context": length}
        if cell.failed:
            rows.append(row | {"failed": cell.failed})
            continue
        seconds = median[cell.name]
        row |= {"ms": seconds * 1e3, "tokens_per_s": length / seconds} | ratios(median, row, ("full",))
        rows.append(row | peers_over(median, cell, others) | kv_held(cell.engine, length, SPARE))
    return rows + peer_rows("prefill", others, median, length)


@torch.no_grad()
def attention_rows(args: argparse.Namespace, models: Models) -> list[dict]:
    """One query's attention after `attention` tokens, mean of the layers, and the bytes that it must read, each policy in turn.

    The layers follow each other as in a step, each with keys of its own: so no cache holds what memory must bring.
    """
    T, every, actions, read_bytes, layers = args.attention, entrants(args, models), {}, {}, {}
    for cell in every:
        if cell.failed or cell.attempt(lambda: cell.engine.reset(T, 1)) or cell.failed:
            continue
        c, dtype, policy = cell.engine.model.config, cell.engine.like.dtype, cell.engine.policy
        H, G, D, first = c.n_kv_heads, c.n_heads // c.n_kv_heads, c.head_dim, min(2, c.n_layers - 1)  # quest's first layers are dense
        k, v, q = (torch.randn(H, T, D, dtype=dtype), torch.randn(H, T, D, dtype=dtype), torch.randn(H, G, 1, D, dtype=dtype))
        for kv in cell.engine.slots:
            text = kv.beside(T)
            text.append(k, v)
            settle(policy, text, kv)
        actions[cell.name] = lambda e=cell.engine, q=q, first=first: [e.attend(kv, q, kv.now - 1) for kv in e.slots[first:]]
        layers[cell.name] = c.n_layers - first
        read_bytes[cell.name] = 2 * H * D * dtype.itemsize * policy.reads(first, policy.plan(c.n_layers, T, 1)[first], T)
    in_turn(actions, 3, "warming up")
    median = {name: seconds / layers[name] for name, seconds in in_turn(actions, args.rounds, "attention").items()}
    found = []
    for cell in every:
        row = {"measure": "attention", **cell.place, "context": T}
        if cell.failed:
            found.append(row | {"failed": cell.failed})
        else:
            row |= {"read_bytes": read_bytes[cell.name], "ms": median[cell.name] * 1e3}
            found.append(row | ratios(median, row, ("full",)))
    return found


def draw(path: str, rows: list[dict]) -> None:
    """Milliseconds against length: left a decode step, right the prompt."""
    with figure(path, 2) as panels:
        for axes, measure, title in zip(panels, ("decode", "prefill"), ("One more token", "The prompt")):
            found = [r for r in rows if r["measure"] == measure and "ms" in r]
            for name in dict.fromkeys(called(r["policy"], r["budget"], r["form"]) for r in found):
                mine = [r for r in found if called(r["policy"], r["budget"], r["form"]) == name]
                axes.plot([r["context"] for r in mine], [r["ms"] for r in mine], "o-", label=name)
            axes.set(xlabel="tokens", ylabel="ms", title=title, ylim=(0, None))
            if found:
                axes.legend(fontsize="small")


def options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line. ValueError for what there is none of."""
    p = parser("speed", __doc__, "1024", forms=True)
    p.add_argument("--budget", dest="budgets", metavar="N", help="the same as --budgets")
    p.add_argument("--base", default="window", help="whose decode step is 1, beside full's (default: %(default)s)")
    p.add_argument("--lengths", metavar="N,N", help="time decoding after, and reading of, each of so many tokens")
    p.add_argument("--context", type=int, default=2048, help="without --lengths: tokens read before decoding is timed (0: not timed)")
    p.add_argument("--prefill", type=int, default=0, help="without --lengths: tokens of the prompt whose reading is timed (0: not timed)")
    p.add_argument("--rounds", type=int, default=50, help="of decoding (default: %(default)s)")
    p.add_argument("--turn", type=int, default=4, help="steps of a turn, of which the first is not timed (1: single steps, timed; default: %(default)s)")
    p.add_argument("--prefill-rounds", type=int, default=3, help="(default: %(default)s)")
    p.add_argument("--compile", action="store_true", help="time every decode step compiled, too")
    p.add_argument("--kv-dtype", default="auto", help="of keys and values (default: the model's)")
    p.add_argument("--attention", type=int, default=0, help="tokens over which a layer's attention is timed (0: not timed)")
    p.add_argument("--peers", default="", metavar="NAME,NAME", help="transformers, llama.cpp: other engines in the same run, fed the same tokens")
    args = parsed(p, argv, {"context": 512, "rounds": 5, "prefill_rounds": 1})
    at_least(0, args, "context", "prefill", "attention")
    at_least(1, args, "rounds", "turn", "prefill_rounds")
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
    plain = {form: loaded(args, form, "cpu")[0] for form in args.forms}
    models = plain | {form + COMPILED: loaded(args, form, "cpu")[0] for form in args.forms if args.compile}
    torch.manual_seed(args.seed)
    longest = max(args.contexts + args.prefills) + args.rounds * args.turn + 64
    tokens = torch.randint(0, models[args.forms[0]].config.vocab_size, (longest,))
    others = peers(args.peers, args.model, list(dict.fromkeys(map(dtype_of, models.values()))), longest)
    rate = bandwidth()
    print(f"memory gives {rate / 1e9:.1f} GB/s\n", flush=True)
    with reported("speed", args, draw, bytes_per_s=rate) as rows:
        for context in filter(None, args.contexts):
            rows += decode_rows(args, models, others, tokens, rate, context)
        for length in filter(None, args.prefills):
            rows += prefill_rows(args, plain, others, tokens, length)
        rows += attention_rows(args, plain) if args.attention else []
    return 0
