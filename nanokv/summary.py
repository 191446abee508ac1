"""What a run did and took: the dictionary that `--json` prints, and the same read aloud in one line.

Planned and allocated bytes stand side by side: a promise that is not checked is a guess.
"""

from collections.abc import Sequence
from typing import Any

from .engine import Engine
from .memory import kv_bytes
from .plan import Plan


def summary(engine: Engine, plan: Plan, prompt: Sequence[int], answer: Sequence[int], load_s: float) -> dict[str, Any]:
    """The run in names that stay stable. Bytes are bytes, times seconds, rates tokens a second."""
    stats = engine.stats
    timings = {"load_s": load_s, "compile_s": engine.compile_s, "prefill_s": stats.prefill_s, "decode_s": stats.decode_s}
    timings |= {n: getattr(stats, n) for n in ("prefill_tokens_per_s", "decode_tokens_per_s")}
    return {
        "text": "",
        "token_ids": list(answer),
        "prompt_token_ids": list(prompt),
        "finish_reason": stats.finish_reason,
        "usage": {"prompt_tokens": len(prompt), "new_tokens": len(answer)},
        "timings": {name: round(value, 6) for name, value in timings.items()},
        "kv": memory_held(engine, plan, len(prompt) + len(answer)),
        "seed": None,
        "model": engine.model.config.name,
        "dtype": str(engine.model.like.dtype).removeprefix("torch."),
        "device": str(engine.like.device),
    }


def memory_held(engine: Engine, plan: Plan, tokens: int) -> dict[str, Any]:
    """What the slots hold now, and what was planned for them. live and evicted are means over heads and layers."""
    slots, policy = engine.slots, engine.policy
    live = sum(float(kv.live.sum(1).float().mean()) for kv in slots) / max(len(slots), 1)
    held = [int(kv.pos[kv.live].min()) for kv in slots if bool(kv.live.any())]
    return {
        "policy": policy.name,
        "budget": policy.budget,
        "dtype": str(engine.like.dtype).removeprefix("torch."),
        "slots_per_head": [sum(kv.shares) // len(kv.shares) for kv in slots],
        "bytes": sum(kv.bytes for kv in slots),
        "bytes_planned": plan.prefill.pools,
        "bytes_full": kv_bytes(engine.model.config, tokens, engine.like.element_size()),
        "live": round(live, 2),
        "evicted": round(engine.seen - live, 2),
        "oldest_position": min(held, default=None),
        "peak_prefill_bytes": plan.prefill.peak,
    }


def stats_line(r: dict[str, Any]) -> str:
    """The summary in one line. Decode's rate counts neither the prefill nor the first token."""
    kv, usage, timings = r["kv"], r["usage"], r["timings"]
    rows = sorted(set(kv["slots_per_head"])) or [0]
    slots = "-".join(map(str, dict.fromkeys((rows[0], rows[-1]))))  # a pyramid's layers differ
    kept = "as planned" if kv["bytes"] == kv["bytes_planned"] else f"of {kv['bytes_planned'] / 2**20:.1f} MiB planned"
    full = f" (full {kv['bytes_full'] / 2**20:.1f} MiB)" if kv["budget"] is not None else ""
    compiled = [f"compiled in {timings['compile_s']:.1f} s"] if timings["compile_s"] else []
    parts = compiled + [
        f"prompt {usage['prompt_tokens']} tok {timings['prefill_tokens_per_s']:.1f} tok/s",
        f"decode {usage['new_tokens']} tok {timings['decode_tokens_per_s']:.1f} tok/s",
        f"kv {slots} slots x {len(kv['slots_per_head'])} layers {kv['bytes'] / 2**20:.1f} MiB {kept}{full}",
        f"live {kv['live']:.0f}, evicted {kv['evicted']:.0f}, oldest {kv['oldest_position']}",
        r["finish_reason"],
    ]
    return " | ".join(parts + ([f"seed {r['seed']}"] if r["seed"] is not None else []))
