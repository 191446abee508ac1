"""Codes of 4 bits in words: what goes in comes out, and products against the codes themselves."""

import pytest
import torch

from nanokv import nibbles


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def test_every_code_comes_back_from_every_place():
    codes = torch.cat([torch.arange(-8, 8).roll(r).view(1, 16) for r in range(16)]).to(torch.int8)
    words = nibbles.packed(codes)
    assert words.dtype == torch.int32 and words.shape == (16, 2) and torch.equal(nibbles.unpacked(words), codes)


def test_where_a_word_keeps_its_codes():
    first = nibbles.packed(torch.tensor([[-8, -7, -8, -8, -8, -8, -8, -1]], dtype=torch.int8))
    assert first.item() & 0xFFFFFFFF == 0xF0000010, "a code + 8 in every place but the last, which has its sign"


@pytest.mark.parametrize("N", [1, 7, 16])  # whole streams, or none
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_of_4_bits(N, dtype):
    torch.manual_seed(1)
    x, codes = torch.randn(96, dtype=dtype), torch.randint(-8, 8, (N, 96), dtype=torch.int8)
    both = torch.randn(N, 3, 2, dtype=torch.bfloat16)
    weights = codes.double().view(N, 3, 32) * both[..., :1].double() + both[..., 1:].double()
    found = nibbles.product4(x, nibbles.packed(codes), both)
    assert found.dtype == torch.float32 and apart(found, weights.view(N, 96) @ x.double()) < 1e-6


@pytest.mark.parametrize("N", [1, 7, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_of_8_bits(N, dtype):
    torch.manual_seed(1)
    x, codes = torch.randn(1, 64, dtype=dtype), torch.randint(-128, 128, (N, 64), dtype=torch.int8)
    found = nibbles.product8(x, codes.view(torch.int32))
    assert found.dtype == torch.float32 and apart(found, codes.double() @ x[0].double()) < 1e-6
