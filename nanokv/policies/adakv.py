"""SnapKV with the rows of a layer dealt out to its heads by need.

The lesson: what eviction can do to a layer's output is bounded by the attention mass it loses,
summed over heads; and that sum is smallest when the best scores of *all heads together* are
kept. A head that looks at three tokens gives its slots to one that looks everywhere. The heads
then own different numbers of rows of one pool, and no row is wasted on padding. Here that is one
dial, `heads=adaptive`, which every scoring policy has.

Paper: Feng et al. 2024, https://arxiv.org/abs/2407.11550. The safeguard alpha = floor_ratio.

| paper | official code | here |
|---|---|---|
| alpha weighs the adaptive part | alpha weighs the uniform part | the code's meaning, named `floor_ratio`, 0.2 |
| no limit | no limit | a head gets at most 4 times the mean: the bookkeeping is as wide as that |
| shares sum to the budget | rounded head by head: slots lost or gained | largest remainders: the sum is exact |
| prefix softmax, pool then mean | softmax over all keys, mean then pool | as the code |
| flat cache, a CUDA kernel per step | grows by copying | a fixed pool, written in place |

The shares are set when the layer first overflows, and stay: every new token needs a row in every head.
Cost: as SnapKV, plus attention over a pool with ragged shares.
"""

from dataclasses import dataclass

from .snapkv import SnapKV


@dataclass(frozen=True)
class AdaKV(SnapKV):
    heads: str = "adaptive"
