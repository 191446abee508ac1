"""SnapKV with wide lower layers and narrow upper ones.

The lesson: lower layers spread their attention over the whole text, upper ones gather it on a few
tokens. So a fixed total should not be dealt out evenly: the rows of a layer fall in a straight
line with its depth, from about twice the mean to 1/beta of it. Inside a layer nothing changes.
Here that is one dial, `layers=pyramid`, which every scoring policy has.

Paper: Cai et al. 2024, https://arxiv.org/abs/2406.02069. alpha = window, beta = beta; k_l are layer l's rows without
the window and the interval.

| paper | official code | here |
|---|---|---|
| k_l real-valued, mean conserved | slope floored: up to 27 % more rows than asked (80 layers, C 128: 163 on average) | cumulative rounding: the sum is exact |
| - | uniform for texts below twice the mean | a pyramid as soon as the text overflows the budget |
| alpha 8, beta 20 | window 8, beta 20 | `window` 32 as SnapKV's, `beta` 20 |
| pool, then sum over rows | sum, then pool | as the code |

With many layers or a small budget the top layer keeps its window and `sink` alone: that is the method.
Cost: as SnapKV.
"""

from dataclasses import dataclass

from .snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    layers: str = "pyramid"
