"""Slots against a memory made of Python dictionaries: position -> (key, value, mark), head by head."""

import random

import pytest
import torch
from conftest import scratch

from nanokv.attention import watch_slots
from nanokv.slots import EMPTY, Slots

H, G, D = 3, 2, 4
MARKS = {"note": ((), "float32"), "pair": ((2,), "int32")}


def memory(rows: int, width: int = 0) -> Slots:
    return Slots.empty(rows, H, D, torch.zeros(1), width, MARKS)


def vectors(S: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(H, S, D, generator=g), torch.randn(H, S, D, generator=g)


def contents(kv: Slots) -> list[dict]:
    """What a memory holds, head by head: position -> key, value and marks; read slot by slot."""
    held = []
    for h in range(H):
        rows = {}
        for n in range(kv.width):
            p = int(kv.pos[h, n])
            if p != EMPTY:
                assert n < kv.shares[h] and p not in rows
                row = sum(kv.shares[:h]) + n
                rows[p] = (kv.k[row].tolist(), kv.v[row].tolist(), float(kv.marks["note"][h, n]), kv.marks["pair"][h, n].tolist())
        held.append(rows)
    return held


def read(kv: Slots, S: int, seed: int, keep: list[list[int]], shares: list[int]) -> list[dict]:
    """Let a memory read S tokens, move the heads' borders to `shares`, and keep these positions of each head.

    Returns what the dictionaries say it holds then.
    """
    k, v = vectors(S, seed)
    now, before = int(kv.now), contents(kv)
    text = scratch(kv, k, v)
    order = torch.full((H, max(map(len, keep))), -1)
    for h in range(H):
        place = {int(p): n for n, p in enumerate(text.pos[h]) if p != EMPTY}
        assert sorted(place) == list(place) == sorted([*before[h], *range(now, now + S)]), "time order, everyone there"
        order[h, : len(keep[h])] = torch.tensor([place[p] for p in keep[h]])
        before[h] |= {now + i: (k[h, i].tolist(), v[h, i].tolist(), 0.0, [0, 0]) for i in range(S)}
    if shares != kv.shares:
        kv.share(shares)
    kv.fill(text, order)
    return [{p: before[h][p] for p in keep[h]} for h in range(H)]


def test_a_new_memory_is_empty_and_costs_what_the_formula_says():
    kv = memory(5)
    assert not kv.live.any() and kv.room == 5 and kv.bytes == 2 * H * 5 * D * 4
    assert not kv.flat and kv.keys.shape == (H, 5, D) and kv.keys.data_ptr() == kv.k.data_ptr()


def test_write_fills_slot_after_slot_and_eviction_frees_them_in_order():
    kv = memory(4)
    for t in range(4):
        assert kv.write(*vectors(1, t)).tolist() == [[t]] * H
    kv.marks["note"].fill_(7)
    kv.evict(torch.tensor([[1, 3], [0, 2], [3, 0]]))
    assert kv.room == 2 and kv.pos.tolist() == [[0, EMPTY, 2, EMPTY], [EMPTY, 1, EMPTY, 3], [EMPTY, 1, 2, EMPTY]]
    assert kv.write(*vectors(1, 4)).tolist() == [[1], [0], [3]]
    assert kv.write(*vectors(1, 5)).tolist() == [[3], [2], [0]]
    assert kv.pos.tolist() == [[0, 4, 2, 5], [4, 1, 5, 3], [5, 1, 2, 4]] and kv.now.tolist() == [6]
    assert kv.marks["note"].tolist() == [[7, 0, 7, 0], [0, 7, 0, 7], [0, 7, 7, 0]], "a new token starts without marks"
    k, v = vectors(1, 5)
    assert torch.equal(kv.keys[range(H), [3, 2, 0]], k[:, 0]) and torch.equal(kv.values[range(H), [3, 2, 0]], v[:, 0])


def test_several_tokens_are_written_as_one_by_one():
    one, many = memory(6), memory(6)
    for kv in (one, many):
        for t in range(6):
            kv.write(*vectors(1, t))
        kv.evict(torch.tensor([[5, 0, 2], [1, 2, 3], [4, 3, 0]]))
    k, v = vectors(3, 9)
    for i in range(3):
        one.write(k[:, i : i + 1], v[:, i : i + 1])
    assert many.write(k, v).tolist() == [[5, 0, 2], [1, 2, 3], [4, 3, 0]]
    assert contents(one) == contents(many) and torch.equal(one.now, many.now)
    assert many.mask(torch.tensor([6, 7, 8])).sum(2).tolist() == [[4, 5, 6]] * H, "the first does not see the last"


@pytest.mark.parametrize("width", (0, 11))
def test_texts_come_beside_what_is_held_and_the_chosen_stay(width):
    rng = random.Random(width)
    for trial in range(40):
        kv, turns = memory(6, width), 0
        while turns < 4:
            S, held, now = rng.randint(1, 9), contents(kv), int(kv.now)
            tokens = [len(h) + S for h in held]
            shares = rng.choice(([3, 11, 4], [6, 6, 6], [9, 8, 1])) if width else kv.shares
            room = max(0, *(c - n for c, n in zip(shares, tokens)))
            if room > min(shares):
                continue
            room = rng.randint(room, min(shares))
            keep = [sorted(rng.sample([*h, *range(now, now + S)], c - room)) for h, c in zip(held, shares)]
            want = read(kv, S, 10 * trial + turns, keep, shares)
            assert contents(kv) == want and kv.room == room
            assert [kv.pos[h, : len(keep[h])].tolist() for h in range(H)] == keep, "in time order from slot 0"
            kv.marks["note"].copy_(torch.where(kv.live, kv.pos + 0.5, 0))
            kv.marks["pair"].copy_(torch.where(kv.live, kv.pos, 0)[..., None] * torch.tensor([1, -1]))
            turns += 1


def ragged(shares: list[int], tokens: int) -> Slots:
    """A memory whose heads own different shares, each holding its last tokens but one."""
    kv = memory(sum(shares) // H, width=max(shares))
    k, v = vectors(tokens, 3)
    text = scratch(kv, k, v)
    kv.share(shares)
    order = torch.full((H, max(shares) - 1), -1)
    for h, share in enumerate(shares):
        order[h, : share - 1] = torch.arange(tokens - share + 1, tokens)
    kv.fill(text, order)
    return kv


@pytest.mark.parametrize("shares", ([4, 4, 4], [2, 7, 3], [10, 1, 1], [1, 1, 10], [1, 10, 1]))
def test_heads_of_different_shares_attend_to_their_own_rows_only(shares):
    kv = ragged(shares, 12)
    kv.write(*vectors(1, 4))
    assert kv.bytes == 2 * sum(shares) * D * 4, "nothing is padded"
    q = torch.randn(H, G, 1, D, generator=torch.Generator().manual_seed(1))
    mask = kv.mask(kv.now - 1)
    out, probs = watch_slots(q, kv.keys, kv.values, mask, 0.5)
    by_slot = kv.by_slot(probs)
    assert by_slot.shape == (H, G, 1, kv.width)
    for h, (share, rows) in enumerate(zip(shares, contents(kv))):
        assert len(rows) == share
        for g in range(G):
            weights = torch.tensor([0.5 * sum(a * b for a, b in zip(q[h, g, 0].tolist(), row[0])) for row in rows.values()]).softmax(0)
            answer = (weights[:, None] * torch.tensor([row[1] for row in rows.values()])).sum(0)
            assert (out[h, g, 0] - answer).abs().max() < 1e-6
            at = [kv.pos[h].tolist().index(p) for p in rows]
            assert (by_slot[h, g, 0, at] - weights).abs().max() < 1e-6
            others = [n for n in range(kv.width) if n not in at]
            assert not by_slot[h, g, 0, others].any(), "exactly 0 where nobody lives or the head owns nothing"


def test_shares_that_do_not_add_up_or_are_too_wide_are_refused():
    for shares in ([4, 4, 5], [2, 2, 8]):
        with pytest.raises(AssertionError):
            memory(4, width=7).share(shares)


def test_every_head_must_get_the_same_room():
    kv = memory(4)
    text = scratch(kv, *vectors(3))
    with pytest.raises(AssertionError, match="same room"):
        kv.fill(text, torch.tensor([[0, 1], [0, 1], [0, -1]]))


def test_clear_forgets_everything_and_evens_the_shares():
    kv, new = ragged([2, 7, 3], 12), memory(4, width=7)
    kv.marks["note"].fill_(3)
    kv.clear()
    for name in ("k", "v", "pos", "free", "cursor", "now", "base", "caps", "own", "entry"):
        assert torch.equal(getattr(kv, name), getattr(new, name)), name
    assert (kv.room, kv.shares, kv.allotted) == (4, [4, 4, 4], False) and not kv.marks["note"].any()


def test_a_scratch_takes_the_place_of_the_last_one_if_it_is_as_large():
    kv = Slots.empty(4, 2, 3, torch.zeros(0))
    first = kv.beside(5)
    spare = [first.k, first.v]
    again = kv.beside(5, spare)
    assert again.k.data_ptr() == first.k.data_ptr() and again.v.data_ptr() == first.v.data_ptr()
    assert not again.live.any() and again.room == 5
    other = kv.beside(6, spare)
    assert len(other.k) == 12 and spare == []  # let go before the new one was made
