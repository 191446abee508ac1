"""torch comes late: not before a plan's verdict, and then everywhere at once."""

import subprocess
import sys
from os.path import exists

from test_cli import ROOT, start, write_checkpoint

from nanokv.loading import DRIVERS

DEVICE = ("--device", "cpu") if any(map(exists, DRIVERS)) else ()  # auto asks torch where there may be a GPU

REFUSED = """
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import cli, nanokv.policies
from nanokv.policy import REGISTRY

for name in sorted(REGISTRY):
    asked = [*sys.argv[1:], "--policy", name] + (["--budget", "1024"] if name != "full" else [])
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as err:
        code = cli.main(asked)
    assert code == 1 and " are planned, " in err.getvalue().splitlines()[-1], (asked, code, err.getvalue())
    assert "torch" not in sys.modules, f"{name} imports torch before it is needed: a policy says `from ..later import torch`"
"""
FIRST_USE = """
import sys

import nanokv.loading, nanokv.plan, nanokv.sample
import nanokv.policies.snapkv as snapkv
from nanokv.later import Later

assert "torch" not in sys.modules and isinstance(snapkv.F, Later)
policy = nanokv.make("snapkv", budget="64")
assert "torch" not in sys.modules
three = snapkv.torch.arange(3)
import torch, nanokv.engine

assert torch.equal(three, torch.tensor([0, 1, 2])) and snapkv.torch is torch and snapkv.F is torch.nn.functional
held = [(m.__name__, key) for name, m in sys.modules.items() if name.startswith("nanokv") for key, v in vars(m).items() if isinstance(v, Later)]
assert not held, held
"""


def python(code: str, *arguments: object) -> None:
    """Run a program of its own; what it asserts holds."""
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_run_that_does_not_fit_is_refused_without_torch_whatever_the_policy(smollm2, tmp_path):
    prompt = ("hello", "--threads", "2", "--seed", "7", "--temperature", "0.5", *DEVICE)
    python(REFUSED, "--model", smollm2, *prompt, "--memory", "200MB")
    python(REFUSED, "--model", write_checkpoint(tmp_path), *prompt, "--memory", "20KB")
    python(REFUSED, "--model", "llama-2-7b", *prompt, "--random-weights", "--memory", "4GiB")
    python(REFUSED, "--model", "llama-2-7b", "--plan", "--memory", "4GiB", "--weights", "int8", *DEVICE)


def test_as_a_command_it_ends_with_1_and_says_why(smollm2):
    process = start("--model", smollm2, "--dtype", "float32", "--memory", "200MB", "hello")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, b"")
    assert err.splitlines()[-1].endswith(b"190.73 MiB are there: no budget makes it fit: its weights alone take 513.13 MiB")


def test_the_policies_are_listed_without_torch():
    python("import cli, sys; assert cli.main(['--policies']) == 0 and 'torch' not in sys.modules")


def test_the_first_use_brings_it_to_every_file():
    python(FIRST_USE)
