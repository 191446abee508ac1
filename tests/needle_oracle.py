"""What each method finds in the needle prompts, computed another way: transformers and the papers' formulas in numpy.

`PYTHONPATH=. python tests/needle_oracle.py MODEL.gguf [--bench FILE]`: FILE holds what `python -m nanokv.bench needle` printed.

transformers reads the prompt (eager attention, every probability at hand). From its queries, keys and
probabilities each method's kept set is computed once, per layer and head. Then all methods and budgets answer as
one batch: the prompt's keys are there for everyone, and a mask says who has which. A simplification: the few tokens
of an answer evict no one. Only the prompts come from nanokv (and the tokenizer that cuts them).
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import eager_attention_forward

from nanokv.bench._haystack import prompts
from nanokv.tokenizer import load_tokenizer


@dataclass
class Seen:
    """What one layer saw of a prompt of T tokens. q [Hq, T, D] and k [H, T, D] after RoPE; probs [Hq, T, T]."""

    layer: int
    n_layers: int
    q: ndarray
    k: ndarray
    probs: ndarray
    freqs: ndarray  # RoPE, radians per position [D/2]

    @property
    def shape(self) -> tuple[int, int]:
        return self.k.shape[:2]

    def grouped(self, x: ndarray) -> ndarray:
        """[Hq, ...] -> [H, G, ...]."""
        return x.reshape(self.shape[0], -1, *x.shape[1:])

    @cached_property
    def received(self) -> ndarray:
        """Attention that every token got from all rows and all heads of its group [H, T]."""
        return self.grouped(self.probs.sum(1, dtype=np.float64)).sum(1)

    @cached_property
    def ignored(self) -> ndarray:
        """In how many of the last 400 rows a token got less than 1 / visible, over all heads of its group [H, T]."""
        T = self.shape[1]
        rows = np.arange(max(T - 400, 0), T)
        low = self.probs[:, rows] < 1 / (rows[:, None] + 1)
        low &= np.arange(T) <= rows[:, None]
        return self.grouped(low.sum(1)).sum(1)

    def votes(self, w: int, kernel: int = 7) -> ndarray:
        """Mean attention of the last w rows and the group to the prefix, pooled [H, T - w]."""
        votes = self.grouped(self.probs[:, -w:, :-w].mean(1)).mean(1)
        return pooled(votes, kernel)

    @cached_property
    def worth(self) -> ndarray:
        """R-KV: attention of the last 8 queries, less likeness to other keys [H, T - 8]."""
        (H, T), w = self.shape, 8
        logits = np.einsum("hgjd,hsd->hgjs", self.grouped(self.q[:, -w:]), self.k[:, :-w]).max(1) / math.sqrt(self.k.shape[-1])
        attended = pooled(softmax(logits).mean(1), 7)
        alike = []
        for k in self.k:  # one head at a time: T x T
            u = k / (np.linalg.norm(k, axis=-1, keepdims=True) + 1e-8)
            C = u @ u.T
            np.fill_diagonal(C, 0)
            newest = T - 1 - (C[:, ::-1] > 0.5).argmax(1)
            newest[~(C > 0.5).any(1)] = 0
            C[np.arange(T), newest] = 0
            alike.append(softmax(C.mean(0))[:-w])
        return 0.1 * attended - 0.9 * np.stack(alike)

    @cached_property
    def expected(self) -> ndarray:
        """TriAttention: the logits that queries 1, 2, 4 ... 2^16 positions after the prompt are expected to give [Hq, T]."""
        (H, T), F = self.shape, len(self.freqs)
        turn = np.exp(1j * np.arange(T)[:, None] * self.freqs)
        q = (self.q[..., :F] + 1j * self.q[..., F:]) / turn  # before RoPE
        centre, size = q.mean(1), np.abs(q).mean(1)  # [Hq, F]
        k = np.repeat(self.k[..., :F] + 1j * self.k[..., F:], len(centre) // H, 0)  # [Hq, T, F]
        norm = np.einsum("hf,htf->ht", size - np.abs(centre), np.abs(k))
        series = [np.einsum("hf,htf->ht", centre * np.exp(1j * (T + 2**i) * self.freqs), k.conj()).real for i in range(17)]
        return norm + np.mean(series, 0)


def softmax(x: ndarray) -> ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def pooled(x: ndarray, kernel: int) -> ndarray:
    """Maximum over kernel neighbours."""
    wide = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(kernel // 2, kernel // 2)], constant_values=-np.inf)
    return np.lib.stride_tricks.sliding_window_view(wide, kernel, -1).max(-1)


def best(score: ndarray, n: int | list[int], T: int) -> ndarray:
    """Kept [H, T]: of every head the n best of score [H, P] (of equals the older), and all tokens from P on."""
    kept = np.ones((len(score), T), bool)
    kept[:, : score.shape[1]] = False
    for h, m in enumerate([n] * len(score) if isinstance(n, int) else n):
        kept[h, np.argsort(-score[h], kind="stable")[:m]] = True
    return kept


# ---- what each method keeps of a prompt that is longer than its budget B: a mask [H, T] ----


def full(s: Seen, B: int) -> ndarray:
    return np.ones(s.shape, bool)


def window(s: Seen, B: int) -> ndarray:
    return np.broadcast_to(np.arange(s.shape[1]) >= s.shape[1] - (B - 1), s.shape)


def streaming_llm(s: Seen, B: int) -> ndarray:
    pos = np.arange(s.shape[1])
    return np.broadcast_to((pos < 4) | (pos >= s.shape[1] - (B - 1 - 4)), s.shape)


def h2o(s: Seen, B: int) -> ndarray:
    recent = (B - 1) // 2
    return best(s.received[:, :-recent], B - 1 - recent, s.shape[1])


def scissorhands(s: Seen, B: int) -> ndarray:
    return best(-s.ignored[:, :-10], B - B // 2 - 10, s.shape[1])


def snapkv(s: Seen, B: int, share: Callable[[ndarray, int], int | list[int]] = lambda score, b: b) -> ndarray:
    w = min(32, B // 2)
    votes = s.votes(w)
    return best(votes, share(votes, B - 1 - w), s.shape[1])


def pyramidkv(s: Seen, B: int) -> ndarray:
    def line(score: ndarray, b: int) -> int:
        narrow = Fraction(b, 20)
        wide = 2 * b - narrow
        if wide > score.shape[1]:
            wide, narrow = Fraction(score.shape[1]), 2 * b - Fraction(score.shape[1])
        ideal = [wide - (wide - narrow) * i / (s.n_layers - 1) for i in range(s.layer + 1)]
        return math.floor(sum(ideal) + Fraction(1, 2)) - math.floor(sum(ideal[:-1]) + Fraction(1, 2))

    return snapkv(s, B, line)


def adakv(s: Seen, B: int) -> ndarray:
    def by_need(score: ndarray, b: int) -> list[int]:
        H, P = score.shape
        deserved = np.bincount(np.argsort(-score.ravel(), kind="stable")[: H * b] // P, minlength=H)
        ideal = [Fraction(4, 5) * int(f) + Fraction(b, 5) for f in deserved]
        got = [math.floor(t) for t in ideal]
        for h in sorted(range(H), key=lambda h: (got[h] - ideal[h], -deserved[h], h))[: H * b - sum(got)]:
            got[h] += 1
        return got

    return snapkv(s, B, by_need)


def rkv(s: Seen, B: int) -> ndarray:
    return best(s.worth, B - min(128, B // 8) - 8, s.shape[1])


def triattention(s: Seen, B: int) -> ndarray:
    w = min(128, B // 8)
    raw = s.expected[:, :-w]
    z = (raw - raw.mean(1, keepdims=True)) / raw.std(1, keepdims=True)
    return best(s.grouped(z).max(1), B - w - w, s.shape[1])


METHODS = {f.__name__: f for f in (full, window, streaming_llm, scissorhands, h2o, snapkv, pyramidkv, adakv, rkv, triattention)}
METHODS["quest"] = full  # it forgets nothing: its pages are chosen when a query is there

# ---- the model ----

Cell = tuple[str, int]  # method, budget


class Oracle:
    """A transformers model whose attention is ours: exact over a prompt, and behind a mask per cell for the answers."""

    def __init__(self, gguf: Path):
        AttentionInterface.register("needle_oracle", self.attend)
        self.model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="needle_oracle"
        ).eval()
        self.freqs = self.model.model.rotary_emb.inv_freq
        self.cells: list[Cell] = []
        self.kept: list[ndarray] = []  # per layer [cells, H, T]

    @torch.no_grad()
    def read(self, tokens: list[int], cells: list[Cell]) -> Tensor:
        """Read a prompt and decide who keeps what -> logits of its last token [vocab]."""
        self.cells, self.T = cells, len(tokens)
        self.k, self.v, self.kept = [], [], []
        self.reading = True
        return self.model(torch.tensor([tokens]), use_cache=False, logits_to_keep=1).logits[0, -1]

    @torch.no_grad()
    def answers(self, logits: Tensor, n: int, stop: frozenset[int]) -> list[list[int]]:
        """Every cell's greedy answer, up to n tokens."""
        self.reading = False
        self.own_k = [torch.empty(len(self.cells), *k.shape[:1], 0, k.shape[-1]) for k in self.k]
        self.own_v = [k.clone() for k in self.own_k]
        tokens = logits.argmax().expand(len(self.cells), 1)
        ids = [tokens]
        for i in range(n - 1):
            at = torch.full_like(tokens, self.T + i)
            tokens = self.model(tokens, position_ids=at, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            ids.append(tokens)
        cut = [[t in stop for t in row].index(True) if stop & set(row) else n for row in torch.cat(ids, 1).tolist()]
        return [row[:m] for row, m in zip(torch.cat(ids, 1).tolist(), cut)]

    def attend(self, module, query, key, value, mask, scaling, **_):
        if not self.reading:
            return self.step(module.layer_idx, query, key, value, scaling), None
        T = query.shape[2]
        future = torch.full((1, 1, T, T), torch.finfo(torch.float32).min).triu(1)
        out, probs = eager_attention_forward(module, query, key, value, future, scaling)
        n_layers, arrays = self.model.config.num_hidden_layers, (x[0].numpy() for x in (query, key, probs))
        seen = Seen(module.layer_idx, n_layers, *arrays, self.freqs.double().numpy())
        self.kept.append(np.stack([METHODS[m](seen, B) if T > B else full(seen, B) for m, B in self.cells]))
        self.k.append(key[0])
        self.v.append(value[0])
        return out, None

    def step(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """One token of every cell: q [C, Hq, 1, D], k v [C, H, 1, D] -> [C, 1, Hq, D]."""
        self.own_k[layer] = own_k = torch.cat((self.own_k[layer], k), 2)
        self.own_v[layer] = own_v = torch.cat((self.own_v[layer], v), 2)
        C, H, n, D = own_k.shape
        K, V = self.k[layer], self.v[layer]
        q = q.view(C, H, -1, D)  # [C, H, G, D]
        logits = torch.cat((torch.einsum("chgd,htd->chgt", q, K), torch.einsum("chgd,chtd->chgt", q, own_k)), -1)
        can = torch.from_numpy(self.kept[layer])
        can = torch.cat((can, torch.ones(C, H, n, dtype=torch.bool)), -1)
        for c, (method, B) in enumerate(self.cells):
            if method == "streaming_llm" and self.T > B:  # the sinks stand so much nearer as tokens are missing between
                logits[c, :, :, :4] = torch.einsum("hgd,htd->hgt", self.turned(q[c], B - 1 - self.T), K[:, :4])
            if method == "quest" and layer >= 2:
                can[c] = self.pages(q[c], torch.cat((K, own_k[c]), 1), B)
        probs = (logits * scaling).masked_fill(~can[:, :, None], -torch.inf).softmax(-1)
        out = torch.einsum("chgt,htd->chgd", probs[..., : self.T], V) + torch.einsum("chgt,chtd->chgd", probs[..., self.T :], own_v)
        return out.reshape(C, 1, -1, D)

    def turned(self, x: Tensor, n: int) -> Tensor:
        """x as if its token stood n positions further on."""
        z = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones(()).double(), n * self.freqs.double())
        return torch.cat((z.real, z.imag), -1).float()

    def pages(self, q: Tensor, K: Tensor, B: int, size: int = 16) -> Tensor:
        """Quest: tokens [H, T] of the current page and of the best others, B / size pages in all. q [H, G, D], K [H, T, D]."""
        H, T = K.shape[:2]
        n = math.ceil(T / size)
        if n <= B // size:
            return torch.ones(H, T, dtype=torch.bool)
        boxes = torch.cat((K, K[:, -1:].expand(-1, n * size - T, -1)), 1).unflatten(1, (n, size))[:, None]  # [H, 1, n, size, D]
        q = q[:, :, None]  # [H, G, 1, D]
        bounds = torch.maximum(q * boxes.amin(3), q * boxes.amax(3)).sum((1, 3))  # [H, n]
        bounds[:, -1] = torch.inf
        best = bounds.argsort(dim=1, descending=True, stable=True)[:, : B // size]
        chosen = torch.zeros(H, n, dtype=torch.bool).scatter_(1, best, True)
        return chosen.repeat_interleave(size, 1)[:, :T]


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("gguf", type=Path)
    p.add_argument("--bench", type=Path, help="what the bench printed, to stand beside")
    p.add_argument("--methods", default=",".join(METHODS))
    p.add_argument("--budgets", default="64,128,256,512,1024")
    p.add_argument("--prompts", type=int, default=20)
    p.add_argument("--lengths", default="1000,2000")
    p.add_argument("--kind", default="prose")
    p.add_argument("--question", default="after")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    budgets, lengths = ([int(n) for n in x.split(",")] for x in (args.budgets, args.lengths))
    cells = [(m, B) for m in args.methods.split(",") for B in (budgets if m != "full" else budgets[:1])]
    tokenizer, oracle = load_tokenizer(args.gguf), Oracle(args.gguf)
    hits = dict.fromkeys(cells, "")
    for i, prompt in enumerate(prompts(tokenizer, args.prompts, lengths, args.kind, args.question, args.seed)):
        logits = oracle.read(prompt.tokens, cells)
        for cell, ids in zip(cells, oracle.answers(logits, prompt.max_new, tokenizer.eos_ids)):
            hits[cell] += str(int(prompt.found(tokenizer.decode(ids))))
        print(f"prompt {i + 1} of {args.prompts}", file=sys.stderr)
    ours = {}
    if args.bench:
        rows = json.loads(args.bench.read_text().splitlines()[-1])["rows"]
        ours = {(r["policy"], r["budget"] or budgets[0]): r for r in rows}
    worst = 0
    print(f"{'method':14}{'budget':>7}  oracle  nanokv")
    for (method, B), theirs in hits.items():
        row = ours.get((method, B), {})
        found = row.get("found")
        if found is not None:
            worst = max(worst, abs(found - theirs.count("1")))
        print(f"{method:14}{B:7}{theirs.count('1'):8}{'' if found is None else found:>8}  {theirs}  {row.get('hits', '')}")
    if ours:
        print(f"largest difference: {worst}")
    return int(worst > 2)


if __name__ == "__main__":
    sys.exit(main())
