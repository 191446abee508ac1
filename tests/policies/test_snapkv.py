"""SnapKV: the worked example, the rule under a hard budget, and the oracle."""

import pytest
import torch
from snap_family import EXAMPLE, agree_often, example, picks
from torch import Tensor
from worked import by_position, kept, replay, step

from nanokv.policies.snapkv import SnapKV
from nanokv.policy import make

both_layers = pytest.mark.parametrize("layer", (0, 1))
both_pools = pytest.mark.parametrize("pooling", ("avg", "max"))


def snap(budget: int = 7, **dials: object) -> SnapKV:
    """The example's capacity C = 6 and the token being decoded."""
    return SnapKV(**dict(budget=budget, window=2, recent=1, kernel=3) | dials)


def votes(dials: dict, layer: int, per_query_head: bool = False) -> Tensor:
    """Votes of the ten prefix tokens [H, 10], read off slots that hold the whole text."""
    engine = example(snap(99, **dials), per_query_head)
    marks = by_position(engine, engine.slots[layer].marks["votes"], layer)
    assert all(head[10] == head[11] > 1 for head in marks), "the window ranks above all votes"
    return torch.tensor([[head[p] for p in range(10)] for head in marks])


@both_layers
def test_votes_of_single_query_heads(layer):
    want = torch.tensor(EXAMPLE[layer]["vote_sum_per_qhead"]) / 2  # a mean over the window, not a sum
    assert (votes({"kernel": 1}, layer, per_query_head=True) - want).abs().max() < 1e-5
    for pooling in ("avg", "max"):
        want = torch.tensor(EXAMPLE[layer][f"snapkv_pooled_sum_per_qhead_{pooling}"]) / 2
        assert (votes({"pooling": pooling}, layer, per_query_head=True) - want).abs().max() < 1e-5
        prefix = picks(example(snap(pooling=pooling), per_query_head=True), layer)
        assert prefix == [sorted(head) for head in EXAMPLE[layer][f"snapkv_prefix_kept_per_qhead_{pooling}"]]


@both_layers
@both_pools
def test_scores_and_kept_sets_per_kv_head(layer, pooling):
    want = torch.tensor(EXAMPLE[layer][f"gqa_mean_score_{pooling}"])
    assert (votes({"pooling": pooling}, layer) - want).abs().max() < 1e-5
    engine = example(snap(pooling=pooling))
    assert picks(engine, layer) == [sorted(head) for head in EXAMPLE[layer][f"gqa_mean_prefix_kept_{pooling}"]]
    kv = engine.slots[layer]
    for h, pos in enumerate(kv.pos):
        where = kv.v.view(2, -1, 4)[h, pos >= 0]
        assert where[:, 0].tolist() == pos[pos >= 0].tolist() and (where[:, 1] == h).all(), "K and V move with their pos"


def test_group_max_comes_before_the_pool():
    engine = example(snap(group="max", pooling="avg"))
    assert picks(engine, 0) == [[4, 5, 6, 7], [1, 2, 3, 8]]
    assert picks(engine, 1) == [[4, 5, 8, 9], [3, 5, 6, 7]]
    by_head = torch.tensor(EXAMPLE[0]["vote_sum_per_qhead"]).view(2, 2, 10).amax(1) / 2
    assert (votes({"kernel": 1, "group": "max"}, 0) - by_head).abs().max() < 1e-5


def test_under_a_hard_budget_picks_make_room_and_then_the_oldest_of_the_answer():
    Q = torch.zeros(1, 24, 2)  # all keys are worth the same, so the newest loses
    engine = replay(snap(8, prompt_share=0.5), Q, Q, Q)
    engine.extend(range(12))
    assert kept(engine) == [[0, 1, 2, 3, 4, 10, 11]]
    for t, want in ((12, [0, 1, 2, 3, 4, 10, 11, 12]), (13, [0, 1, 2, 3, 10, 11, 12, 13]),
                    (14, [0, 1, 2, 10, 11, 12, 13, 14]), (15, [0, 1, 10, 11, 12, 13, 14, 15]),  # 4 of 8 rows: half
                    (16, [0, 1, 10, 11, 13, 14, 15, 16]), (17, [0, 1, 10, 11, 14, 15, 16, 17])):
        step(engine, t)
        assert kept(engine) == [want]
    engine.extend([18, 19])  # the next turn votes over everything, the answer too
    assert kept(engine) == [[0, 1, 10, 11, 14, 18, 19]]


def test_without_a_share_the_prompt_goes_before_any_of_the_answer():
    Q = torch.zeros(1, 8, 2)
    engine = replay(snap(3, window=1, recent=0, prompt_share=0.0), Q, Q, Q)
    engine.extend([0])
    for t in range(1, 5):
        step(engine, t)
    assert kept(engine) == [[2, 3, 4]]  # 0 went, then 1


def test_a_token_without_any_vote_is_still_one_of_the_prompt():
    K = torch.zeros(1, 12, 2)
    K[0, 3] = 100.0  # beside it every other weight is 0 exactly
    engine = replay(snap(9, kernel=1), K + 100, K, K)
    engine.extend(range(8))
    for t, want in ((8, [0, 1, 2, 3, 4, 5, 6, 7, 8]), (9, [0, 1, 2, 3, 4, 6, 7, 8, 9]), (10, [0, 1, 2, 3, 6, 7, 8, 9, 10])):
        step(engine, t)
        assert kept(engine) == [want]


def test_defaults_leave_room_in_a_small_budget():
    assert (make("snapkv").window, make("snapkv").recent) == (32, 16)
    assert (make("snapkv", budget="20").window, make("snapkv", budget="20").recent) == (10, 10)
    assert make("snapkv", window="8").recent == 8


@pytest.mark.parametrize("dials, words", (
    (dict(kernel=4), "kernel must be odd, not 4"),
    (dict(window=8, recent=9), "window must be from recent, 9, to 128, not 8"),
    (dict(window=129), "not 129"),
    (dict(window=0), "window must be a whole number of at least 1, not 0"),
    (dict(prompt_share=1.5), "prompt_share must be a number from 0 to 1, not 1.5"),
    (dict(pooling="min"), "pooling must be max or avg, not 'min'"),
    (dict(group="sum"), "group must be mean or max, not 'sum'"),
    (dict(budget=32, window=32), "a budget of 32 slots cannot hold .*window 32 .* = 33"),
))
def test_what_cannot_be_is_said_in_numbers(dials, words):
    with pytest.raises(ValueError, match=words):
        make("snapkv", **dials)


def test_the_oracle_agrees():
    agree_often(SnapKV)
