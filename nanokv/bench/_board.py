"""A leaderboard to read: as Markdown, narrow enough for a README, and as one page of HTML that needs nothing else.

The page has no script and loads nothing. Each measure is a small table, so that a phone shows one below the other; a
cell is the greener the better it is among those of its table, and what every colour says stands in the cell as a number.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import log
from typing import Any

from nanokv.bench._policies import called
from nanokv.policy import REGISTRY


@dataclass(frozen=True)
class Measure:
    """One of the things that are measured. worth: of a value, the better the higher."""

    field: str
    short: str
    title: str
    unit: str
    form: str
    worth: Callable[[float], float]


MEASURES = (
    Measure("found", "found", "codes found", "of {asked}, hidden in prose of {lengths} tokens and asked for at its end", "{:.0f}", float),
    Measure("ppl", "ppl", "perplexity", "of {targets} tokens of {text}, after {read} others", "{:.2f}", lambda x: -log(x)),
    Measure("mib", "MiB", "KV memory", "in MiB, after {tokens} tokens", "{:.0f}", lambda x: -log(x)),
    Measure("ms", "ms", "time", "for a token in milliseconds, after {tokens} tokens", "{:.0f}", lambda x: -x),
)


@dataclass(frozen=True)
class Board:
    """Rows of policies at budgets (None: a policy without one), and the facts of the run."""

    rows: Sequence[Mapping[str, Any]]
    budgets: Sequence[int]
    facts: Mapping[str, Any]

    @property
    def policies(self) -> list[str]:
        return list(dict.fromkeys(r["policy"] for r in self.rows))

    def value(self, policy: str, budget: int, field: str) -> float | None:
        """What was measured; a policy without a budget has it at every budget. None: nothing."""
        row = next(r for r in self.rows if r["policy"] == policy and r["budget"] in (budget, None))
        return row["kv_bytes"] / 2**20 if field == "mib" and "kv_bytes" in row else row.get(field)

    def shade(self, measure: Measure, policy: str, budget: int) -> float | None:
        """From 0, the worst value of a measure, to 1, the best."""
        every = [v for p in self.policies for b in self.budgets if (v := self.value(p, b, measure.field)) is not None]
        value = self.value(policy, budget, measure.field)
        if value is None:
            return None
        low, high = (extreme(map(measure.worth, every)) for extreme in (min, max))
        return (measure.worth(value) - low) / (high - low) if high > low else 1.0

    def shown(self, measure: Measure, policy: str, budget: int) -> str:
        """The value as text; a dash for none."""
        value = self.value(policy, budget, measure.field)
        return "–" if value is None else measure.form.format(value)

    def best(self, measure: Measure, policy: str, budget: int) -> bool:
        """Is it one of the few, full aside, that no other exceeds at this budget?"""
        rivals = [(v, p) for p in self.policies if p != "full" and (v := self.value(p, budget, measure.field)) is not None]
        top = max((measure.worth(v) for v, _ in rivals), default=None)
        winners = [p for v, p in rivals if measure.worth(v) == top]
        return policy in winners and 2 * len(winners) <= len(rivals)

    def unit(self, measure: Measure) -> str:
        """What its numbers count, in words."""
        asked = max((len(r.get("hits", "")) for r in self.rows), default=0)
        targets = max((r.get("targets", 0) for r in self.rows), default=0)
        lengths = " and ".join(map(str, self.facts["lengths"]))
        return measure.unit.format(**{**self.facts, "asked": asked, "targets": targets, "lengths": lengths})

    @property
    def origin(self) -> str:
        """Which model, when, and on what machine."""
        f = self.facts
        return f"{f['model']} in {f['dtype']}, seed {f['seed']}, {f['date']}, on {f['machine']}"

    @property
    def remarks(self) -> list[str]:
        """What a reader must know, and why a cell is empty."""
        said = ["The time is that of the median step; a policy that evicts many tokens at once pays for it in few of them."]
        if "quest" in self.policies:
            said.append("quest keeps every token, so its memory is that of full: its budget bounds what a step reads.")
        return [*said, *self.facts["notes"], *(f"{called(r['policy'], r['budget'])}: {r['failed']}" for r in self.rows if "failed" in r)]


def markdown(board: Board) -> str:
    """One table: what is found and the perplexity at every budget; bytes and time at the middle one."""
    middle = board.budgets[len(board.budgets) // 2]
    columns = [(m, b) for m in MEASURES for b in (board.budgets if m.field in ("found", "ppl") else [middle])]
    head = [f"{m.short} {b}" if i == 0 or columns[i - 1][0] != m else str(b) for i, (m, b) in enumerate(columns)]
    lines = [["", *head], ["---", *("--:" for _ in columns)]]
    for policy in board.policies:
        cells = (f"**{board.shown(m, policy, b)}**" if board.best(m, policy, b) else board.shown(m, policy, b) for m, b in columns)
        lines.append([f"`{policy}`", *cells])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    units = [f"{m.short}: {m.title} {board.unit(m)}" for m in MEASURES]
    remarks = ["Columns are budgets, in tokens kept per head; bold is the best of a column, full aside", *units, *board.remarks]
    return f"{table}\n\n" + "\n".join(f"- {r}" for r in remarks) + f"\n\n{board.origin}\n"


STYLE = """
:root { color-scheme: light dark; --ink: #1c2421; --soft: #66736d; --paper: #fbfbf8; --line: #dde2de; --good: 26, 140, 98; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6ebe8; --soft: #95a29b; --paper: #141917; --line: #2c3531; --good: 38, 160, 112; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1rem 4rem; max-width: 68rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.7rem; line-height: 1.2; }
h2 { margin: 0; font-size: 1.1rem; } h2::first-letter { text-transform: uppercase; }
p, li, dd { color: var(--soft); } p { margin: .2rem 0 .8rem; } .origin { font-size: .9rem; margin-bottom: 2rem; }
main { display: grid; gap: 2.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
table { width: 100%; border-collapse: separate; border-spacing: 2px; font-size: .9rem; font-variant-numeric: tabular-nums; }
th { font-weight: 600; text-align: right; padding: .25rem .4rem; } th:first-child { text-align: left; padding-left: 0; }
thead th { color: var(--soft); border-bottom: 1px solid var(--line); }
td { text-align: right; padding: .25rem .4rem; border-radius: 4px; background: rgba(var(--good), var(--v, 0)); }
td.best { font-weight: 700; }
tr.full > * { border-bottom: 1px solid var(--line); }
section p { font-size: .85rem; }
footer { margin-top: 2.5rem; font-size: .9rem; } dt { font-weight: 600; margin-top: .5rem; } dd { margin: 0; }
"""


def html(board: Board) -> str:
    """A page of its own."""
    sections = "\n".join(_section(board, m) for m in MEASURES)
    remarks = "\n".join(f"<li>{escape(remark)}</li>" for remark in board.remarks)
    ideas = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(_idea(name))}</dd>" for name in board.policies)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>What forgetting costs: {escape(str(board.facts['model']))}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>What forgetting costs and saves</h1>
<p class="origin">{escape(board.origin)}. Columns are budgets: tokens kept per head. Greener is better; bold is the best of a column, full aside.</p>
<main>
{sections}
</main>
<footer>
<ul>
{remarks}
</ul>
<dl>
{ideas}
</dl>
</footer>
</body>
</html>
"""


def _section(board: Board, measure: Measure) -> str:
    head = "".join(f'<th scope="col">{b}</th>' for b in board.budgets)
    lines = "\n".join(_line(board, measure, policy) for policy in board.policies)
    return (
        f"<section>\n<h2>{measure.title}</h2>\n<p>{escape(board.unit(measure))}</p>\n<table>\n"
        f'<thead><tr><th scope="col">policy</th>{head}</tr></thead>\n<tbody>\n{lines}\n</tbody>\n</table>\n</section>'
    )


def _line(board: Board, measure: Measure, policy: str) -> str:
    cells = ""
    for b in board.budgets:
        shade, best = board.shade(measure, policy, b), ' class="best"' if board.best(measure, policy, b) else ""
        colour = "" if shade is None else f' style="--v: {0.6 * shade:.2f}"'
        cells += f"<td{best}{colour}>{board.shown(measure, policy, b)}</td>"
    return f'<tr{" class=full" if policy == "full" else ""}><th scope="row">{escape(policy)}</th>{cells}</tr>'


def _idea(policy: str) -> str:
    """The first line of what its file says."""
    return (sys.modules[REGISTRY[policy].__module__].__doc__ or "").partition("\n")[0]
