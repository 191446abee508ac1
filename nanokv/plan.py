"""The promise: what a run will take, said before it starts, refused if it does not fit.

The insight: with a fixed budget every byte is known in advance, so "will it fit?" is arithmetic, and
so is the question behind it: how long may the text be? Nothing here reads a weight.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from reprlib import repr as brief

from .later import torch
from .memory import GROUP, Prefill, Remade, kv_bytes, plan_prefill, weight_bytes
from .policy import Policy
from .shape import ModelConfig

ENDLESS = 1 << 34  # tokens: as good as any length
ALL_THERE_IS = 1 << 62  # bytes

REMARKS = {
    "int8": "8 bits a weight, a 16-bit scale per row",
    "int4": f"layers: 4 bits a weight, a 16-bit scale and zero for every {GROUP} ({4 + 32 / GROUP:.0f} bits); embedding and head: 8 bits",
}


def size(text: str) -> int:
    """Bytes of "24GiB", "16 GB", "800MiB". ValueError for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?\s*", text, re.I)
    if not found:
        raise ValueError(f"a size of memory looks like 24GiB or 800MB, not {brief(text)}")
    unit = (found[2] or "").lower()
    base = 1024 if unit.endswith("i") else 1000
    n = float(found[1]) * base ** (" kmgt".index(unit[0]) if unit else 0)
    if n > ALL_THERE_IS:
        raise ValueError(f"no machine has so much memory: {brief(text)}")
    return int(n)


def human(n: float) -> str:
    """Bytes, readable: 1.5 GiB, 20.3 MiB, 812 B."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(n) >= scale:
            return f"{n / scale:,.2f} {unit}"
    return f"{n:.0f} B"


def available(device: str = "cpu") -> int:
    """Bytes that a program could take now, of a GPU's memory or of this machine's and its container's; 2^62 if nobody says."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    found = [ALL_THERE_IS]
    try:
        with open("/proc/meminfo") as f:
            found += [int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable")]
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            found += [int(text) - int(used.read()) for text in [limit.read().strip()] if text.isdecimal()]
    except OSError:  # not Linux, or no container: then that does not limit us
        pass
    return min(found)


@dataclass(frozen=True)
class Plan:
    """What one run takes, in bytes."""

    config: ModelConfig
    policy: Policy
    prompt: int  # tokens
    new: int
    chunk: int | None
    itemsize: int
    weights: str = "native"
    kv_itemsize: int | None = None  # of keys and values; None: as all other numbers
    made: Remade = Remade()  # what matrices take that are made for a long text

    @property
    def kv_number(self) -> int:
        """Bytes of a number in a key or a value."""
        return self.kv_itemsize or self.itemsize

    @property
    def prefill(self) -> Prefill:
        return plan_prefill(self.config, self.policy, self.prompt, self.new, self.chunk, self.itemsize, self.kv_itemsize, self.made)

    @property
    def peak(self) -> int:
        """Weights and everything else, at the worst moment."""
        return weight_bytes(self.config, self.weights, self.itemsize) + self.prefill.peak

    def lines(self) -> list[tuple[str, int, str]]:
        """(what, bytes, remark) of the table."""
        c, p, tokens = self.config, self.prefill, self.prompt + self.new
        per_token = kv_bytes(c, 1, self.kv_number)
        rows = self.policy.plan(c.n_layers, self.prompt, self.new)
        mean = sum(rows) / len(rows)
        remark = REMARKS.get(self.weights, f"{8 * self.itemsize} bits a weight")
        full = kv_bytes(c, tokens, self.kv_number)
        read = sum(self.policy.reads(layer, n, tokens) for layer, n in enumerate(rows)) / c.n_layers
        return [
            ("weights", weight_bytes(c, self.weights, self.itemsize), remark),
            ("keys and values", p.pools, f"{mean:,.0f} slots a head x {human(per_token)} a token; full would hold {human(full)}"),
            ("read a token", int(read) * per_token, "keys and values that one decode step reads"),
            ("bookkeeping", p.bookkeeping, "positions, free slots, the policy's marks and state"),
            ("scratch", p.scratch, "one layer's keys and values while a text is read"),
            ("activations", p.activations, "the residual stream and one block of rows"),
            ("peak", self.peak, f"prompt {self.prompt:,} + {self.new:,} new tokens"),
        ]


def table(plan: Plan) -> str:
    """The plan as text, the total last."""
    return "\n".join(f"{what:16} {human(n):>12}   {remark}" for what, n, remark in plan.lines())


def most(fits: Callable[[int], bool], limit: int) -> int:
    """The largest n up to `limit` that fits, by bisection; 0 if none does."""
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def longest(plan: Plan, limit: int) -> int:
    """Most tokens, prompt and the plan's new ones together, whose peak stays within `limit` bytes; ENDLESS or more: no end."""
    prompt = most(lambda n: replace(plan, prompt=n).peak <= limit, ENDLESS)
    return prompt and plan.new + prompt


def largest_budget(plan: Plan, limit: int) -> int:
    """The largest budget with which the same run stays within `limit` bytes; 0 if none does, or there is no such dial."""
    dials = fields(plan.policy)
    if not any(f.name == "budget" for f in dials):
        return 0
    follow = {f.name: None for f in dials if f.default is None}  # dials that follow the budget unless they were set

    def policy(budget: int) -> Policy:
        try:
            return replace(plan.policy, budget=budget)
        except ValueError:
            return replace(plan.policy, budget=budget, **follow)

    def fits(budget: int) -> bool:
        try:
            return replace(plan, policy=policy(budget)).peak <= limit
        except ValueError:  # too small for what the policy protects: only a larger one can be an answer
            return True

    budget = most(fits, plan.policy.budget)
    try:
        return budget and policy(budget).budget
    except ValueError:
        return 0


def largest(plan: Plan, limit: int) -> str:
    """What is in the way: the weights, if they alone are beyond the limit; else what takes most beside them."""
    sizes = {what: n for what, n, _ in plan.lines() if what not in ("read a token", "peak")}
    weights = sizes.pop("weights")
    if weights > limit:
        return f"its weights alone take {human(weights)}"
    most = max(sizes, key=sizes.get)
    return f"most goes into {most}, {human(sizes[most])} (weights: {human(weights)})"


def verdict(plan: Plan, limit: int) -> str:
    """Does it fit, and if not, what would? Empty if it fits."""
    if plan.peak <= limit:
        return ""
    in_chunks = replace(plan, chunk=512)
    if not plan.chunk and in_chunks.peak <= limit:
        way = "--chunk 512 would fit"
    elif budget := largest_budget(plan, limit):
        way = f"a budget of {budget:,} would fit"
    elif (tokens := longest(plan, limit) - plan.new) > 0:
        way = f"a prompt of {tokens:,} tokens would fit" + (
            "" if plan.policy.budget else ", or a policy with a budget, such as --policy streaming_llm"
        )
    else:
        way = f"no budget makes it fit: {largest(plan, limit)}"
    return f"{human(plan.peak)} are planned, {human(limit)} are there: {way}"


def show(plan: Plan, name: str, limit: int) -> str:
    """Print the plan and the longest context that fits -> the verdict."""
    from .policies.full import Full

    c = plan.config
    print(f"{name}: {c.n_layers} layers, {c.n_heads} query heads, {c.n_kv_heads} KV heads of {c.head_dim}, {8 * plan.itemsize} bits; "
          f"policy {plan.policy.name}, {plan.prompt + plan.new:,} tokens\n")
    print(f"{table(plan)}\n\nlongest context in {human(limit)}:")
    for policy in dict.fromkeys((Full(), plan.policy)):
        found = longest(replace(plan, policy=policy), limit)
        print(f"  {policy.name:16} {'any length' if found >= ENDLESS else f'{found:,} tokens' if found else 'none'}")
    return verdict(plan, limit)
