"""Keep the first tokens as attention sinks and a window of the last ones; count positions inside the cache.

The lesson: softmax must put its mass somewhere, and trained models dump it on the first tokens.
Keep four of them for ever and a window streams on without end. The paper numbers tokens by their
place in the cache, so that no distance ever exceeds it. Taken literally every key would be turned
anew at each step; but turning all of a window left by the same angle as the query changes no
distance inside it. Only the distance to the sinks differs, so only *they* are turned, to the
right: by the number of tokens forgotten, whenever that number grows.

Paper: Xiao et al. 2023, https://arxiv.org/abs/2309.17453.

| paper | official code | here |
|---|---|---|
| S sinks + W recent | attends S + W + the current token | budget = S + W + 1 |
| position in the cache | keys stored before RoPE, all turned at every step | stored turned; the sinks turned on, from a pristine float32 copy, so nothing drifts |
| a prompt longer than the cache | read in one piece, or evicted in batches | read in one piece, exactly; then sinks + recent stay |
| - | - | `positions=text`: the sinks keep their text positions (another method: distances grow) |

Cost: turning sink keys per head and eviction. What it does not do: bring back what it forgot.
"""

from dataclasses import dataclass

from ..later import Tensor, torch
from ..policy import Policy
from ..rope import angles, turn
from ..slots import Shapes, Slots


@dataclass(frozen=True)
class StreamingLLM(Policy):
    budget: int = 1024
    sink: int = 4
    interval: int = 1
    positions: str = "cache"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("positions", "cache", "text")

    def state(self, H: int, G: int, N: int, D: int) -> Shapes:
        if self.positions == "text" or not self.sink:
            return {}
        return {"sinks": ((H, self.sink, D), "float32"), "gap": ((1,), "int64")}

    def score(self, kv: Slots) -> Tensor:
        return kv.pos

    def settle(self, kv: Slots) -> None:
        """Close the gap that the forgotten tokens left: the window stays, the sinks move right."""
        if not kv.state:
            return
        sinks, gap = kv.state["sinks"], kv.state["gap"]
        keys = kv.k.view(sinks.shape[0], -1, sinks.shape[2])[:, : self.sink]  # never evicted: always the first slots
        sinks.copy_(torch.where(gap > 0, sinks, keys.float()))  # pristine until the first token is forgotten
        gap.copy_(kv.now - kv.live[0].sum())
        keys.copy_(turn(sinks, *angles(gap, kv.freqs)))
