"""Ada-KV: the conserving allocation of the worked example, real ragged storage, and the oracle."""

import pytest
import torch
from snap_family import EXAMPLE, agree_often, example, picks
from worked import replay, step

from nanokv.engine import Engine
from nanokv.policies.adakv import AdaKV
from nanokv.policies.snapkv import SnapKV


def ada(floor_ratio: float, pooling: str = "max", per_query_head: bool = False) -> Engine:
    policy = AdaKV(budget=7, window=2, recent=1, kernel=3, pooling=pooling, floor_ratio=floor_ratio)
    return example(policy, per_query_head)


@pytest.mark.parametrize("layer", (0, 1))
@pytest.mark.parametrize("pooling", ("avg", "max"))
@pytest.mark.parametrize("floor_ratio", (0.0, 0.2, 0.5))
def test_shares_and_kept_sets_of_the_worked_example(layer, pooling, floor_ratio):
    want = EXAMPLE[layer][f"ada_{pooling}_alpha{floor_ratio}"]
    engine = ada(floor_ratio, pooling)
    kv = engine.slots[layer]
    assert kv.shares == [b + 2 + 1 for b in want["B_conserving"]]  # + window + the token being decoded
    assert kv.k.shape == kv.v.shape == (14, 4), "the pool is the budget, whatever the shares"
    assert picks(engine, layer) == want["kept_conserving"]
    for h, (base, share) in enumerate(zip(kv.base.tolist(), kv.shares)):
        where = kv.v[base : base + share - 1]
        assert where[:, 0].tolist() == kv.pos[h, : share - 1].tolist() and (where[:, 1] == h).all()


def test_heads_of_their_own_without_a_floor():
    """Four heads: by need alone one keeps nothing but its window; a floor of 0.2 gives it a row."""
    by_need = ada(0.0, per_query_head=True).slots[1]
    assert [s - 1 for s in by_need.shares] == [7, 2, 7, 8]
    assert [s - 1 for s in ada(0.2, per_query_head=True).slots[1].shares] == [7, 3, 7, 7]  # 4.8, .8, 4.8, 5.6 of 16
    assert [s - 1 for s in ada(1.0, per_query_head=True).slots[1].shares] == [6, 6, 6, 6]


def test_the_first_overflow_sets_the_shares_also_while_decoding():
    T = 20
    K = torch.zeros(2, T, 4)
    K[1, :2, 0] = 9.0  # head 0 looks at all tokens alike, head 1 at two of them
    Q = torch.ones(2, T, 4)
    engine = replay(AdaKV(budget=12, window=2, recent=1, kernel=1, floor_ratio=0.0, prompt_share=1.0), Q, K, K)
    engine.extend(range(11))
    step(engine, 11)
    kv = engine.slots[0]
    assert kv.shares == [12, 12], "it all fits"
    step(engine, 12)
    for t in range(13, T):
        assert kv.shares == [13, 11] and kv.live.sum(1).tolist() == [13, 11]
        step(engine, t)


def test_it_is_snapkv_with_one_dial():
    assert vars(AdaKV()) == vars(SnapKV(heads="adaptive"))


@pytest.mark.parametrize("layers", ("uniform", "pyramid"))
def test_the_oracle_agrees(layers):
    agree_often(AdaKV, layers=layers)
