"""What this machine's CPU multiplies well.

The insight: fewer bits are always fewer bytes, so decoding, which waits for memory, gains from any short dtype. A long
text waits for arithmetic, and a CPU without instructions for bfloat16 takes four times as long in it as in float32.
"""

from functools import cache
from pathlib import Path

INSTRUCTIONS = {"bfloat16": {"avx512_bf16", "amx_bf16", "bf16"}, "float16": {"avx512_fp16", "amx_fp16", "asimdhp"}}


@cache
def features() -> frozenset[str]:
    """What the CPU says of itself, word by word; nothing where nobody asks it."""
    try:
        return frozenset(Path("/proc/cpuinfo").read_text(errors="replace").split())
    except OSError:  # not Linux
        return frozenset()


def multiplies(dtype: str) -> bool:
    """Has the CPU instructions for this dtype, given by name?"""
    return dtype not in INSTRUCTIONS or bool(INSTRUCTIONS[dtype] & features())


def widens_bytes() -> bool:
    """Does a loop that torch.compile writes make numbers of bytes as fast as it reads them? Where vectors are shorter than
    those of AVX-512, each few bytes take a detour through memory, and a library's product is five times as fast."""
    return "avx512bw" in features()


def arithmetic(dtype: str, device: str) -> str:
    """What matrices are multiplied in where a long text passes them, by name: their own dtype, or float32 for want of instructions."""
    return dtype if not device.startswith("cpu") or multiplies(dtype) else "float32"
