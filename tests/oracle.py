"""A dense oracle: the whole text in one naive forward pass, in float64, under a mask that says who could read whom.

Nothing here is shared with nanokv but the weights and the config. There is no cache: the mask
is the whole difference between one policy and another. `Witness` watches an engine and notes, for every
token, layer and head, which positions stood in the slots when that token was processed; the
oracle then computes what the logits must have been. RoPE is written with complex numbers: a
query and a key n positions apart meet under the factor exp(i n f), so only distances enter.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor

from nanokv.slots import Slots


def causal(n_layers: int, H: int, T: int) -> Tensor:
    """Who reads whom when nothing is forgotten [L, H, T, T]."""
    return torch.ones(T, T, dtype=torch.bool).tril().expand(n_layers, H, T, T)


def cache_distance(can: Tensor) -> Tensor:
    """How far apart tokens stand when positions are counted inside the cache: can [H, T, T] -> [H, T, T]."""
    place = can.long().cumsum(-1) - 1
    own = place.diagonal(dim1=1, dim2=2)  # a query is the last of those that it reads
    return own[..., None] - place


def dense_logits(model: torch.nn.Module, tokens: list[int], can: Tensor, positions: str = "text") -> Tensor:
    """Logits after every token [T, vocab], float64. can [L, H, T, T]: row reads column."""
    c, T = model.config, len(tokens)
    H, G, D = c.n_kv_heads, c.n_heads // c.n_kv_heads, c.head_dim
    w = {n: p.double() for n, p in model.state_dict().items()}
    freqs = (1.0 / c.rope["rope_theta"] ** (torch.arange(0, D, 2).float() / D)).double()
    text_distance = (torch.arange(T)[:, None] - torch.arange(T)).expand(H, T, T)

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * w[f"{name}.weight"]

    def split(x: Tensor) -> Tensor:
        return torch.complex(x[..., : D // 2], x[..., D // 2 :])

    x = w["embed.weight"][torch.tensor(tokens)]
    for layer in range(c.n_layers):
        name = f"blocks.{layer}"
        qkv = linear(norm(x, f"{name}.attn_norm"), f"{name}.attn.qkv")
        q, k, v = qkv[:, : H * G * D], qkv[:, H * G * D : H * G * D + H * D], qkv[:, H * G * D + H * D :]
        q, k, v = q.reshape(T, H, G, D), k.reshape(T, H, D), v.reshape(T, H, D)
        if c.qk_norm:
            q, k = norm(q, f"{name}.attn.q_norm"), norm(k, f"{name}.attn.k_norm")
        distance = cache_distance(can[layer]) if positions == "cache" else text_distance
        angle = distance[..., None].double() * freqs  # [H, T, T, D/2]
        met = torch.polar(torch.ones_like(angle), angle)
        logits = torch.einsum("ihgd,jhd,hijd->hgij", split(q), split(k).conj(), met).real / D**0.5
        weights = logits.masked_fill(~can[layer][:, None], -torch.inf).softmax(-1)
        x = x + linear(torch.einsum("hgij,jhd->ihgd", weights, v).reshape(T, -1), f"{name}.attn.o")
        gate, up = linear(norm(x, f"{name}.mlp_norm"), f"{name}.mlp.gate_up").tensor_split(2, -1)
        x = x + linear(gate * torch.sigmoid(gate) * up, f"{name}.mlp.down")
    x = norm(x, "norm")
    return x @ w["embed.weight" if c.tied else "head.weight"].T


class Witness:
    """Notes what an engine's slots hold whenever a token is read: (position, readable positions [H, any]) by layer."""

    def __init__(self, engine):
        self.engine = engine
        self.notes: dict[int, list[tuple[int, Tensor]]] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator["Witness"]:
        beside, write = Slots.beside, Slots.write
        policy, read = self.engine.policy, self.engine.policy.read

        def note_text(kv: Slots, S: int, spare: list[Tensor] | None = None) -> Slots:
            """A text's tokens read what the slots held before it, and the text causally."""
            for i in range(S):
                mine = (int(kv.now) + torch.arange(i + 1)).expand(len(kv.pos), -1)
                self._note(kv, int(kv.now) + i, torch.cat((kv.pos.long(), mine), 1))
            return beside(kv, S, spare)

        def note_step(kv: Slots, k: Tensor, v: Tensor) -> Tensor:
            """A decoded token reads whoever is live once it has been written itself."""
            slots, S = write(kv, k, v), k.shape[1]
            for p in range(int(kv.now) - S, int(kv.now)):
                self._note(kv, p, kv.pos.long().masked_fill(kv.pos > p, -1))
            return slots

        def note_read(kv: Slots, q: Tensor) -> Tensor | None:
            """Or only the slots that the policy chose."""
            chosen = read(kv, q)
            if chosen is not None:
                p, live = self.notes[kv.layer].pop()
                assert q.shape[2] == 1, "sparse reading is noted for one query at a time"
                self._note(kv, p, kv.held(chosen, policy.page).long())
            return chosen

        object.__setattr__(policy, "read", note_read)  # frozen, but a test may
        with mock.patch.object(Slots, "beside", note_text), mock.patch.object(Slots, "write", note_step):
            try:
                yield self
            finally:
                object.__delattr__(policy, "read")

    def _note(self, kv: Slots, p: int, readable: Tensor) -> None:
        self.notes.setdefault(kv.layer, []).append((p, readable))

    def mask(self) -> Tensor:
        """Who could read whom [L, H, T, T], from the notes; every token must have been read once, in order."""
        T, H = self.engine.seen, self.engine.model.config.n_kv_heads
        can = torch.zeros(len(self.notes), H, T, T + 1, dtype=torch.bool)  # the last column takes the EMPTY ones
        for layer, notes in self.notes.items():
            assert [p for p, _ in notes] == list(range(T)), f"layer {layer} read {[p for p, _ in notes]}"
            for p, readable in notes:
                can[layer, :, p].scatter_(1, readable.masked_fill(readable < 0, T), True)
        return can[..., :T]
