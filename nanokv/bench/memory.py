"""Does memory really fall, and is it what was promised?

Each measurement is a fresh process: load the model, note what is resident, read a prompt and
answer a few tokens, note the highest that was ever resident. Planned is what `--plan` says for
everything beside the weights; measured is the rise. The prompt's keys and values of one layer, the
budget and the residual stream are all that should be there; on top come the buffers of the libraries.

As on the command line, malloc is told to return large pieces at once (process.py). What a process keeps resident still
scatters by some megabytes from one to the next. Beside a large row that is little; a small one is measured `--repeat`
times, and the median counts.
"""

import argparse
import ctypes
import json
import statistics
import subprocess
import sys

from nanokv.bench import progress
from nanokv.bench._output import add_outputs, check_outputs, figure, reported
from nanokv.bench._policies import called, numbers
from nanokv.options import Parser, positive, usage
from nanokv.process import return_large_pieces

SMALL = 256 << 20  # bytes of a row beside which the scatter counts


def resident(field: str) -> int:
    """Bytes: VmRSS (now) or VmHWM (the highest so far) of this process."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(field + ":"))


def rebase() -> int:
    """Give freed memory back, forget the old high-water mark, and say what is resident now."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    return resident("VmRSS")


def worker(args: argparse.Namespace) -> dict:
    """One measurement, in this process."""
    return_large_pieces()  # as the command line does
    import torch

    from nanokv import Engine, load, make
    from nanokv.memory import plan_prefill, remade

    torch.manual_seed(args.seed)
    model, _ = load(args.model, args.dtype, "cpu")
    policy = make(args.policy, **({"budget": args.budget} if args.budget else {}))
    tokens = torch.randint(0, model.config.vocab_size, (args.length,)).tolist()
    for _ in Engine(model, policy).generate(tokens[:64], 4):  # what torch allocates once, whatever the prompt
        pass
    engine = Engine(model, policy, args.chunk)
    before = rebase()
    for _ in engine.generate(tokens, args.new):
        pass
    made = remade("native", str(model.like.dtype).removeprefix("torch."))
    plan = plan_prefill(model.config, policy, args.length, args.new, args.chunk, engine.like.element_size(), made=made)
    measured = resident("VmHWM") - before
    return {
        "policy": args.policy, "budget": args.budget, "chunk": args.chunk, "tokens": args.length,
        "planned_bytes": plan.peak, "measured_bytes": measured, "over_plan": measured / plan.peak,
        "kv_and_scratch_bytes": plan.pools + plan.scratch, "pool_bytes": sum(kv.bytes for kv in engine.slots),
        "planned_pool_bytes": plan.pools, "prefill_s": engine.stats.prefill_s,
    }


def options(argv: list[str]) -> argparse.Namespace:
    """The command line. ValueError for what there is none of."""
    p = Parser("python -m nanokv.bench memory", __doc__)
    p.epilog = None
    p.add_argument("--model", default="smollm2-135m", help="a name, a directory, or a .gguf file (default: %(default)s)")
    p.add_argument("--dtype", default="float32", help="float32, bfloat16, float16 or auto (default: %(default)s)")
    p.add_argument("--lengths", default="2048,8192,32768", help="tokens of the prompts (default: %(default)s)")
    p.add_argument("--runs", default="full,snapkv:1024,h2o:1024:512", help="policy[:budget[:chunk]], with commas between them (default: %(default)s)")
    p.add_argument("--new", type=positive, default=8, help="tokens of an answer (default: %(default)s)")
    p.add_argument("--repeat", type=positive, default=3, help=f"processes for a row of less than {SMALL >> 20} MiB (default: %(default)s)")
    p.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    p.add_argument("--quick", action="store_true", help="2048 and 4096 tokens, unless lengths are given")
    for hidden in ("--policy", "--budget", "--chunk", "--length"):
        p.add_argument(hidden, type=str if hidden == "--policy" else int, help=argparse.SUPPRESS)
    add_outputs(p)
    if "--quick" in argv:
        p.set_defaults(lengths="2048,4096")
    args = p.read(argv)
    args.lengths = numbers("lengths", args.lengths)
    check_outputs(args)
    return args


def measured(args: argparse.Namespace, run: str, length: int) -> dict:
    """The row of one policy and length: that of the process with the median peak, and how far apart they were; or why not."""
    found = [alone(args, run, length)]
    while len(found) < args.repeat and found[-1].get("measured_bytes", SMALL) < SMALL:
        found.append(alone(args, run, length))
    if "failed" in found[-1]:
        return found[-1]
    peaks = [row["measured_bytes"] for row in found]
    return found[peaks.index(statistics.median_low(peaks))] | {"processes": len(peaks), "lowest_bytes": min(peaks), "highest_bytes": max(peaks)}


def alone(args: argparse.Namespace, run: str, length: int) -> dict:
    """One measurement in a process of its own: what it found, or why not."""
    policy, *given = run.split(":")
    dials = [f"--{name}={n}" for name, n in zip(("budget", "chunk"), given)]
    same = [f"--model={args.model}", f"--dtype={args.dtype}", f"--new={args.new}", f"--seed={args.seed}"]
    command = [sys.executable, "-m", "nanokv.bench", "memory", *same, f"--policy={policy}", f"--length={length}", *dials]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]  # a process that is killed says nothing
    return {"policy": policy, "tokens": length, "failed": said[-1]}


def draw(path: str, rows: list[dict]) -> None:
    """Measured over the length of the prompt, the plan as crosses."""
    found = [r for r in rows if "failed" not in r]
    with figure(path) as (axes,):
        for run in dict.fromkeys((r["policy"], r["budget"], r["chunk"]) for r in found):
            mine = [r for r in found if (r["policy"], r["budget"], r["chunk"]) == run]
            x, chunk = [r["tokens"] for r in mine], f", chunks of {run[2]}" if run[2] else ""
            (line,) = axes.plot(x, [r["measured_bytes"] / 2**20 for r in mine], label=f"{called(*run[:2])}{chunk}")
            axes.plot(x, [r["planned_bytes"] / 2**20 for r in mine], "x", color=line.get_color())
        axes.set(xlabel="tokens of the prompt", ylabel="MiB above the weights", title="Measured (lines) and planned (crosses)")
        axes.legend(fontsize="small")


def main(argv: list[str]) -> int:
    """Run the bench -> 0, or 1 if a measurement failed."""
    with usage():
        args = options(argv)
    if args.policy:
        print(json.dumps(worker(args)))
        return 0
    print(__doc__)
    with reported("memory", args, draw) as rows:
        for run in args.runs.split(","):
            for length in args.lengths:
                progress(f"{run} reads {length} tokens")
                rows.append(measured(args, run, length))
    return 1 if any("failed" in row for row in rows) else 0
