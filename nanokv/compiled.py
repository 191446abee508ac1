"""The decode step as one compiled graph.

The insight: a hard budget is a fixed shape. Slots never move, `now` and `cursor` are tensors, and who goes is
decided before the step: nothing in it asks the host, so torch.compile sees one full graph. On a CPU it turns everything,
products and attention too (sweep.py), into plain loops, one function from one layer's attention to the next one's,
which are then called with the tensors that they were compiled for. On CUDA the step is replayed as one CUDA graph.

torch keeps on disk what it compiled, so a second run with the same model and budget waits for a fraction of the time.
"""

import gc
import inspect
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from .slots import Slots

Step = Callable[[Tensor], Tensor]
# The checks of sizes between two kernels take longer than some kernels, and sizes are fixed. A wrapper in C++ calls
# them in less time than one in Python.
CPU = {"size_asserts": False, "cpp_wrapper": True}
ALONE = "isolate_recompiles" in inspect.signature(torch.compile).parameters  # not in torch 2.6
TRIALS, TRIED = 12, 2.0  # steps that are timed on one thread and on all; seconds after which fewer must do


class Compiled:
    """A decode step, token [1] -> logits [vocab], as a graph; and room for it in every layer (`evict`), as another one.

    `seconds` is what compiling took so far; `threads` is how many a step runs on.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self.seconds, self.threads = 0.0, torch.get_num_threads()
        self.release()

    def release(self) -> None:
        """Let go of the memory that was compiled for."""
        self._graph = self._room = None

    @property
    def evicts(self) -> bool:
        """Is `evict` to be had? Not of every engine's step."""
        return self._room is not None

    def prepare(self, memory: Sequence[Slots], step: Step, evict: Callable[[], None] | None) -> None:
        """Compile for this memory, by steps into it while it is empty; it must be cleared afterwards. RuntimeError: it cannot be done here."""
        start = perf_counter()
        make = _replayed if self._cuda else Recorded
        self._graph, self._room = make(step), evict and make(evict)
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

    def __call__(self, token: Tensor) -> Tensor:
        with threads(self.threads):
            logits = self._graph(token)
        return logits.clone() if self._cuda else logits  # the CUDA graph's own answer is overwritten by its next one

    def evict(self) -> None:
        """Make room for one token in every layer."""
        with threads(self.threads):
            self._room()

    def _try(self, memory: Sequence[Slots]) -> float:
        """A step into the first slot of each layer, and room for the next one -> seconds."""
        for kv in memory:
            kv.cursor.zero_()
        token, start = torch.zeros(1, dtype=torch.long, device=memory[0].k.device), perf_counter()
        self(token)
        if self.evicts:
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


def _compiled(f: Callable, **how: Any) -> Callable:
    """f as one graph of fixed shapes, which other engines of this process do not share."""
    if not ALONE:
        torch._dynamo.reset()  # what was compiled before stays with those who have it
    return torch.compile(f, fullgraph=True, dynamic=False, **how, **({"isolate_recompiles": True} if ALONE else {}))


def _replayed(f: Callable) -> Callable:
    """f for CUDA, where a graph that was once recorded is replayed."""
    return _compiled(f, mode="reduce-overhead")


class Recorded:
    """f, compiled for a CPU at its first call. What that met, its weights and its memory, the next ones meet again, but for what they are given.

    So nothing is looked up and no guard is asked: that would take a twentieth of a step, for several hundred tensors. And f
    is let go, that an engine may not hold itself through its step.
    """

    def __init__(self, f: Callable):
        self._f: Callable | None = f
        self._run: Callable | None = None

    def __call__(self, *given: Tensor) -> Tensor | None:
        if self._run is None:
            return self._compile(given)
        for i, x in zip(self._places, given):
            self._met[i] = x
        answers = self._run(*self._met)
        return answers[0] if answers else None

    def _compile(self, given: Sequence[Tensor]) -> Tensor | None:
        from torch._inductor.compile_fx import compile_fx  # not before: importing it takes a second

        seen: list = []

        def backend(graph: torch.fx.GraphModule, example: Sequence[Tensor]) -> Callable:
            assert len(graph.graph.output_node().args[0]) <= 1, "a step must write into tensors, not bind names anew"
            run = compile_fx(graph, example, config_patches=CPU)

            def first(*met: Tensor) -> Sequence[Tensor]:
                seen[:] = run, *met
                return run(*met)

            return first

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*complex operators")  # there are none, see sweep.parted
            answer = _compiled(self._f, backend=backend)(*given)
        self._run, *self._met = seen
        self._places = [next(i for i, met in enumerate(self._met) if met is x) for x in given]
        self._f = None
        seen.clear()  # torch remembers its backends
        gc.collect()  # and what it traced refers to itself, and to the memory
        return answer


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
