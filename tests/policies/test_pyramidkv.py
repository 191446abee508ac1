"""PyramidKV: the conserving split of the worked examples, and the oracle."""

import pytest
from snap_family import agree_often, example, picks

from nanokv.policies.pyramidkv import PyramidKV
from nanokv.policies.snapkv import SnapKV


def rows(n_layers: int, C: int, w: int, beta: float, n: int) -> list[int]:
    """What each layer keeps of n tokens, the window included, at capacity C: without the row that decoding needs."""
    policy = PyramidKV(budget=C + 1, window=w, recent=1, beta=beta)
    return [rows - 1 for rows in policy.plan(n_layers, n, 0)]


def test_conserving_rows():
    assert rows(4, 6, 2, 2, 12) == [8, 7, 5, 4]  # the official code: 8, 7, 6, 5, two too many
    many = rows(32, 64, 8, 20, 300)
    assert many[:4] == [117, 114, 110, 107] and many[-3:] == [18, 14, 11] and sum(many) == 2048
    more = rows(32, 2048, 8, 20, 8192)
    assert (more[0], more[-1], sum(more)) == (3986, 110, 65536)


def test_the_bottom_layer_is_clipped_to_the_text_and_the_mean_stays():
    clipped = rows(4, 20, 2, 20, 24)  # 2 a - a / beta = 35.1 > 22
    assert clipped[0] == 24 and sum(clipped) == 80


def test_a_text_that_fits_is_not_split():
    policy = PyramidKV(budget=64, window=8, recent=1)
    assert policy.plan(4, 60, 4) == [64] * 4
    assert policy.plan(4, 60, 5) != [64] * 4 and sum(policy.plan(4, 60, 5)) == 256


@pytest.mark.parametrize("beta, bottom, top", (
    (2, [[2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 7, 8]], [[4, 5], [6, 7]]),
    (20, [[2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 6, 7, 8, 9]], [[], []]),  # the top layer keeps its window alone
))
def test_kept_sets_of_the_worked_example(beta, bottom, top):
    engine = example(PyramidKV(budget=7, window=2, recent=1, kernel=3, pooling="avg", beta=beta))
    assert (picks(engine, 0), picks(engine, 1)) == (bottom, top)


def test_the_floor_of_sinks():
    without = PyramidKV(budget=7, window=2, recent=1, beta=20).plan(2, 12, 0)
    with_floor = PyramidKV(budget=7, window=2, recent=1, beta=20, sink=1).plan(2, 12, 0)
    assert (without, with_floor) == ([11, 3], [10, 4])


def test_it_is_snapkv_with_one_dial():
    assert vars(PyramidKV()) == vars(SnapKV(layers="pyramid"))


def test_the_oracle_agrees():
    agree_often(PyramidKV)
