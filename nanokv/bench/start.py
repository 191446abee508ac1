"""How long does the first token take, from the moment that a command is typed?

Each measurement is a whole fresh process: start Python, import, read the model, read a prompt of some 20 tokens, print
one token, end. For so short a prompt hardly any of it is arithmetic; what counts is how much is imported, and how the
weights get from the file into memory. The commands take turns, round after round: the command line of nanokv in each
form of the weights (`--forms`), and a script that does the same with transformers, in each dtype. transformers_over is
its median over the row's.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from nanokv.bench import progress
from nanokv.bench._output import add_outputs, check_outputs, figure, reported
from nanokv.bench._peers import check_peers
from nanokv.bench._policies import FORMS, add_forms, called, take_forms
from nanokv.models import locate
from nanokv.options import Parser, positive, usage

PROMPT = "A cache keeps what was computed once, so that nobody has to compute it again. The cache of a language model"
THEIRS = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, file, dtype, prompt = sys.argv[1:]
given = {"gguf_file": file} if file else {}
tokenizer = AutoTokenizer.from_pretrained(folder, **given)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **given)
tokens = tokenizer(prompt, return_tensors="pt")
answer = model.generate(**tokens, max_new_tokens=1, do_sample=False)
print(tokenizer.decode(answer[0, tokens["input_ids"].shape[1] :]))
"""  # what their documentation tells a newcomer to write


def commands(args: argparse.Namespace) -> dict[tuple[str, str], list[str]]:
    """What is run, by whose it is and the form of the weights."""
    path, found = locate(args.model), {}
    folder, file = (path, "") if path.is_dir() else (path.parent, path.name)
    for form in args.forms:
        dtype, weights = FORMS[form]
        ours = ["--model", args.model, "--dtype", dtype, "--weights", weights, "--device", "cpu", "--raw", "--quiet", "-n", "1"]
        found["nanokv", form] = [sys.executable, "-m", "nanokv", *ours, f"--prompt={args.prompt}"]
    for dtype in dict.fromkeys(FORMS[form][0] for form in args.forms):
        found["transformers", dtype] = [sys.executable, "-c", THEIRS, str(folder), file, dtype, args.prompt]
    return found


def timed(command: Sequence[str]) -> tuple[float, str]:
    """Run it -> seconds, and what it said. RuntimeError with its last words if it failed."""
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]  # a process that is killed says nothing
        raise RuntimeError(said[-1])
    return seconds, done.stdout.rstrip("\n")


def measure(args: argparse.Namespace) -> list[dict]:
    """A row for each command: the median of its runs, and the token that it printed; or why there is none."""
    every = commands(args)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in every}
    said: dict[tuple[str, str], dict] = {key: {} for key in every}
    for i in range(1 + args.rounds):  # the first lets the files get into memory
        for key, command in every.items():
            progress(f"{called(key[0], None, key[1])}: {f'round {i} of {args.rounds}' if i else 'warming up'}")
            if "failed" in said[key]:
                continue
            try:
                seconds, said[key]["said"] = timed(command)
                times[key] += [seconds] if i else []
            except RuntimeError as error:
                said[key] = {"failed": str(error)}
    median = {key: statistics.median(found) for key, found in times.items() if "failed" not in said[key]}
    return [row(key, median, said[key]) for key in every]


def row(key: tuple[str, str], median: dict[tuple[str, str], float], said: dict) -> dict:
    """What the report says of a command, beside transformers in its dtype."""
    whose, form = key
    found = {"command": whose, "form": form, "s": median.get(key), "transformers_over": None} | said
    theirs = median.get(("transformers", FORMS[form][0]))
    if whose == "nanokv" and theirs and key in median:
        found["transformers_over"] = theirs / median[key]
    return found


def draw(path: str, rows: list[dict]) -> None:
    """Seconds, a bar for each command."""
    found = [r for r in rows if r["s"] is not None]
    with figure(path) as (axes,):
        axes.bar([called(r["command"], None, r["form"]) for r in found], [r["s"] for r in found])
        axes.set(ylabel="s", title="From the command to the first token")


def options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line. ValueError for what there is none of."""
    p = Parser("python -m nanokv.bench start", __doc__)
    p.epilog, p.formatter_class = None, argparse.RawDescriptionHelpFormatter
    p.add_argument("--model", default="smollm2-135m", help="a name, a directory, or a .gguf file (default: %(default)s)")
    add_forms(p)
    p.add_argument("--prompt", default=PROMPT, metavar="TEXT", help="(default: one of 23 tokens)")
    p.add_argument("--rounds", type=positive, default=5, help="runs of each command (default: %(default)s)")
    add_outputs(p)
    p.set_defaults(seed=0)  # nothing is drawn
    args = p.read(argv)
    take_forms(args)
    check_outputs(args)
    check_peers(["transformers"])
    return args


def main(argv: Sequence[str]) -> int:
    """Run the bench -> 0, or 1 if a command failed."""
    with usage():
        args = options(argv)
    print(__doc__, flush=True)
    with reported("start", args, draw, prompt=args.prompt, rounds=args.rounds) as rows:
        rows += measure(args)
    return 1 if any("failed" in r for r in rows) else 0
