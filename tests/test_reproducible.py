"""The same seed is the same table: in a second run to the digit, on another number of threads in what counts."""

import json

import pytest
import torch

from nanokv.bench.__main__ import main

pytestmark = pytest.mark.slow
POLICIES = ["--policies", "full,streaming_llm,h2o,adakv,quest"]
RUNS = {
    "needle": ["--prompts", "2", "--lengths", "300", "--budgets", "96", *POLICIES],
    "perplexity": ["--tokens", "80", "--budgets", "48", *POLICIES],
    "reasoning": ["--kinds", "copy", "--prompts", "1", "--tokens", "30", "--budgets", "96", *POLICIES],
}


def rows(capsys, bench: str, threads: int, *more: str) -> list[dict]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert main([bench, *RUNS[bench], *more]) == 0
    finally:
        torch.set_num_threads(before)
    return json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]


@pytest.mark.parametrize("bench", RUNS)
def test_a_seed_is_a_table(smollm2, capsys, bench):
    one = rows(capsys, bench, 1)
    assert rows(capsys, bench, 1) == one and not any("failed" in r for r in one)
    two = rows(capsys, bench, 2)
    for a, b in zip(one, two, strict=True):
        assert (a["policy"], a["budget"]) == (b["policy"], b["budget"])
        assert a.get("hits") == b.get("hits") and a.get("lines") == b.get("lines")
        assert f"{a.get('ppl', 0):.4g}" == f"{b.get('ppl', 0):.4g}"

