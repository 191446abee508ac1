"""The decode step as one compiled graph.

The insight: a hard budget is a fixed shape. Slots never move, `now` and `cursor` are tensors, and who goes is
decided before the step: nothing in it asks the host, so torch.compile sees one full graph. What is small (norms,
rotations, masks, bookkeeping) melts into a handful of kernels per layer; the products stay calls of their own. On
CUDA the whole step is replayed as one CUDA graph.

torch keeps on disk what it compiled, so a second run with the same model and budget waits for a fraction of the time.
"""

import inspect
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from .slots import Slots

# The checks of sizes between two kernels take longer than some kernels, and sizes are fixed. A wrapper in C++ calls
# them in less time than one in Python.
CPU = {"size_asserts": False, "cpp_wrapper": True}


class Compiled:
    """A decode step, tokens [S] -> logits [vocab], compiled for one token; several take the plain path. So is making room for one.

    `seconds` is what compiling took so far.
    """

    def __init__(self, step: Callable[[Tensor], Tensor], evict: Callable[[], None] | None, device: torch.device):
        self.plain, self.seconds, self._cuda = step, 0.0, device.type == "cuda"
        how: dict[str, Any] = {"mode": "reduce-overhead"} if self._cuda else {"options": CPU}
        # a graph of its own: else the engines of a process share a list, and every step asks which of its graphs fits
        how |= {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}
        # dynamic=False: a second budget is a second fixed shape, not a reason for a graph that fits any
        self._graph, self.evict = (f and torch.compile(f, fullgraph=True, dynamic=False, **how) for f in (step, evict))

    def prepare(self, memory: Sequence[Slots]) -> None:
        """Compile, by a step into memory that is still empty; it must be cleared afterwards. RuntimeError: it cannot be done here."""
        start = perf_counter()
        if self._cuda:  # memory that never moves may stay where it is: no copy into the CUDA graph's own
            for kv in memory:
                for tensor in kv.tensors():
                    torch._dynamo.mark_static_address(tensor)
        try:
            self(torch.zeros(1, dtype=torch.long, device=memory[0].k.device))
            if self.evict:
                self.evict()
        except Exception as error:  # torch has dozens for it, not all of one family
            said = str(error).strip().partition("\n")[0]
            raise RuntimeError(f"the decode step could not be compiled ({said}); a C++ compiler must be there, or leave out --compile") from error
        self.seconds += perf_counter() - start

    def __call__(self, tokens: Tensor) -> Tensor:
        if len(tokens) > 1:
            return self.plain(tokens)
        logits = self._graph(tokens)
        return logits.clone() if self._cuda else logits  # the CUDA graph's own answer is overwritten by its next one
