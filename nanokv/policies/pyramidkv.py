"""SnapKV with wide lower layers and narrow upper ones.

The lesson: lower layers spread their attention over the whole text, upper ones gather it on a few
tokens. So a fixed total should not be dealt out evenly: the rows of a layer fall in a straight
line with its depth, from about twice the mean to 1/beta of it. Inside a layer nothing changes.
Here that is one dial, `layers=pyramid`, which every scoring policy has.

Paper: Cai et al. 2024, https://arxiv.org/abs/2406.02069. alpha = window, beta = beta.

| paper | official code | here |
|---|---|---|
| k_l real-valued, mean conserved | slope floored: up to 27 % more rows than asked (80 layers, C 128: 163 on average) | cumulative rounding: the sum is exact |
| - | off below twice the mean | on as soon as the text overflows the budget; else uniform |
| alpha 8, beta 20 | window 8, beta 20 | window 32 as SnapKV's, beta 20 |

Cost: as SnapKV.
"""

from dataclasses import dataclass

from .snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    layers: str = "pyramid"
