"""Policy: which tokens keep their slots. All that a contributor must know is in this file.

A policy is a frozen dataclass of hyper-parameters ("dials"); its fields are exactly the dials a
user may set. It holds no state: what it learns about a token it pins to the slot as a mark
[H, N], what is not per slot it declares, and both are allocated, counted, moved and reset for it.

One `score` serves prefill and decode, because a prompt is just a bigger `Slots` that lives for
one layer. Protection, ties, eviction and moving K and V are not hooks: a policy cannot get
them wrong. Of equal scores the newer token loses, whatever slot it stands in.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from reprlib import repr as brief
from typing import ClassVar, get_args

from .budget import adaptive, pyramid
from .later import Tensor, torch
from .slots import Shapes, Slots

ALL = 1 << 60
WIDEST = 4  # no head gets more than so many times the mean: the bookkeeping [H, N] is as wide as the widest may be
LARGEST = 1 << 31  # slots and positions are int32
FLOAT = ((), "float32")  # a mark that is one number per slot

REGISTRY: dict[str, type["Policy"]] = {}  # the name on the command line is the file's name


@dataclass(frozen=True)
class Policy:
    """The hooks, with their answers for a policy that needs nothing.

    H KV heads, G query heads per KV head, S queries, N slots, D head_dim. `kv` is one layer.
    """

    # Rules that every policy has; those that are a dial of it are declared again as fields.
    budget: ClassVar[int | None] = None  # slots per head, averaged over the model; hard, the token being decoded included
    sink: ClassVar[int] = 0  # the first tokens are never evicted
    window: ClassVar[int] = 0  # nor are the last ones
    interval: ClassVar[int] = 1  # how many slots are freed at a time
    heads: ClassVar[str] = "uniform"  # "adaptive": the heads of a layer share its rows by need

    page: ClassVar[int] = 1  # read() names runs of so many neighbouring slots: run 0 begins at slot 0, run 1 at slot `page`

    # What observe() is shown: "" nothing, "queries" q alone, "probs" q and the attention it paid. You pay
    # only for what you declare.
    prompt: ClassVar[str] = ""  # of the last `watch` queries of a text
    step: ClassVar[str] = ""  # of each decode step
    shared: ClassVar[bool] = False  # are all layers to hold the same tokens? then texts are read by the decode path

    def __init_subclass__(cls, **kw) -> None:
        super().__init_subclass__(**kw)
        package, _, name = cls.__module__.rpartition(".")
        if package.endswith("policies"):
            REGISTRY[name] = cls

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            if f.type is bool:
                self._one_of(f.name, True, False)
        if type(self).budget is None:
            return
        self._whole(budget=1, sink=0, window=0, interval=1)
        if self.sink + self.window + self.interval > self.budget:
            raise ValueError(
                f"a budget of {self.budget} slots cannot hold sink {self.sink} + window {self.window}"
                f" + interval {self.interval} = {self.sink + self.window + self.interval}"
            )

    def _whole(self, **least: int) -> None:
        """Check that these dials are whole numbers of at least so much."""
        for name, n in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < n:
                raise ValueError(f"{name} must be a whole number of at least {n}, not {brief(value)}")
            if value >= LARGEST:
                raise ValueError(f"{name} must be below 2^31, not {brief(value)}")

    def _between(self, least: float, most: float, *names: str) -> None:
        """Check that these dials are numbers in this range."""
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not least <= value <= most:
                raise ValueError(f"{name} must be a number from {least} to {most}, not {brief(value)}")

    def _odd(self, name: str) -> None:
        """Check that this dial is a whole number with a middle."""
        self._whole(**{name: 1})
        if getattr(self, name) % 2 == 0:
            raise ValueError(f"{name} must be odd, not {getattr(self, name)}")

    def _one_of(self, name: str, *known: object) -> None:
        """Check that this dial is one of these values."""
        if getattr(self, name) not in known:
            raise ValueError(f"{name} must be {' or '.join(map(str, known))}, not {brief(getattr(self, name))}")

    def _unless_set(self, **values: int) -> None:
        """Turn dials that were left out (None), once the ones they follow are known."""
        for name, value in values.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @property
    def _eighth(self) -> int:
        """Of the budget, up to 128: what most papers' buffers come to."""
        return max(min(128, self.budget // 8), 1)

    @property
    def name(self) -> str:
        return type(self).__module__.rpartition(".")[2]

    @property
    def note(self) -> str:
        """What a user should be told once before it runs, or nothing."""
        return ""

    @property
    def watch(self) -> int:
        """How many of the last queries of a text observe() is shown. Up to 128 come in one call."""
        return ALL

    @property
    def recent(self) -> int:
        """How many of the last tokens are never evicted."""
        return self.window

    def marks(self, G: int) -> Shapes:
        """Numbers pinned to slots, by name: shape behind [H, N], and the dtype's name. A new token's are 0."""
        return {}

    def state(self, H: int, G: int, N: int, D: int) -> Shapes:
        """Other tensors of a layer, by name: shape, and the dtype's name or None for the model's. They start at 0."""
        return {}

    def begin(self, kv: Slots) -> None:
        """The memory was emptied: prepare `kv.state`."""

    def plan(self, n_layers: int, prompt_len: int, max_new: int) -> list[int]:
        """Rows to allocate per head, layer by layer."""
        return [self.budget] * n_layers

    def reads(self, layer: int, rows: int, tokens: int) -> int:
        """Keys and values per head that a decode step of this layer reads, `tokens` seen: for the plan."""
        return min(rows, tokens)

    def working(self, H: int, G: int, T: int, D: int, watched: int) -> int:
        """Bytes that observe() and score() take for a text of T tokens, `watched` rows at a time: for the plan."""
        return 0

    def width(self, rows: int, H: int) -> int:
        """The widest share that one of H heads may get of a layer with `rows` rows per head."""
        return rows

    def allot(self, score: Tensor, rows: int) -> list[int]:
        """Share a layer's H * rows slots out, given what is there, `score [H, T]` (a protected token is +inf)."""
        return [rows] * score.shape[0]

    def observe(self, kv: Slots, q: Tensor, pos: Tensor, probs: Tensor | None) -> None:
        """Evidence: q [H, G, S, D] after RoPE, at positions pos [S], gave the first K slots probs [H, G, S, K]."""

    def score(self, kv: Slots) -> Tensor:
        """The worth of every slot [H, N], finite; the lowest goes first. Must not change `kv`."""
        raise NotImplementedError

    def across(self, scores: Sequence[Tensor]) -> Sequence[Tensor]:
        """For methods that look over layers while room is made: the layers' scores, mixed."""
        return scores

    def settle(self, kv: Slots) -> None:
        """Slots were just filled, or some were just freed: adjust what depends on who is there."""

    def read(self, kv: Slots, q: Tensor) -> Tensor | None:
        """Runs [H, n] of `page` neighbouring slots that queries q [H, G, S, D] may attend to; None: all that are live."""
        return None


@dataclass(frozen=True)
class Scoring(Policy):
    """A policy that ranks tokens, so its rows can be split by need over layers and over heads."""

    budget: int = 1024
    sink: int = 0
    window: int = 0
    interval: int = 1
    layers: str = "uniform"  # or "pyramid": more rows for the lower layers
    heads: str = "uniform"  # or "adaptive": more rows for heads that look at many tokens
    beta: float = 20.0  # the pyramid's top layer gets 1/beta of the mean
    floor_ratio: float = 0.2  # the part of a head's share that does not depend on need

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("layers", "uniform", "pyramid")
        self._one_of("heads", "uniform", "adaptive")
        self._between(1, math.inf, "beta")
        self._between(0, 1, "floor_ratio")

    def plan(self, n_layers: int, prompt_len: int, max_new: int) -> list[int]:
        tokens, kept = prompt_len + max_new, self.window + self.interval
        if self.layers == "uniform" or tokens <= self.budget:  # if all of it fits, no layer needs more
            return [self.budget] * n_layers
        shares = pyramid(self.budget - kept, n_layers, tokens + 1 - kept, self.beta, self.sink)
        return [kept + n for n in shares]

    def width(self, rows: int, H: int) -> int:
        least = self.sink + self.recent + self.interval
        return rows if self.heads == "uniform" else min(H * rows - (H - 1) * least, WIDEST * rows)

    def allot(self, score: Tensor, rows: int) -> list[int]:
        if self.heads == "uniform":
            return [rows] * score.shape[0]
        protected = score.isposinf()  # the same tokens for every head
        kept = int(protected[0].sum()) + self.interval
        most = self.width(rows, len(score)) - kept
        return [kept + n for n in adaptive(score[:, ~protected[0]], rows - kept, self.floor_ratio, most)]


def make(name: str, **dials: object) -> Policy:
    """A policy by its name on the command line; text values are read as their dial's type. ValueError if it has no such dial."""
    if name not in REGISTRY:
        raise ValueError(f"no policy is called {name!r}; there are {', '.join(sorted(REGISTRY))}")
    cls = REGISTRY[name]
    known = {f.name: f for f in dataclasses.fields(cls)}
    for dial in dials:
        if dial not in known:
            has = f"its dials are {', '.join(known)}" if known else "it has none"
            raise ValueError(f"{name} has no dial {dial!r}; {has}")
    return cls(**{d: _read(name, d, known[d].type, v) for d, v in dials.items()})


def _read(policy: str, dial: str, kind: type, value: object) -> object:
    kinds = [k for k in get_args(kind) or (kind,) if k is not type(None)]
    if not isinstance(value, str) or str in kinds:
        return value
    try:
        if bool in kinds:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[value.lower()]
        return kinds[0](value)
    except (ValueError, KeyError):
        raise ValueError(f"{policy}'s dial {dial} takes {kinds[0].__name__}, not {brief(value)}") from None


def worth(policy: Policy, kv: Slots, score: Tensor) -> Tensor:
    """Scores [H, N] with what may never go at +inf: sinks, the window, and slots that hold nobody."""
    keep = (kv.pos < policy.sink) | (kv.pos >= kv.now - policy.recent)  # EMPTY lies before every sink
    exact = score.float() if score.is_floating_point() else score.double()  # a position may pass 2^24
    return exact.masked_fill(keep, torch.inf)


def lowest(worth: Tensor, pos: Tensor, n: int) -> Tensor:
    """The n least worthy slots of every head [H, n]; of equals the newest."""
    if n == 1:
        least = worth == worth.amin(1, keepdim=True)
        return torch.where(least, pos, -1).argmax(1, keepdim=True)
    newest = pos.argsort(1, descending=True)
    return newest.gather(1, worth.gather(1, newest).argsort(dim=1, stable=True)[:, :n])


def victims(policy: Policy, layers: Sequence[Slots], n: int) -> list[Tensor]:
    """Who goes, to make room for n tokens: [H, n] for each of these layers."""
    scores = policy.across([policy.score(kv) for kv in layers])
    return [lowest(worth(policy, kv, score), kv.pos, n) for kv, score in zip(layers, scores)]


def select(policy: Policy, text: Slots, kv: Slots, coming: int = 0) -> Tensor:
    """Which tokens of `text` (scratch: all of them live, in time order) get a slot in `kv`.

    Everything, if it fits beside the `coming` tokens; else the best rows - interval of every head,
    so that the next interval has room. Returns slots of `text` in time order [H, M], -1 where a
    head keeps fewer. The first overflow divides the layer's rows among its heads.
    """
    slot = torch.arange(text.width, device=text.pos.device).expand_as(text.pos)
    if all(n + coming <= cap for n, cap in zip(text.shares, kv.shares)):
        return slot.masked_fill(~text.live, -1)
    score = worth(policy, text, policy.score(text)).masked_fill(~text.live, -torch.inf)
    if not kv.allotted:
        kv.share(policy.allot(score, sum(kv.shares) // len(kv.shares)))
        kv.allotted = True
    keep = kv.caps[:, None] - policy.interval  # [H, 1]
    oldest = text.pos.masked_fill(~text.live, torch.iinfo(torch.int32).max).argsort(1)
    ranked = score.gather(1, oldest).argsort(dim=1, descending=True, stable=True)
    best = oldest.gather(1, ranked)[:, : int(keep.max())]
    best = best.masked_fill(torch.arange(best.shape[1], device=best.device) >= keep, text.width).sort(1).values
    return best.masked_fill(best == text.width, -1)
