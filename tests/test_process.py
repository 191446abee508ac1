"""What a process of ours asks of the machine; of malloc in a process of its own, for that cannot be taken back."""

import os
import platform
import subprocess
import sys

import pytest

from nanokv.process import sleep_while_waiting

HOLES = """
import os, re
from nanokv.process import return_large_pieces
if {asked}:
    return_large_pieces()
import torch
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) >> 10
del_me = torch.ones(4 << 20)  # 16 MiB: having seen such a piece dropped, malloc keeps the next ones
del del_me
before = resident()
pieces = [torch.ones(1 << 19) for _ in range(64)]  # 2 MiB each
assert resident() - before > 120
del pieces[:-1]  # the last one, which stays, lies behind the others
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")
@pytest.mark.parametrize("asked, set_by_hand, kept", [(True, {}, False), (False, {}, True), (True, {"MALLOC_ARENA_MAX": "2"}, True)])
def test_large_pieces_go_back_although_a_later_one_stays(asked, set_by_hand, kept):
    code = HOLES.format(asked=asked)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean | set_by_hand)
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) > 60) == kept, f"{done.stdout} MiB of 126 are still resident"


@pytest.mark.parametrize("given, found", [(None, "PASSIVE"), ("active", "active")])
def test_threads_sleep_unless_the_environment_says_otherwise(monkeypatch, given, found):
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")  # so that it is as before in the end
    if not given:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    sleep_while_waiting()
    assert os.environ["OMP_WAIT_POLICY"] == found
