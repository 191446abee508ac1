"""How a process of ours treats the machine: threads sleep while they wait, and memory that is dropped goes back.

The insight: a plan counts what lives, the machine what is resident, and between the two stands malloc, which keeps what
is dropped in case it is wanted again, by default in pieces of up to 32 MiB. While a text is read, that is dozens of
megabytes, another number in each process. Told to return large pieces at once, it costs no time that could be measured.
"""

import ctypes
import os

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # glibc's names for mallopt
LARGE = 1 << 20  # bytes: a piece of this size is the system's, taken and returned alone
SPARE = 16 << 20  # bytes: so much of what small pieces left free is kept, for the next step takes it again


def sleep_while_waiting() -> None:
    """Before torch is imported: its threads sleep between two jobs, unless the environment says otherwise."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads make a busy machine several times slower


def return_large_pieces() -> None:
    """Let malloc give back at once what it was asked for in large pieces, unless the environment sets malloc itself."""
    if os.name != "posix" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's; not in musl, nor on a Mac
    if mallopt:
        mallopt(MMAP_THRESHOLD, LARGE)
        mallopt(TRIM_THRESHOLD, SPARE)
