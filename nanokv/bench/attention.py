"""What the methods assume of attention, measured on a text.

Every method bets on how attention is spread. For each layer, over all tokens but the first 64, mean over heads:
sink_mass        what the first token gets (_std: over heads; _4: the first four; _last: of the last query alone)
coverage_x       share of all attention that goes to the best-attended x % of tokens: H2O's heavy hitters
sparsity         share of a row's weights below 1 % of its largest;  k95: share of keys that make up 95 % of a row
persistence      of the tokens before the middle to which a later query gives more than 1 / middle, how many had got
                 that before; beside it held, the share of all tokens that had: what chance would score (Scissorhands)
concentration    how much the queries before RoPE agree, from 0 to 1, in the pair of dimensions with the most energy,
                 and in all, weighted by energy: TriAttention's centre
The loss of a policy is what full attention gave to tokens that it had forgotten by then, or, if it forgets
none (quest), does not read. The text's exact queries, keys and values are fed to its slots one token a
step, from empty ones: so what it loses is its own choice, and no error adds up.
"""

import argparse
from collections.abc import Mapping

import torch
from torch import Tensor

from nanokv import load
from nanokv.attention import watch_prompt, watched_rows
from nanokv.bench import progress
from nanokv.bench._output import figure, reported
from nanokv.bench._policies import called, kv_held, measured, parsed, parser
from nanokv.bench._text import SAMPLE, add_text, first_tokens
from nanokv.engine import Engine
from nanokv.model import Attend, Transformer
from nanokv.options import usage
from nanokv.policies.full import Full
from nanokv.policy import Policy
from nanokv.query_stats import add, lengths, means, sums
from nanokv.rope import rotate

SKIP = 64  # a row over few keys says nothing: these do not count
SHARES = (5, 10, 20)  # % of tokens


class Recorded:
    """A model whose queries, keys and values of a text are written down; to an engine it is the model."""

    def __init__(self, model: Transformer, tokens: Tensor):
        """tokens [N]: the text; it is read here, in one piece, with full attention."""
        self.model, self.config, self.like, self.tokens = model, model.config, model.like, tokens
        self.layers: list[list[Tensor]] = [[] for _ in range(model.config.n_layers)]  # q [H, G, N, D], k v [H, N, D] before RoPE
        engine = Engine(self, Full())
        engine.reset(len(tokens), 0)
        engine.extend(tokens)
        self.scale = engine.scale
        pos = torch.arange(len(tokens), device=tokens.device)
        self.turned = [[rotate(x, pos, engine.freqs) for x in (q, k)] for q, k, _ in self.layers]  # q and k after RoPE

    def __call__(self, tokens: Tensor, attend: Attend) -> Tensor:
        def record(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            known = self.layers[layer]
            self.layers[layer] = [torch.cat((a, b), -2) for a, b in zip(known, (q, k, v))] if known else [q, k, v]
            return attend(layer, q, k, v)

        return self.model(tokens, record)


def statistics(text: Recorded, layer: int) -> dict[str, Tensor]:
    """What this file's lesson names, of one layer: each a number per query head [H, G]."""
    q, k = text.turned[layer]
    (H, G, N), middle = q.shape[:3], q.shape[2] // 2
    received = q.new_zeros(H, G, N, dtype=torch.float64)
    early, late = (torch.zeros(H, G, middle, dtype=torch.bool, device=q.device) for _ in range(2))
    low, enough = (q.new_zeros(H, G, dtype=torch.float64) for _ in range(2))
    for rows, probs in watch_prompt(q, k, N - SKIP, text.scale, watched_rows(N, H * G, N)):  # [H, G, C, K]
        at = torch.arange(rows.start, rows.stop, device=q.device)
        future = probs.shape[-1] - 1 - at  # such entries are 0: they count as low, and must not
        low += ((probs < 0.01 * probs.amax(-1, keepdim=True)).sum(-1) - future).sum(-1)
        needed = (probs.sort(-1, descending=True).values.cumsum(-1) < 0.95).sum(-1) + 1
        enough += (needed / (at + 1)).sum(-1, dtype=torch.float64)
        received[..., : probs.shape[-1]] += probs.sum(2, dtype=torch.float64)
        high = probs[..., :middle] > 1 / middle
        early[..., : high.shape[-1]] |= high[:, :, at < middle].any(2)
        late[..., : high.shape[-1]] |= high[:, :, at >= middle].any(2)
    mass = received / (N - SKIP)
    best = mass.sort(-1, descending=True).values.cumsum(-1)
    return {
        "sink_mass": mass[..., 0], "sink_mass_4": mass[..., :4].sum(-1), "sink_mass_last": probs[..., -1, 0].double(),
        **{f"coverage_{x}": best[..., -(-x * N // 100) - 1] for x in SHARES},
        "sparsity": low / sum(range(SKIP + 1, N + 1)), "k95": enough / (N - SKIP),
        "persistence": (early & late).sum(-1) / late.sum(-1).double(), "held": early.double().mean(-1),
        **concentration(text.layers[layer][0][:, :, SKIP:]),
    }  # fmt: skip


def concentration(q: Tensor) -> dict[str, Tensor]:
    """How much queries q [H, G, S, D], before RoPE, agree: |E[q]| / E|q| of a pair of dimensions."""
    shapes = sums(*q.shape[:2], q.shape[3])
    total = {name: q.new_zeros(s, dtype=torch.float64) for name, (s, _) in shapes.items()}
    add(total, q)
    mean, size = means(total)
    centre, top = lengths(mean), size.argmax(-1, keepdim=True)
    return {
        "concentration": (centre / size).gather(-1, top)[..., 0],
        "concentration_energy": centre.norm(dim=-1) / size.norm(dim=-1),
    }


def layer_row(layer: int, found: Mapping[str, Tensor]) -> dict:
    """The mean over heads, where it can be told; the deviation over heads of all is left to the JSON."""
    row: dict[str, object] = {"measure": "layer", "layer": layer}
    deviation = {}
    for name, x in found.items():
        told = x[x.isfinite()]  # persistence: a head may never have looked back
        row[name] = float(told.mean()) if len(told) else None
        deviation[name] = float(told.std(correction=0)) if len(told) else None
        if name == "sink_mass":
            row["sink_mass_std"] = deviation[name]
    return row | {"std": deviation}


class Replayed:
    """A recorded text, read again one token a step by the slots of a policy; to their engine it is the model."""

    def __init__(self, text: Recorded, policy: Policy):
        self.text, self.config, self.like = text, text.config, text.like
        self.engine = Engine(self, policy)
        self.lost = torch.zeros(text.config.n_layers, dtype=torch.float64)

    def losses(self, title: str = "") -> Tensor:
        """The share of full attention that is lost, mean over rows and heads: one number a layer [L]."""
        N = len(self.text.tokens)
        self.engine.reset(0, N)
        for i in range(N):
            if i % 16 == 0:
                progress(f"{title}: token {i} of {N}")
            self.at = i
            self.engine.decode(self.text.tokens[i : i + 1])
        return self.lost / (N - SKIP)

    def __call__(self, tokens: Tensor, attend: Attend) -> Tensor:
        i = self.at
        for layer, known in enumerate(self.text.layers):
            q, k, v = (x[..., i : i + 1, :] for x in known)
            attend(layer, q, k, v)
            if i >= SKIP:
                self.lost[layer] += self._lost(layer, i)
        return tokens

    def _lost(self, layer: int, i: int) -> Tensor:
        """The part of row i that went to tokens which are not live, or not read: mean over heads."""
        kv, (q, k) = self.engine.slots[layer], self.text.turned[layer]
        q = q[:, :, i : i + 1]
        policy = self.engine.policy
        chosen = policy.read(kv, q)
        pos = (kv.pos if chosen is None else kv.held(chosen, policy.page)).long()
        _, probs = next(watch_prompt(q, k[:, : i + 1], 1, self.text.scale, 1))  # [H, G, 1, i + 1]
        here = torch.zeros(len(pos), i + 2, dtype=torch.bool, device=pos.device)  # the last column takes the empty ones
        here.scatter_(1, pos.masked_fill(pos < 0, i + 1), True)
        return probs[:, :, 0].masked_fill(here[:, None, : i + 1], 0).sum(-1, dtype=torch.float64).mean()


def draw(path: str, rows: list[dict]) -> None:
    """Left what the layers do, right what the policies lose."""
    layers = [r for r in rows if r["measure"] == "layer"]
    with figure(path, 2) as (left, right):
        for name in ("sink_mass", "coverage_10", "sparsity", "persistence", "held", "concentration"):
            left.plot([r["layer"] for r in layers], [r[name] for r in layers], label=name)
        for r in rows:
            if "layers" in r:
                right.plot(r["layers"], label=called(r["policy"], r["budget"]))
        left.set(xlabel="layer", title="What the methods assume", ylim=(0, 1.02))
        right.set(xlabel="layer", title="Share of full attention lost")
        for axes in (left, right):
            axes.legend(fontsize="small")


def options(argv: list[str]) -> argparse.Namespace:
    """The command line. ValueError for what there is none of."""
    p = parser("attention", __doc__, "64,256")
    add_text(p, 1024)
    return parsed(p, argv, {"tokens": 256, "budgets": "64"})


@torch.no_grad()
def main(argv: list[str]) -> int:
    """Run the bench. Interrupted, it reports what it has."""
    with usage():
        args = options(argv)
    print(__doc__)
    torch.manual_seed(args.seed)
    model, tokenizer = load(args.model, args.dtype)
    tokens = first_tokens(args, model, tokenizer, least=2 * SKIP + 2)  # the first half must have a row that counts
    progress(f"reading {len(tokens)} tokens")
    text = Recorded(model, torch.tensor(tokens, device=model.like.device))

    def measure(title: str, policy: Policy) -> dict:
        replayed = Replayed(text, policy)
        lost = replayed.losses(title)
        return {"loss": float(lost.mean()), "layers": lost.tolist()} | kv_held(replayed.engine, 0, len(tokens))

    print(f"{args.tokens} tokens, rows from {SKIP} on count\n")
    with reported("attention", args, draw, text=args.text or SAMPLE, tokens=args.tokens) as rows:
        for layer in range(model.config.n_layers):
            progress(f"layer {layer + 1} of {model.config.n_layers}")
            rows.append(layer_row(layer, statistics(text, layer)))
        for row in measured(args, measure):
            rows.append({"measure": "loss"} | row)
    return 0
