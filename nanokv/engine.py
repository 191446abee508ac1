"""Engine: text in, tokens out, and in between a policy deciding what is remembered.

Two ways in. `extend` reads any number of tokens, layer by layer: what a layer's slots hold and the
new tokens stand side by side in a scratch that lives for this layer only, the new queries attend
to it, the policy watches, and what is worth keeping moves into the slots. A prompt, a chunk and
the next turn of a chat are the same call. `decode` is the one-token path: make room, then write,
attend, observe in place; one static graph for every step.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from .attention import attend_slots, watch_slots
from .compiled import Compiled, by_rows
from .model import ROWS, Attend, Transformer
from .pages import Room
from .policy import Policy, victims
from .reading import Memory, Reading, settle
from .rope import angles, frequencies, turn
from .shape import DTYPES
from .slots import Slots

Sample = Callable[[Tensor], Tensor]  # logits [vocab] -> token [1]


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token [1]."""
    return logits.argmax(-1, keepdim=True)


@dataclass
class Stats:
    """What one generation cost. Seconds are wall-clock; the first new token belongs to prefill."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    finish_reason: str = "interrupted"  # "stop", "length"; what it says until a generation came to its end

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prompt_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        return (self.new_tokens - 1) / self.decode_s if self.decode_s else 0.0


class Engine(Memory):
    """A model, a policy, and the memory between them. One sequence at a time.

    `slots` is the memory, one `Slots` a layer; look, but let the policy do the writing.
    `chunk`: read texts this many tokens at a time, which bounds the scratch (None: in one piece).
    `compile`: decode through torch.compile, see compiled.py; on a CPU the model's matrices are then stored row by row.
    `kv_dtype`: of keys and values, by its name (auto: the model's).
    """

    def __init__(self, model: Transformer, policy: Policy, chunk: int | None = None, compile: bool = False, kv_dtype: str = "auto"):
        if chunk is not None and chunk < 1:
            raise ValueError(f"a chunk must hold at least 1 token, not {chunk}")
        c = model.config
        self.model, self.policy, self.chunk = model, policy, chunk
        if kv_dtype not in ("auto", *DTYPES):
            raise ValueError(f"kv_dtype must be auto, {', '.join(DTYPES)}, not {kv_dtype!r}")
        dtype = None if kv_dtype == "auto" else getattr(torch, kv_dtype)
        self.like = model.like.new_empty(0, dtype=dtype)  # slots live where the model lives, and in its dtype unless told otherwise
        freqs, factor = frequencies(c.rope, c.head_dim, c.max_context)
        self.freqs, self.scale = freqs.to(self.like.device), factor * c.head_dim**-0.5
        self.slots: list[Slots] = []
        self.pending: list[int] = []  # sampled, but not yet read: the last token of a generation
        self.stats = Stats()
        self._rows: list[int] = []
        self._torn = False  # was a step interrupted between its first layer and its last?
        self._compiled = Compiled(self.like.device) if compile else None
        if compile and self.like.device.type == "cpu":
            by_rows(model)

    @property
    def compile_s(self) -> float:
        """Seconds that compiling the decode step took so far."""
        return self._compiled.seconds if self._compiled else 0.0

    @property
    def threads(self) -> int:
        """Threads that a decode step runs on: all of torch's, unless the compiled step is faster on one."""
        return self._compiled.threads if self._compiled else torch.get_num_threads()

    @property
    def seen(self) -> int:
        """Tokens read since the last reset."""
        return int(self.slots[0].now) if self.slots else 0

    def reset(self, prompt_len: int, max_new: int | None = None) -> None:
        """Empty the memory and size it for a prompt and the tokens to come (None: no end in sight)."""
        c, p = self.model.config, self.policy
        rows = p.plan(c.n_layers, prompt_len, c.max_context - prompt_len if max_new is None else max_new)
        self.pending, self._torn = [], False
        if rows == self._rows:
            for kv in self.slots:
                kv.clear()
                p.begin(kv)
            return
        self.slots, self._rows, slots = [], [], []  # let the old memory go before the new is taken
        if self._compiled:
            self._compiled.release()
        H, G, D = c.n_kv_heads, c.n_heads // c.n_kv_heads, c.head_dim
        room = Room(2 * H * D * sum(rows) * self.like.itemsize, 2 * len(rows), self.like.device)
        for layer, n in enumerate(rows):
            width = p.width(n, H)
            kv = Slots.empty(n, H, D, self.like, width, p.marks(G), p.state(H, G, width, D), layer, p.heads == "adaptive", room)
            kv.model, kv.freqs, kv.scale = c.name, self.freqs, self.scale
            p.begin(kv)
            slots.append(kv)
        self.slots, self._rows = slots, rows
        if self._compiled:  # now, while the memory is empty: so the first step that counts is as fast as the next
            # who evicts seldom need not do it fast, and who chooses what to read may forget nothing at all
            often = p.budget is not None and p.interval == 1 and type(p).read is Policy.read
            with torch.no_grad():
                self._compiled.prepare(slots, self._forward, self._evict if often else None)
            self.reset(prompt_len, max_new)

    # ---- reading a text ----

    @torch.no_grad()
    def extend(self, tokens: Tensor | Sequence[int]) -> Tensor:
        """Read tokens [S], S >= 1, after whatever was read before -> logits of the last [vocab]."""
        tokens = self._checked(tokens)
        if not self.slots:
            self.reset(len(tokens))
        for piece in tokens.tensor_split(-(-len(tokens) // (self.chunk or len(tokens)))):  # all of about one size
            with self.undivided():
                if self.policy.shared and len(piece) > self.slots[0].room:
                    logits = self._read_in_steps(piece)
                else:
                    logits = self.model(piece, Reading([self], len(piece), piece.device))
        return logits

    def _checked(self, tokens: Tensor | Sequence[int]) -> Tensor:
        """Tokens as a tensor [S], before anything happens to the memory. ValueError for what is no text of this model."""
        tokens, size = torch.as_tensor(tokens, dtype=torch.long, device=self.like.device), self.model.config.vocab_size
        if tokens.numel() == 0:
            raise ValueError("there is no token to read")
        if tokens.dim() != 1:
            raise ValueError(f"tokens must be one sequence of ids, not a tensor of shape {list(tokens.shape)}")
        low, high = (int(x) for x in tokens.aminmax())
        if low < 0 or high >= size:
            raise ValueError(f"the model's tokens are 0 to {size - 1}: there is no token {low if low < 0 else high}")
        return tokens

    @contextmanager
    def undivided(self) -> Iterator[None]:
        """What happens in here happens to all layers; if it is interrupted, only reset() helps. ValueError says so."""
        if self._torn:
            raise ValueError("the last step was interrupted halfway through the layers: start afresh with reset()")
        self._torn = True
        try:
            yield
        except ValueError:  # refused before the first layer changed, as when a full cache is used up
            self._torn = False
            raise
        self._torn = False

    def _read_in_steps(self, tokens: Tensor) -> Tensor:
        """Read by the decode path, as many tokens at a time as there is room for: all layers evict together."""
        while len(tokens):
            n = min(self.slots[0].room or self.policy.interval, ROWS)
            self._make_room(min(n, len(tokens)))
            logits = self._forward(tokens[:n], reading=True)
            self._took(len(tokens[:n]))
            tokens = tokens[n:]
        return logits

    # ---- decode ----

    @torch.no_grad()
    def decode(self, tokens: Tensor | Sequence[int]) -> Tensor:
        """Read the next token [1] in place -> logits [vocab]. (Up to `interval` tokens [S] may take this path.)"""
        tokens = torch.as_tensor(tokens, dtype=torch.long, device=self.like.device)
        if not self.slots or not 1 <= len(tokens) <= self.policy.interval:
            raise ValueError(f"decode takes 1 to {self.policy.interval} tokens (the interval), after a text was read by extend()")
        with self.stepping(len(tokens)):
            return self._step(tokens)

    @contextmanager
    def stepping(self, n: int) -> Iterator[None]:
        """A step of n tokens through all layers happens in here: room is made before it, and counted after."""
        with self.undivided():
            self._make_room(n)
            yield
            self._took(n)

    def _took(self, n: int) -> None:
        for kv in self.slots:
            kv.room -= n

    def _make_room(self, n: int) -> None:
        """Before the layers run: where the rows are used up, the least worthy go."""
        policy = self.policy
        if policy.heads == "adaptive":  # the first overflow moves the heads' borders, through the scratch
            for kv in self.slots:
                if kv.room < n and not kv.allotted:
                    settle(policy, kv.beside(0), kv, coming=n)
        tight = [kv for kv in self.slots if kv.room < n]
        if not tight:
            return
        assert all(kv.room == 0 for kv in tight), "tokens must come in steps that divide the interval"
        if self._compiled and self._compiled.evicts and len(tight) == len(self.slots):
            self._compiled.evict()
            for kv in tight:
                kv.room = policy.interval
        else:
            self._evict(tight)

    def _evict(self, tight: Sequence[Slots] = ()) -> None:
        """The least worthy tokens of these layers (by default of all) go; room is made for `interval` others."""
        tight = tight or self.slots
        for kv, gone in zip(tight, victims(self.policy, tight, self.policy.interval)):
            kv.evict(gone)
            self.policy.settle(kv)

    def _step(self, tokens: Tensor) -> Tensor:
        # a method, not an attribute: an engine that refers to itself would keep its memory until Python looks for cycles
        return (self._compiled if self._compiled and len(tokens) == 1 else self._forward)(tokens)

    def _forward(self, tokens: Tensor, reading: bool = False) -> Tensor:
        """The step itself: static shapes, in-place writes, nothing that asks the host."""
        return self.model(tokens, self.answering(len(tokens), reading))

    def answering(self, n: int, reading: bool = False) -> Attend:
        """What answers `attend` while the next n tokens take a step."""
        policy = self.policy
        pos = self.slots[0].now + torch.arange(n, device=self.like.device)
        cos, sin = angles(pos, self.freqs)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kv = self.slots[layer]
            q = turn(q, cos, sin).to(kv.k.dtype)
            kv.write(turn(k, cos, sin), v)
            out, probs = self.attend(kv, q, pos)
            if policy.step or reading and policy.prompt == "queries":
                policy.observe(kv, q, pos, probs)
            return out.to(v.dtype)

        return attend

    def attend(self, kv: Slots, q: Tensor, pos: Tensor) -> tuple[Tensor, Tensor | None]:
        """q [H, G, S, D] at pos [S] against what the policy lets them read: (answer [H, G, S, D], probabilities if wanted)."""
        chosen = self.policy.read(kv, q)
        if chosen is None:
            if self.policy.step != "probs":
                return attend_slots(q, kv.keys, kv.values, kv.mask(pos), self.scale), None
            out, probs = watch_slots(q, kv.keys, kv.values, kv.mask(pos), self.scale)
            return out, kv.by_slot(probs)
        keys, values, live = kv.gather(chosen, self.policy.page)
        return attend_slots(q, keys, values, live[:, None], self.scale), None

    # ---- generation ----

    def generate(self, tokens: Sequence[int], max_new: int = 256, sample: Sample = greedy,
                 stop: Collection[int] = (), fresh: bool = True) -> Iterator[int]:
        """Read a prompt, then yield up to max_new token ids, ending after one of `stop`.

        fresh: forget what was read before; else go on from it (the next turn). `stats` is filled as it goes.
        Raises ValueError for what cannot be; RuntimeError when it is asked for more after a later one has begun.
        """
        if max_new < 1 or max_new % 1:
            raise ValueError(f"at least 1 new token must be asked for, and a whole number of them, not {max_new}")
        if not hasattr(stop, "__contains__"):
            raise ValueError(f"stop must be a collection of token ids, not {stop!r}")
        tokens = self._checked(tokens).tolist()
        self.stats = stats = Stats(prompt_tokens=len(tokens))
        if fresh or not self.slots:
            self.reset(len(tokens), max_new if fresh else None)
        start = perf_counter()  # taking memory, and compiling for it, is no part of reading
        logits = self.extend([*self.pending, *tokens])
        while True:
            token = sample(logits)
            self.pending = [int(token)]
            stats.new_tokens += 1
            seconds = perf_counter() - start
            if stats.new_tokens == 1:
                stats.prefill_s = seconds
            else:
                stats.decode_s = seconds - stats.prefill_s
            ended = self.pending[0] in stop
            if ended or stats.new_tokens == max_new:
                stats.finish_reason = "stop" if ended else "length"
                yield self.pending[0]
                return
            yield self.pending[0]
            if self.stats is not stats:
                raise RuntimeError("this generation is over: another one has begun on its engine, and there is one memory")
            logits = self.decode(token)
            self.pending = []
