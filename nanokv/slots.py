"""Slots: one layer's KV memory, a fixed number of rows that policies overwrite.

A slot's index means nothing; its `pos` says which token lives there. A key carries its rotation
with it and softmax ignores order, so evicting is bookkeeping: mark a slot free, write the next
token there. No K or V ever moves while decoding.

K and V live in one flat pool [R, D]. Head h owns the rows base[h] .. base[h] + caps[h]: R is the
sum of the shares, so heads may own different shares and nothing is padded. The bookkeeping
(`pos`, `free`, marks) is [H, N]. With equal shares N is the share and the pool is an [H, N, D]
view; where shares may differ, N is the widest that a head may get, and a column that a head does
not own stays EMPTY for ever. N never changes, so neither does the graph that decodes.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from .later import Tensor, torch

if TYPE_CHECKING:
    from .pages import Room

EMPTY = -1

Shapes = Mapping[str, tuple[tuple[int, ...], str | None]]  # name -> shape, dtype by name (None: the model's)


class Slots:
    """H heads, R pool rows, N bookkeeping columns, D head_dim.

    k, v    [R, D]      the pool, allocated once
    base    [H]         first pool row of each head; caps [H]: rows each head owns
    pos     [H, N]      int32: the token that lives here, or EMPTY
    free    [H, N]      int32: slots to be written next, in order; `cursor` [1]: how many are used up
    marks   [H, N, ...] numbers that a policy pins to its slots; they live and die with the slot
    state               a policy's tensors that are not per slot
    now     [1]         tokens seen so far: a tensor, so that one graph serves every step
    room                writes left before someone must go: a Python number, the same for every head
    """

    def __init__(self, shares: Sequence[int], k: Tensor, v: Tensor, width: int, marks: Shapes, layer: int = 0, flat: bool = False):
        H, R, device = len(shares), k.shape[0], k.device
        self.k, self.v, self.layer, self.width = k, v, layer, width
        self.flat = flat or H * width != R  # may shares differ? then attention reads the pool through a mask
        self.own = None
        if flat:  # decoding needs to know; a scratch that is ragged only as its slots were does not
            self.own = torch.zeros((H, R), dtype=torch.bool, device=device)  # which head's row is it
            self.entry = torch.zeros(R, dtype=torch.int32, device=device)  # its place in [H * N]
        self.pos = torch.full((H, width), EMPTY, dtype=torch.int32, device=device)
        self.free = torch.zeros((H, width), dtype=torch.int32, device=device)
        self.marks = {n: torch.zeros((H, width, *s), dtype=getattr(torch, t), device=device) for n, (s, t) in marks.items()}
        self.state: dict[str, Tensor] = {}
        self.base = torch.zeros(H, dtype=torch.long, device=device)
        self.caps = torch.zeros(H, dtype=torch.long, device=device)
        self.offset = torch.arange(H, device=device)[:, None] * width  # first bookkeeping entry of each head [H, 1]
        self.cursor = torch.zeros(1, dtype=torch.long, device=device)
        self.now = torch.zeros(1, dtype=torch.long, device=device)
        self.model = ""  # whose memory this is, by name
        self.freqs: Tensor | None = None  # RoPE frequencies [D/2], for policies that turn keys
        self.scale = k.shape[-1] ** -0.5  # attention's logit scale
        self.share(shares)
        self._forget()

    @classmethod
    def empty(cls, rows: int, H: int, D: int, like: Tensor, width: int = 0, marks: Shapes | None = None,
              state: Shapes | None = None, layer: int = 0, flat: bool = False, room: "Room | None" = None) -> "Slots":
        """Memory for `rows` tokens per head, on `like`'s device and in its dtype. flat: shares may come to differ. room: where the pools are to be."""
        shape = H * rows, D
        k, v = ((room.empty(shape, like.dtype) if room else like.new_empty(shape)).zero_() for _ in range(2))
        kv = cls([rows] * H, k, v, max(width, rows), marks or {}, layer, flat or width > rows)
        kv.state = {n: torch.zeros(s, dtype=getattr(torch, t) if t else like.dtype, device=like.device) for n, (s, t) in (state or {}).items()}
        return kv

    def clear(self) -> None:
        """Forget everything; equal shares again."""
        H = len(self.shares)
        self.share([sum(self.shares) // H] * H)
        self.k.zero_()  # an overflow in what stood here must not reach anyone: 0 x inf is not 0
        self.v.zero_()
        for tensor in (*self.marks.values(), *self.state.values()):
            tensor.zero_()
        self._forget()

    def _forget(self) -> None:
        self.pos.fill_(EMPTY)
        self.free.copy_(torch.arange(self.width, dtype=torch.int32, device=self.k.device))
        self.cursor.zero_()
        self.now.zero_()
        self.room, self.allotted = min(self.shares), False

    def share(self, shares: Sequence[int]) -> None:
        """Divide the pool's rows among the heads anew. Only for slots about to be filled."""
        assert sum(shares) == self.k.shape[0] and max(shares) <= self.width, (shares, self.k.shape, self.width)
        self.shares = list(shares)
        self.caps.copy_(torch.tensor(self.shares))
        self.base.copy_(self.caps.cumsum(0) - self.caps)
        if self.own is not None:
            H, device = len(self.shares), self.k.device
            owner = torch.repeat_interleave(torch.arange(H, device=device), self.caps)  # [R]
            column = torch.arange(self.k.shape[0], device=device) - self.base[owner]
            self.own.copy_(owner == torch.arange(H, device=device)[:, None])
            self.entry.copy_(owner * self.width + column)

    def tensors(self) -> list[Tensor]:
        """All of this memory."""
        own = [] if self.own is None else [self.own, self.entry]
        places = [self.base, self.caps, self.offset, self.cursor, self.now]
        return [self.k, self.v, self.pos, self.free, *places, *own, *self.marks.values(), *self.state.values()]

    @property
    def live(self) -> Tensor:
        """Which slots hold a token [H, N]."""
        return self.pos >= 0

    @property
    def bytes(self) -> int:
        """What the K and V pools take, in bytes, counted from their storage."""
        return self.k.untyped_storage().nbytes() + self.v.untyped_storage().nbytes()

    def heads(self, unread: int = 0) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(heads, k [h, n, D], v [h, n, D]) in runs of equal shares, one run or one per head, less the last `unread` rows."""
        if not self.flat:
            yield slice(0, len(self.shares)), *(x[:, : self.width - unread] for x in (self.keys, self.values))
            return
        for h, (k, v) in enumerate(zip(self.k.split(self.shares), self.v.split(self.shares))):
            yield slice(h, h + 1), k[None, : len(k) - unread], v[None, : len(v) - unread]

    @property
    def keys(self) -> Tensor:
        """K as attention reads it: [H, N, D], or the pool [R, D] where shares may differ."""
        return self.k if self.flat else self.k.view(len(self.shares), self.width, -1)

    @property
    def values(self) -> Tensor:
        """V as attention reads it: [H, N, D], or the pool [R, D] where shares may differ."""
        return self.v if self.flat else self.v.view(len(self.shares), self.width, -1)

    @property
    def pool_rows(self) -> Tensor:
        """The pool row of every slot [H, N]; for a column that a head does not own, some row (its slot holds nobody)."""
        column = torch.arange(self.width, device=self.k.device)
        return (self.base[:, None] + column).clamp(max=self.k.shape[0] - 1)

    def rows(self, slots: Tensor) -> Tensor:
        """Pool rows of slots [H, K] -> [H, K]."""
        return self.base[:, None] + slots

    def held(self, runs: Tensor, run: int) -> Tensor:
        """The tokens in runs [H, n] of `run` neighbouring slots each, or EMPTY: [H, n * run]."""
        return self.pos.view(-1, run).index_select(0, (runs + self.offset // run).view(-1)).view(len(runs), -1)

    def gather(self, runs: Tensor, run: int) -> tuple[Tensor, Tensor, Tensor]:
        """K and V [H, n * run, D] of runs [H, n] of `run` neighbouring slots each, and of no other; which of them live [H, n * run].

        Only where all shares are equal: then a slot's entry is its pool row.
        """
        H, at = len(runs), (runs + self.offset // run).view(-1)
        k, v, pos = (x.view(len(x) // run, -1).index_select(0, at) for x in (self.k, self.v, self.pos.view(-1)))
        return k.view(H, -1, self.k.shape[1]), v.view(H, -1, self.v.shape[1]), (pos >= 0).view(H, -1)

    # ---- decode: in place, no allocation in proportion to the slots, no host sync ----

    def write(self, k: Tensor, v: Tensor) -> Tensor:
        """Put S new tokens, k v [H, S, D], into the next free slots of every head -> slots [H, S]."""
        H, S, D = k.shape
        at = self.cursor if S == 1 else self.cursor + torch.arange(S, device=k.device)
        slots = self.free.index_select(1, at).long()
        rows = self.rows(slots).view(-1)
        self.k.index_copy_(0, rows, k.reshape(-1, D).to(self.k.dtype))
        self.v.index_copy_(0, rows, v.reshape(-1, D).to(self.v.dtype))
        entry = (slots + self.offset).view(-1)
        time = self.now if S == 1 else self.now + torch.arange(S, device=k.device)
        self.pos.view(-1).index_copy_(0, entry, time.int().expand(H, S).reshape(-1))
        for mark in self.marks.values():
            mark.flatten(0, 1).index_fill_(0, entry, 0)
        self.cursor.add_(S)  # += would also bind the name anew, and a compiled step would do that for every layer
        self.now.add_(S)
        return slots

    def mask(self, pos: Tensor) -> Tensor:
        """Which slots queries at positions `pos [S]` may read: [H, S, N], or [H, S, R] over the pool."""
        seen = self.pos[:, None] >= 0
        if pos.shape[0] > 1:  # of several new tokens the first must not see the last
            seen = seen & (self.pos[:, None] <= pos[:, None])
        if self.flat:
            seen = seen.transpose(0, 1).flatten(1)[:, self.entry] & self.own[:, None]
        return seen

    def by_slot(self, probs: Tensor) -> Tensor:
        """Probabilities over what `keys` shows, [H, G, S, N or R], as [H, G, S, N]."""
        if not self.flat:
            return probs
        H, G, S, _ = probs.shape
        foreign = torch.arange(self.width, device=probs.device) >= self.caps[:, None]
        row = self.pool_rows[:, None, None].expand(H, G, S, -1)
        return probs.gather(3, row).masked_fill(foreign[:, None, None], 0)

    def evict(self, victims: Tensor) -> None:
        """Free the slots `victims` [H, n]; the next n writes land there."""
        n = victims.shape[1]
        self.pos.scatter_(1, victims, EMPTY)
        self.free[:, :n] = victims
        self.cursor.zero_()
        self.room = n

    # ---- reading a text: what stays is moved in, once per layer and text ----

    def beside(self, S: int, spare: list[Tensor] | None = None) -> "Slots":
        """Scratch that lives for one layer: what the slots hold, in time order, and room for S new tokens behind it.

        spare: the K and V of another layer's scratch, which nobody needs any more; they are taken, or let go if they do not fit.
        """
        D = self.k.shape[-1]
        held = [cap - self.room for cap in self.shares]
        shares = [n + S for n in held]
        if spare and len(spare[0]) != sum(shares):
            spare.clear()
        k, v = spare or (self.k.new_empty(sum(shares), D) for _ in range(2))
        text = Slots(shares, k, v, max(shares), self._mark_shapes(), self.layer)
        text.state, text.freqs, text.scale, text.room = self.state, self.freqs, self.scale, S
        text.now.copy_(self.now)
        if any(held):
            time = self.pos.masked_fill(~self.live, torch.iinfo(torch.int32).max).argsort(1)  # the empty ones last
            for h, (n, a) in enumerate(zip(held, text.base.tolist())):
                old = time[h, :n]
                for scratch, pool in ((text.k, self.k), (text.v, self.v)):
                    torch.index_select(pool, 0, self.base[h] + old, out=scratch[a : a + n])
                text.pos[h, :n] = self.pos[h, old]
                for name, mark in text.marks.items():
                    mark[h, :n] = self.marks[name][h, old]
        return text

    def append(self, k: Tensor, v: Tensor) -> None:
        """Write the next C tokens, k v [H, C, D], behind those that a scratch holds."""
        C = k.shape[1]
        time = (self.now + torch.arange(C, device=k.device)).int()
        for heads, keys, values in self.heads():
            a = keys.shape[1] - self.room
            keys[:, a : a + C], values[:, a : a + C] = k[heads], v[heads]
            self.pos[heads, a : a + C] = time
        self.now += C
        self.room -= C

    def _mark_shapes(self) -> Shapes:
        return {n: (tuple(m.shape[2:]), str(m.dtype).removeprefix("torch.")) for n, m in self.marks.items()}

    def fill(self, text: "Slots", order: Tensor) -> None:
        """Hold exactly the tokens `order` [H, M] of `text` (slot indices; -1: none), head by head from slot 0."""
        kept, device = order >= 0, order.device
        heads, to = kept.nonzero(as_tuple=True)
        source = order[heads, to]
        for mine, theirs in ((self.k, text.k), (self.v, text.v)):
            mine.index_copy_(0, self.base[heads] + to, theirs.index_select(0, text.base[heads] + source))
        self.pos.fill_(EMPTY)
        self.pos[heads, to] = text.pos[heads, source]
        for name, mark in self.marks.items():
            mark.zero_()
            mark[heads, to] = text.marks[name][heads, source]
        counts = kept.sum(1)
        room = (self.caps - counts).tolist()
        assert len(set(room)) == 1, f"every head must get the same room, got {room}"
        self.free.copy_(counts[:, None] + torch.arange(self.width, device=device))
        self.room = room[0]
        self.cursor.zero_()
        self.now.copy_(text.now)
