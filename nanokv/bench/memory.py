"""Does memory really fall, and is it what was promised?

Each measurement is a fresh process: load the model, note what is resident, read a prompt and
answer a few tokens, note the highest that was ever resident. Planned is what `--plan` says for
everything beside the weights; measured is the rise. The prompt's keys and values of one layer, the
budget and the residual stream are all that should be there.
"""

import argparse
import ctypes
import json
import subprocess
import sys

from nanokv.bench import progress, report


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
    import torch

    from nanokv import Engine, load, make
    from nanokv.memory import plan_prefill

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
    plan = plan_prefill(model.config, policy, args.length, args.new, args.chunk, engine.like.element_size())
    measured = resident("VmHWM") - before
    return {
        "policy": args.policy, "budget": args.budget, "chunk": args.chunk, "tokens": args.length,
        "planned_bytes": plan.peak, "measured_bytes": measured, "over_plan": measured / plan.peak,
        "kv_and_scratch_bytes": plan.pools + plan.scratch, "pool_bytes": sum(kv.bytes for kv in engine.slots),
        "planned_pool_bytes": plan.pools, "prefill_s": engine.stats.prefill_s,
    }


def main(argv: list[str]) -> None:
    """Run the bench."""
    p = argparse.ArgumentParser(prog="python -m nanokv.bench memory", description=__doc__, allow_abbrev=False)
    p.add_argument("--model", default="smollm2-135m")
    p.add_argument("--dtype", default="float32")
    p.add_argument("--lengths", default="2048,8192,32768")
    p.add_argument("--runs", default="full,snapkv:1024,h2o:1024:512", help="policy[:budget[:chunk]], separated by commas")
    p.add_argument("--new", type=int, default=8)
    p.add_argument("--seed", type=int, default=0)
    for hidden in ("--policy", "--budget", "--chunk", "--length"):
        p.add_argument(hidden, type=str if hidden == "--policy" else int, help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.policy:
        print(json.dumps(worker(args)))
        return
    print(__doc__)
    rows = []
    for run in args.runs.split(","):
        policy, *numbers = run.split(":")
        options = [f"--{name}={n}" for name, n in zip(("budget", "chunk"), numbers)]
        for length in args.lengths.split(","):
            progress(f"{run} reads {length} tokens")
            same = [f"--model={args.model}", f"--dtype={args.dtype}", f"--new={args.new}", f"--seed={args.seed}"]
            command = [sys.executable, "-m", "nanokv.bench", "memory", *same, f"--policy={policy}", f"--length={length}", *options]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                rows.append({"policy": policy, "tokens": int(length), "error": done.stderr.strip().splitlines()[-1]})
            else:
                rows.append(json.loads(done.stdout.splitlines()[-1]))
    progress("")
    report("memory", rows, args.model, args.dtype, args.seed)
