"""Remember the last tokens only: the oldest one goes.

The lesson: the ring buffer is not coded, it appears. "Overwrite the slot with the smallest
position" writes token t where token t - budget stood, round and round. With `sink` protected
first tokens it is a ring behind a fixed head: slot = sink + (pos - sink) mod (budget - sink).

Paper: Beltagy et al. 2020 (Longformer), https://arxiv.org/abs/2004.05150; the failure without sinks
is Figure 1 of StreamingLLM, https://arxiv.org/abs/2309.17453: a trained model parks the attention it
has no use for on the first tokens, and when those are evicted its softmax loses its footing.

| paper | official code | here |
|---|---|---|
| window W | - | W = budget - sink, the current token included |
| no sinks | - | `sink` 0 by default; with `sink` 4 this is StreamingLLM at text positions |

Cost: nothing but the search for the smallest position.
"""

from dataclasses import dataclass

from ..later import Tensor
from ..policy import Policy
from ..slots import Slots


@dataclass(frozen=True)
class Window(Policy):
    budget: int = 1024
    sink: int = 0
    interval: int = 1

    @property
    def note(self) -> str:
        return "" if self.sink else "window: without sinks most models lose their footing once the first token goes (--sink 4)"

    def score(self, kv: Slots) -> Tensor:
        return kv.pos
