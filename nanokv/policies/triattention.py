"""Keep the keys that future queries are expected to point at, judged without looking at any query.

The lesson: before RoPE a head's queries crowd around one centre, so what a query n positions on will make of a
stored key can be foretold: the centre, turned to where that query will be, times the key. Averaged over n = 1, 2,
4 ... 2^reach it still is one dot product per head and key (`query_stats.expected`). Queries that stray from the
centre may point anywhere: how far they do, times the key's length, is added.

Paper: 2026, https://arxiv.org/abs/2604.04921. beta = interval; offsets 1 .. 2^reach; t0 = index of the next token.

| paper | official code | here |
|---|---|---|
| z-score per query head, max over the group | population (HF) or N - 1 (vLLM) | population, over candidates only |
| mean over layers, one set per head | `per_head` | `scope` layer: each layer its own; model: the paper's |
| - | no window (HF), 128 (vLLM) | `window` and `interval` min(128, budget / 8) |
| calibrated offline | fails without a file | `stats` FILE; without: the prompt's own queries |
| mean over offsets | mean or max | `aggregate`; `trig`, `mlr`: the paper's ablations |

It asks no query of the prompt, so a needle that only the question asks for has no reason to stay.
Cost: 1.5 D per slot and query head whenever room is made; nothing else while decoding.
"""

from dataclasses import dataclass

from ..later import Tensor, torch
from ..policy import Scoring
from ..query_stats import add, expected, load, means, sums, z_scores
from ..rope import rotate
from ..slots import Shapes, Slots

BLOCK = 512  # queries turned back at a time

@dataclass(frozen=True)
class TriAttention(Scoring):
    window: int | None = None  # None: min(128, budget / 8), here and in interval
    interval: int | None = None
    stats: str | None = None
    scope: str = "layer"
    aggregate: str = "mean"
    reach: int = 16
    trig: bool = True
    mlr: bool = True
    prompt = property(lambda self: "queries" if self.stats is None else "")
    shared = property(lambda self: self.scope == "model")

    def __post_init__(self) -> None:
        self._whole(budget=1, reach=0)
        self._unless_set(window=self._eighth, interval=self._eighth)
        self._between(0, 31, "reach")  # 2^31: no position lies farther ahead
        self._one_of("scope", "layer", "model")
        self._one_of("aggregate", "mean", "max")
        super().__post_init__()
        if self.shared and (self.layers, self.heads) != ("uniform", "uniform"):
            raise ValueError("scope model needs the same tokens in every layer: leave layers and heads uniform")

    @property
    def note(self) -> str:
        return load(self.stats).note if self.stats is not None else "triattention: without stats=FILE it goes by the prompt's own queries"

    def state(self, H: int, G: int, N: int, D: int) -> Shapes:
        return sums(H, G, D)

    def begin(self, kv: Slots) -> None:
        if self.stats is not None:
            load(self.stats).into(kv.state, kv.layer, kv.freqs, kv.model)

    def observe(self, kv: Slots, q: Tensor, pos: Tensor, probs: Tensor | None) -> None:
        for rows, at in zip(q.split(BLOCK, 2), pos.split(BLOCK)):
            add(kv.state, rotate(rows.float(), -at, kv.freqs))  # RoPE is a group: this is q before it

    def score(self, kv: Slots) -> Tensor:
        mean, size = means(kv.state)
        raw = expected(kv.keys.float(), mean, size, kv.now, kv.freqs, self.reach, self.aggregate, self.trig, self.mlr)
        raw = kv.by_slot(raw[:, :, None])[:, :, 0]  # [H, G, N]
        return z_scores(raw, kv.live & (kv.pos >= self.sink) & (kv.pos < kv.now - self.window)).amax(1)

    def across(self, scores: list[Tensor]) -> list[Tensor]:
        return [torch.stack(scores).mean(0)] * len(scores) if self.shared else scores
