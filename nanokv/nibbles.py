"""One row times codes of 4 bits, for torch.compile on a CPU with AVX2, whose vectors hold 8 numbers.

The insight: a word of 32 bits holds 8 codes. All lanes of a vector take the same word, which costs nothing, and each
keeps 4 bits of its own. They stay where they are: the code counts 16 times as much in every next lane, and the number
that it is multiplied by so much less. So nothing is shifted; and no integers are loaded into a vector one beside the
other, which torch's code for AVX2 does by a detour that takes longer than all the rest. A code of 8 bits is two of 4.
"""

from collections.abc import Callable

from .later import Tensor, torch
from .sweep import there

LANES = 8  # codes in a word, and numbers in a vector
STREAMS = 2  # rows read at once, far from each other: two sums that need not wait for each other


def packed(codes: Tensor) -> Tensor:
    """Codes -8..7 [N, K] int8 -> words [N, K / 8] int32: seven codes + 8 from the lowest bits on, above them the eighth, with its sign."""
    digits = codes.unflatten(1, (-1, LANES)).unbind(-1)
    return sum((d.to(torch.int32) + (8 if j < LANES - 1 else 0)) << 4 * j for j, d in enumerate(digits))


def unpacked(words: Tensor) -> Tensor:
    """Words [N, K / 8] int32 -> codes -8..7 [N, K] int8."""
    digits = [(words >> 4 * j & 15) - 8 if j < LANES - 1 else words >> 4 * j for j in range(LANES)]
    return torch.stack([d.to(torch.int8) for d in digits], -1).flatten(1)


def product4(x: Tensor, words: Tensor, both: Tensor) -> Tensor:
    """x [K] times codes [N, K] as words [N, K / 8], with scale and zero of every group, both [N, K / g, 2] -> [N] in float32."""
    groups, lane = both.shape[1], torch.arange(LANES, device=x.device)
    x = x.float().view(groups, -1, LANES)
    meets, sums = there(x * _smaller(lane)), there(x.sum(1))
    base = there(sums * torch.where(lane < LANES - 1, -8.0, 0.0))  # codes + 8 were stored

    def rows(words: Tensor, both: Tensor) -> Tensor:
        found = ((words[..., None] & _own(lane)).float() * meets).sum(2) + base
        return (found * both[..., 0, None].float() + sums * both[..., 1, None].float()).sum((1, 2))

    return _streams(rows, words.unflatten(1, (groups, -1)), both)


def product8(x: Tensor, words: Tensor) -> Tensor:
    """x [K] times codes of 8 bits [N, K], four of them a word [N, K / 4] -> [N] in float32."""
    lane = torch.arange(LANES, device=x.device)
    x = x.float().view(-1, LANES // 2)
    meets = there(x.repeat_interleave(2, 1) * 16.0 ** (lane % 2) * _smaller(lane))
    flip = _own(lane) & 0x00808080  # a sign that is no word's: 128 more, and the code has none

    def rows(words: Tensor) -> Tensor:
        return (((words[..., None] & _own(lane)) ^ flip).float() * meets).sum((1, 2))

    return _streams(rows, words) - 128 * x[:, :3].sum()


def _own(lane: Tensor) -> Tensor:
    """The bits of a word that are each lane's."""
    return 15 << 4 * lane.to(torch.int32)


def _smaller(lane: Tensor) -> Tensor:
    """1 / 16 ** lane, exactly."""
    return (1 << 28 - 4 * lane.to(torch.int32)).float() * 2.0**-28


def _streams(rows: Callable[..., Tensor], *matrices: Tensor) -> Tensor:
    """What `rows` finds in matrices of N rows, in STREAMS parts of them at once -> [N]."""
    n = STREAMS if len(matrices[0]) % STREAMS == 0 else 1
    return torch.cat([rows(*parts) for parts in zip(*(m.unflatten(0, (n, -1)).unbind() for m in matrices))])
