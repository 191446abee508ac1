"""Memory for what every token reads, side by side and in large pages.

The insight: a token reads all weights and all slots from front to back, and then waits less for the memory than for the
way there. Each page of 4 KiB must be looked up, on a virtual machine in two tables. In pages of 2 MiB there is next to
nothing to look up, and one thread reads up to one and a half times as fast. Linux gives them to memory that asks for
them before it is first written. What cannot have them (another system or device, a few bytes) is ordinary memory.
"""

import mmap
from collections.abc import Sequence

from .later import Tensor, torch

LARGE = 1 << 21  # bytes of a large page
LINE = 64  # bytes: where a tensor may begin, so that no number lies across two cache lines


class Room:
    """Memory for `nbytes` bytes in `tensors` tensors, handed out from front to back.

    It lives as long as any tensor in it does. Each has a storage of its own, of exactly its size.
    """

    def __init__(self, nbytes: int, tensors: int, device: "str | torch.device" = "cpu"):
        self._device, self._memory, self._next = device, None, 0
        nbytes += LINE * tensors
        if nbytes < LARGE or torch.device(device).type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
            return
        try:  # a page too many: it need not begin where a page does, and what is never written is never there
            self._memory = mmap.mmap(-1, nbytes + LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # no such memory, or a kernel without such pages: torch finds the words
            self._memory = None
            return
        self._next = -torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr() % LARGE

    def empty(self, shape: Sequence[int], dtype: "torch.dtype") -> Tensor:
        """A tensor that nobody has written to; beyond the room, from anywhere."""
        like = torch.empty(shape, dtype=dtype, device="meta")
        if self._memory is None or not like.numel() or self._next + like.nbytes > len(self._memory):
            return torch.empty(shape, dtype=dtype, device=self._device)
        start, self._next = self._next, self._next + -(-like.nbytes // LINE) * LINE
        return torch.frombuffer(self._memory, dtype=dtype, count=like.numel(), offset=start).view(like.shape)

    def moved(self, x: Tensor) -> Tensor:
        """x, of which nobody else knows, in here."""
        return self.empty(x.shape, x.dtype).copy_(x)
