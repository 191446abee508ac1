"""Large pages: what is read for every token lies in one piece, and nobody can tell but the clock."""

import mmap
import re
import sys
from pathlib import Path

import pytest
import torch

from nanokv import Engine, make
from nanokv.compiled import by_rows
from nanokv.memory import weight_bytes
from nanokv.noise import random_model
from nanokv.pages import LARGE, LINE, Room
from nanokv.shape import ModelConfig

linux = pytest.mark.skipif(sys.platform != "linux", reason="large pages are asked for on Linux")
SHAPE = ModelConfig(vocab_size=8192, dim=256, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=64, ffn_dim=768, tied=True)


def in_order(tensors):
    """(first address, last address) of each tensor, lowest first."""
    return sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in tensors)


@linux
def test_tensors_stand_side_by_side_and_keep_what_is_written():
    room = Room(3 * LARGE, 3)
    shapes = [(LARGE // 4, torch.float32), (333, torch.int8), (LARGE // 2, torch.bfloat16)]
    held = [room.empty((n,), dtype).fill_(i + 1) for i, (n, dtype) in enumerate(shapes)]
    places = in_order(held)
    assert places[0][0] % LARGE == 0 and all(start % LINE == 0 for start, _ in places)
    assert all(0 <= after - end < LINE for (_, end), (after, _) in zip(places, places[1:]))
    assert [x.untyped_storage().nbytes() for x in held] == [x.nbytes for x in held]
    del room
    assert all((x == i + 1).all() for i, x in enumerate(held)), "memory outlives its room"


@linux
def test_the_memory_goes_with_its_last_tensor(monkeypatch):
    gone = []

    class Watched(mmap.mmap):
        def __del__(self):
            gone.append(len(self))

    monkeypatch.setattr(mmap, "mmap", Watched)
    room = Room(2 * LARGE, 2)
    a, b = (room.empty((LARGE,), torch.uint8) for _ in range(2))
    del room, a
    assert not gone
    del b
    assert len(gone) == 1


def refuse(*_, **__):
    raise OSError(12, "Cannot allocate memory")


@pytest.mark.parametrize("nbytes, device, without", [(1000, "cpu", None), (2 * LARGE, "meta", None), (2 * LARGE, "cpu", "madvise"), (2 * LARGE, "cpu", "memory")])
def test_where_there_are_no_large_pages_memory_is_as_it_was(nbytes, device, without, monkeypatch):
    if without == "madvise":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    if without == "memory":
        monkeypatch.setattr(mmap, "mmap", refuse)
    x = Room(nbytes, 1, device).empty((3, 5), torch.float16)
    assert (x.shape, x.dtype, x.device.type) == ((3, 5), torch.float16, device) and x.untyped_storage().nbytes() == 30


def test_what_a_room_does_not_hold_comes_from_elsewhere():
    room = Room(2 * LARGE, 1)
    first, second = (room.empty((2 * LARGE,), torch.uint8).fill_(n) for n in (1, 2))
    assert (first == 1).all() and (second == 2).all()
    assert room.empty((0, 4), torch.float32).shape == (0, 4)


@linux
@pytest.mark.parametrize("form, dtype", [("native", torch.float32), ("native", torch.bfloat16), ("int8", torch.bfloat16), ("int4", torch.bfloat16)])
def test_a_model_lies_in_one_piece(form, dtype):
    model = random_model(SHAPE, dtype, form=form)
    by_rows(model)  # as a compiled engine wants it: in place
    places = in_order({x.data_ptr(): x for x in (*model.parameters(), *model.buffers())}.values())
    assert places[0][0] % LARGE == 0 and all(0 <= after - end < LINE for (_, end), (after, _) in zip(places, places[1:]))
    assert sum(end - start for start, end in places) == weight_bytes(SHAPE, form, dtype.itemsize)


def test_rows_instead_of_columns_are_the_same_matrices_in_the_same_place():
    model = random_model(SHAPE, torch.float32)
    before = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    assert not model.head.weight.is_contiguous() and model.head.weight is model.embed.weight
    by_rows(model)
    for name, p in model.named_parameters():
        assert p.is_contiguous() and p.data_ptr() == before[name][0] and torch.equal(p, before[name][1])


@linux
def test_the_pools_of_all_layers_lie_in_one_piece_of_large_pages():
    engine = Engine(random_model(SHAPE, torch.float32), make("window", budget=4096))
    engine.reset(5000, 10)
    places = in_order(x for kv in engine.slots for x in (kv.k, kv.v))
    assert places[0][0] % LARGE == 0 and all(end == after for (_, end), (after, _) in zip(places, places[1:]))
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("this machine has no large pages")
    assert large_bytes(places[0][0]) >= (places[-1][1] - places[0][0]) // LARGE * LARGE


def large_bytes(address):
    """Bytes in large pages of the mapping that holds this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0
