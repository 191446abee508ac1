"""The decode step as one compiled graph.

The insight: a hard budget is a fixed shape. Slots never move, `now` and `cursor` are tensors, and who goes is
decided before the step: nothing in it asks the host, so torch.compile sees one full graph. On a CPU it turns everything
but attention, the products of one row by a matrix too (sweep.py), into plain loops, one function from one layer's
attention to the next one's. On CUDA the whole step is replayed as one CUDA graph.

torch keeps on disk what it compiled, so a second run with the same model and budget waits for a fraction of the time.
"""

import inspect
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from .slots import Slots

# The checks of sizes between two kernels take longer than some kernels, and sizes are fixed. A wrapper in C++ calls
# them in less time than one in Python.
CPU = {"size_asserts": False, "cpp_wrapper": True}
ALONE = "isolate_recompiles" in inspect.signature(torch.compile).parameters  # not in torch 2.6
GUARDLESS = ALONE and hasattr(torch.compiler, "skip_all_guards_unsafe")
TRIALS, TRIED = 12, 2.0  # steps that are timed on one thread and on all; seconds after which fewer must do


class Compiled:
    """A decode step, tokens [S] -> logits [vocab], compiled for one token; several take the plain path. So is making room for one.

    `seconds` is what compiling took so far; `threads` is how many a step runs on.
    """

    def __init__(self, step: Callable[[Tensor], Tensor], evict: Callable[[], None] | None, device: torch.device):
        self.plain, self._make_room, self._cuda = step, evict, device.type == "cuda"
        self.seconds, self.threads = 0.0, torch.get_num_threads()
        self.evict = self._evict if evict else None

    def prepare(self, memory: Sequence[Slots]) -> None:
        """Compile for this memory, by steps into it while it is empty; it must be cleared afterwards. RuntimeError: it cannot be done here."""
        start = perf_counter()
        self._graph, self._room = (f and self._compiled(f) for f in (self.plain, self._make_room))
        self.threads = torch.get_num_threads()
        if self._cuda:  # memory that never moves may stay where it is: no copy into the CUDA graph's own
            for kv in memory:
                for tensor in kv.tensors():
                    torch._dynamo.mark_static_address(tensor)
        try:
            self._try(memory)
            if not self._cuda and self.threads > 1:
                self.threads = self._fastest(memory)
        except Exception as error:  # torch has dozens for it, not all of one family
            said = str(error).strip().partition("\n")[0]
            raise RuntimeError(f"the decode step could not be compiled ({said}); a C++ compiler must be there, or leave out --compile") from error
        self.seconds += perf_counter() - start

    def __call__(self, tokens: Tensor) -> Tensor:
        if len(tokens) > 1:
            return self.plain(tokens)
        with threads(self.threads):
            logits = self._graph(tokens)
        return logits.clone() if self._cuda else logits  # the CUDA graph's own answer is overwritten by its next one

    def _evict(self) -> None:
        """Make room for one token in every layer."""
        with threads(self.threads):
            self._room()

    def _compiled(self, f: Callable) -> Callable:
        """f as one graph, made for this memory: it meets no other, so no step need ask whether it still fits."""
        if self._cuda:
            how: dict[str, Any] = {"mode": "reduce-overhead"}
        else:
            how = {"options": CPU | ({"guard_filter_fn": torch.compiler.skip_all_guards_unsafe} if GUARDLESS else {})}
        how |= {"isolate_recompiles": True} if ALONE else {}  # else the engines of a process share a list of graphs
        # dynamic=False: a fixed shape, not one among many
        return torch.compile(f, fullgraph=True, dynamic=False, **how)

    def _try(self, memory: Sequence[Slots]) -> float:
        """A step into the first slot of each layer, and room for the next one -> seconds."""
        for kv in memory:
            kv.cursor.zero_()
        token, start = torch.zeros(1, dtype=torch.long, device=memory[0].k.device), perf_counter()
        self(token)
        if self.evict:
            self.evict()
        return perf_counter() - start

    def _fastest(self, memory: Sequence[Slots]) -> int:
        """How many threads, one or all, take the shorter step here.

        Threads that must be woken (OMP_WAIT_POLICY=passive) may come later than one alone is done, dozens of times in a step.
        """
        seconds: dict[int, list[float]] = {self.threads: [], 1: []}
        start = perf_counter()
        for i in range(TRIALS):
            if i > 2 and perf_counter() - start > TRIED:
                break
            for self.threads, times in seconds.items():
                times.append(self._try(memory))
        return min(seconds, key=lambda n: statistics.median(seconds[n]))


@contextmanager
def threads(n: int) -> Iterator[None]:
    """What torch computes in here, it computes on n threads."""
    before = torch.get_num_threads()
    if n == before:
        yield
        return
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def by_rows(model: nn.Module) -> None:
    """Store every matrix row by row, as a compiled step sweeps over it; the plain one prefers float32 by columns."""
    for p in model.parameters():
        if not p.is_contiguous():
            rows = p.data.contiguous()
            p.data = p.data.t().view(p.shape).copy_(rows)  # where it is: in large pages
