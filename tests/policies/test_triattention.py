"""TriAttention: the worked example of its official code, and the paper's series once more with lists."""

import cmath
import dataclasses
import math
import random
from collections.abc import Iterator

import pytest
import torch
from conftest import tiny
from torch import Tensor
from worked import Delicate, Turn, agree, conversation, kept, replay

from nanokv.engine import Engine
from nanokv.policies.triattention import TriAttention
from nanokv.policy import victims
from nanokv.query_stats import QueryStats, expected, z_scores
from nanokv.rope import rotate
from nanokv.slots import Slots

# ---- the worked example: 2 layers, 2 KV heads, 2 query heads each, 6 tokens ----

POS, NOW, FREQS = torch.tensor([0, 1, 2, 5, 8, 9]), torch.tensor([10]), torch.tensor([1.0, 0.01])
KEYS = torch.tensor([[[[((13 * l + 31 * h + 17 * s + 7 * d) % 11 - 5) / 4 for d in range(4)] for s in range(6)]
                      for h in range(2)] for l in range(2)])  # fmt: skip
MEAN = torch.tensor([[[((3 * l + 5 * h + 3 * f) % 7 - 3) / 4 for f in range(2)] + [((5 * l + 3 * h + 5 * f) % 7 - 3) / 4 for f in range(2)]
                      for h in range(4)] for l in range(2)])  # fmt: skip
SIZE = torch.tensor([[[1.5 + (h + f + l) / 8 for f in range(2)] for h in range(4)] for l in range(2)])

RAW = [
    [[3.343536, 1.454870, 1.361544, 0.836870, 1.531421, 1.216801], [1.736155, 2.053194, 3.258825, 2.493711, 2.465053, 1.955597],
     [2.239206, 0.936840, 3.616231, 1.199367, 3.210876, 0.968205], [2.049265, 2.403575, 2.417220, 1.883880, 2.545630, 2.249644]],
    [[2.836195, 2.138311, 2.804750, 2.082834, 0.913699, 3.141704], [1.874034, 2.078081, 1.861395, 3.276566, 1.611027, 3.475631],
     [2.734807, 2.273464, 3.922794, 2.913871, 3.197502, 2.413061], [3.472933, 2.473733, 2.256596, 2.907833, 1.692733, 2.322456]],
]  # fmt: skip
RAW_17 = [[2.422279, 1.503240, 1.653339, 1.169695, 1.564288, 1.438173], [2.446890, 1.913574, 3.129572, 2.099920, 2.624214, 2.001463],
          [2.476360, 1.558645, 3.040925, 1.625103, 3.278998, 1.574592], [2.523008, 2.109642, 3.053734, 1.942700, 3.184922, 2.057691]]
Z = [[2.146899, -.211402, -.327935, -.983075, -.115816, -.508670], [-1.190972, -.552009, 1.877825, .335811, .278053, -.748707]]
GROUP_MAX = [
    [[2.146899, -.211402, 1.877825, .335811, .278053, -.508670], [.195583, .636606, 1.473504, -.769417, 1.258678, -.037479]],
    [[.702634, -.246543, .659866, 1.249312, -1.027806, 1.521473], [1.712676, -.085129, 1.854989, .695922, .527560, -.357314]],
]  # fmt: skip
GROUP_MAX_17 = [[2.061263, -.315248, 1.804952, -.639567, .605199, -.483677], [.304059, -.755302, 1.177154, -.887752, 1.445719, -.861431]]
OVER_LAYERS = [[1.424766, -.228973, 1.268846, .792561, -.374876, .506402], [.954130, .275738, 1.664247, -.036748, .893119, -.197396]]
PINNED = [[.304892, 1.269065, .586258, -.043597, .534340], [.409654, 1.519071, .402624, .751933, -.120778]]


def same(got: Tensor, want: list, atol: float = 1e-5) -> None:
    torch.testing.assert_close(got, torch.tensor(want), atol=atol, rtol=0)


def raw(layer: int = 0, keys: Tensor = KEYS, mean: Tensor = MEAN, size: Tensor = SIZE, now: Tensor = NOW, **dials: object) -> Tensor:
    """What the shipped formula makes of the example [Hq, N]."""
    keys, mean, size = rotate(keys[layer], POS, FREQS), mean[layer].unflatten(0, (2, -1)), size[layer].unflatten(0, (2, -1))
    return expected(keys, mean, size, now, FREQS, **{"reach": 4} | dials).flatten(0, 1)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("stats") / "example.safetensors"
    QueryStats(MEAN, SIZE, FREQS).save(path)
    return str(path)


def memory(policy: TriAttention) -> list[Slots]:
    """The example's tokens in the slots of both layers."""
    layers = []
    for layer in (0, 1):
        kv = Slots.empty(6, 2, 4, KEYS, state=policy.state(2, 2, 6, 4), layer=layer)
        kv.freqs = FREQS
        kv.k.copy_(rotate(KEYS[layer], POS, FREQS).flatten(0, 1))
        kv.pos.copy_(POS)
        kv.now.copy_(NOW)
        kv.room = 0
        policy.begin(kv)
        layers.append(kv)
    return layers


def example(file: str, **dials: object) -> TriAttention:
    """Of 6 tokens 3 stay, nothing is protected, and distances are 1, 2, 4, 8, 16."""
    return TriAttention(**dict(budget=6, window=0, interval=3, reach=4, stats=file) | dials)


def stays(policy: TriAttention) -> list[list[set[int]]]:
    """Which slots stay, by layer and head."""
    return [[set(range(6)) - set(head) for head in gone.tolist()] for gone in victims(policy, memory(policy), 3)]


def test_raw_scores_of_the_worked_example():
    for layer in (0, 1):
        same(raw(layer), RAW[layer])
    same(raw(reach=16), RAW_17)  # the official code, in float32, is up to 2.3e-4 away from these


def test_variants_of_the_worked_example():
    same(raw(aggregate="max")[0], [4.106015, 2.426690, 2.520354, 2.331379, 2.132917, 2.729677])
    same(raw(mlr=False)[0], [5.444639, 2.923173, 3.183716, 2.544335, 3.034023, 3.042474])
    same(raw(trig=False)[0], [2.106057, 1.296611, 2.092816, 1.220374, 1.920495, 1.269336])


def test_mistakes_would_show_in_the_worked_example():
    """t0 one too low, the other pairing, statistics averaged over the group: each gives its own, wrong numbers."""
    late = raw(now=NOW - 1)[0]
    same(late, [3.141693, 1.829033, 0.962138, 0.738674, 1.178392, 1.912394])
    paired = raw(keys=KEYS[..., [0, 2, 1, 3]])[0]
    same(paired, [3.160370, 1.123269, 1.817914, 2.106034, 1.783831, 2.260257])
    mean, size = (x.unflatten(1, (2, 2)).mean(2) for x in (MEAN, SIZE))
    averaged = raw(mean=mean, size=size)[0]
    same(averaged, [3.534214, 2.416093, 3.222469, 2.381316, 2.787021, 2.345136])
    assert all((x - raw()[0]).abs().max() > 0.1 for x in (late, paired, averaged))


def test_scores_of_the_worked_example(file):
    same(z_scores(raw()[None, :2], torch.ones(1, 6, dtype=torch.bool))[0], Z)
    policy = example(file)
    for kv, want in zip(memory(policy), GROUP_MAX):
        same(policy.score(kv), want)
    far = example(file, reach=16)
    same(far.score(memory(far)[0]), GROUP_MAX_17, 5e-4)


def test_dials_reach_the_formula(file):
    for dials in (dict(aggregate="max"), dict(mlr=False), dict(trig=False), dict(reach=16)):
        policy = example(file, **dials)
        want = z_scores(raw(**dials).view(2, 2, 6), torch.ones(2, 6, dtype=torch.bool)).amax(1)
        torch.testing.assert_close(policy.score(memory(policy)[0]), want)
        assert (want - torch.tensor(GROUP_MAX[0])).abs().max() > 0.01


def test_what_the_worked_example_keeps(file):
    assert stays(example(file)) == [[{0, 2, 3}, {2, 4, 1}], [{5, 3, 0}, {2, 0, 3}]]


def test_one_choice_for_all_layers(file):
    policy = example(file, scope="model")
    layers = memory(policy)
    for got in policy.across([policy.score(kv) for kv in layers]):
        same(got, OVER_LAYERS)
    assert stays(policy) == [[{0, 2, 3}, {2, 0, 4}]] * 2


def test_what_is_pinned_is_not_judged(file):
    """The z-score is over slots 1 to 5 then; and in the same way over what the window leaves."""
    policy = example(file, sink=1, scope="model")
    same(policy.across([policy.score(kv) for kv in memory(policy)])[0][:, 1:], PINNED)
    assert stays(policy) == [[{0, 2, 3}, {0, 2, 4}]] * 2
    windowed = example(file, window=2, interval=1)
    want = z_scores(raw().view(2, 2, 6), (POS < 8).expand(2, -1)).amax(1)
    torch.testing.assert_close(windowed.score(memory(windowed)[0]), want)


def test_where_a_token_stands_does_not_matter(file):
    policy = example(file)
    for seed, kv in enumerate(memory(policy) * 5):
        before, order = policy.score(kv), torch.randperm(6, generator=torch.Generator().manual_seed(seed))
        kv.k.copy_(kv.k.view(2, 6, 4)[:, order].flatten(0, 1))
        kv.pos.copy_(kv.pos[:, order])
        torch.testing.assert_close(policy.score(kv), before[:, order])


# ---- statistics, dials ----


def test_without_a_file_the_prompt_is_the_statistics():
    """Queries as they are before RoPE, of everything that was read, and of nothing that was decoded."""
    Q, K = torch.randn(1, 6, 20, 8), torch.randn(1, 2, 20, 8)
    freqs = torch.tensor([1.0, 0.2, 0.03, 0.0])
    for chunk in (None, 3):
        engine = replay(TriAttention(budget=30, window=1), Q, K, K, freqs, chunk)
        engine.extend(range(9))
        engine.decode(torch.tensor([9]))
        engine.extend(range(10, 15))
        asked = Q[0, :, [*range(9), *range(10, 15)]].unflatten(0, (2, 3))
        state = engine.slots[0].state
        assert state["count"] == 14
        torch.testing.assert_close(state["mean"], asked.sum(2), atol=1e-4, rtol=0)
        torch.testing.assert_close(state["size"], torch.hypot(asked[..., :4], asked[..., 4:]).sum(2), atol=1e-4, rtol=0)


def test_a_long_prompt_is_turned_back_in_blocks():
    Q, K = torch.randn(1, 2, 1100, 4), torch.randn(1, 1, 1100, 4)
    engine = replay(TriAttention(budget=1200), Q, K, K, FREQS)
    engine.extend(range(1100))
    torch.testing.assert_close(engine.slots[0].state["mean"][0], Q[0].sum(1), atol=1e-3, rtol=0)


def test_a_file_is_read_for_every_layer_and_survives_a_reset(file):
    engine = replay(example(file), torch.randn(2, 4, 9, 4), KEYS[:, :, :1].expand(-1, -1, 9, -1), torch.ones(2, 2, 9, 4), FREQS)
    for _ in range(2):
        for kv in engine.slots:
            assert torch.equal(kv.state["mean"].flatten(0, 1), MEAN[kv.layer]) and kv.state["count"] == 1
        engine.extend(range(5))
        engine.reset(9, 0)


def test_it_says_where_its_statistics_come_from(file):
    assert "prompt" in TriAttention().note and TriAttention(stats=file).note == ""


@pytest.mark.parametrize("shape, words", (
    (dict(n_heads=8), "heads"), (dict(n_layers=3), "2 layers"), (dict(n_layers=2, rope=dict(rope_type="default", rope_theta=5e3)), "frequencies"),
))  # fmt: skip
def test_a_file_of_another_model_is_an_error_before_anything_is_read(file, shape, words):
    engine = Engine(tiny(**dict(head_dim=4) | shape), example(file))
    with pytest.raises(ValueError, match=words):
        engine.extend([1, 2, 3])
    with pytest.raises(ValueError, match="there is no statistics file"):
        Engine(tiny(), TriAttention(stats="nowhere.safetensors")).extend([1])


@pytest.mark.parametrize("dials", (
    dict(scope="head"), dict(aggregate="sum"), dict(reach=-1), dict(budget=0), dict(window=-1), dict(interval=0),
    dict(scope="model", heads="adaptive"), dict(scope="model", layers="pyramid"),
))  # fmt: skip
def test_dials_that_make_no_sense(dials):
    with pytest.raises(ValueError):
        TriAttention(**dials)


def test_as_far_ahead_as_positions_go_scores_are_numbers():
    engine = Engine(tiny(), TriAttention(budget=16, reach=31))
    engine.extend(range(40))
    assert all(engine.policy.score(kv).isfinite().all() for kv in engine.slots)


def test_window_and_interval_follow_the_budget():
    got = [(p.window, p.interval) for p in (TriAttention(budget=b) for b in (3, 64, 1000, 1024, 9000))]
    assert got == [(1, 1), (8, 8), (125, 125), (128, 128), (128, 128)]


# ---- once more, with lists ----

Pairs = list[complex]


class Naive:
    """All KV heads of a model: each holds positions, and who goes is decided by the paper's sums of cosines.

    keys[layer][h][p] and queries[layer][hq][p] before RoPE; mean and size by layer and query head, or None: those of the
    queries of what was read. shares[layer][h]: the rows that a head has from the first overflow on, `rows` until then.
    """

    def __init__(self, policy: TriAttention, keys: list, queries: list, freqs: list[float], mean: list | None, size: list | None,
                 rows: list[list[int]], shares: list[list[int]], exact: bool):  # fmt: skip
        self.policy, self.keys, self.queries, self.freqs, self.mean, self.size = policy, keys, queries, freqs, mean, size
        self.rows, self.shares, self.exact, self.G = rows, shares, exact, len(queries[0]) // len(keys[0])
        self.held = [[[] for _ in heads] for heads in keys]
        self.asked: list[int] = []
        self.ties = 0

    def centre(self, layer: int, hq: int) -> tuple[Pairs, list[float]]:
        if self.mean:
            return self.mean[layer][hq], self.size[layer][hq]
        asked = [self.queries[layer][hq][t] for t in self.asked]
        return [sum(x) / len(asked) for x in zip(*asked)], [sum(map(abs, x)) / len(asked) for x in zip(*asked)]

    def raw(self, q: Pairs, a: list[float], k: Pairs, distance: int) -> float:
        p = self.policy
        norm = sum((x - abs(c) if p.mlr else x) * abs(y) for x, c, y in zip(a, q, k))
        if not p.trig:
            return norm
        products = [(c * y.conjugate(), w) for c, y, w in zip(q, k, self.freqs)]
        waves = [sum((x * cmath.exp(1j * w * (distance + 2**n))).real for x, w in products) for n in range(p.reach + 1)]
        return norm + (max(waves) if p.aggregate == "max" else sum(waves) / len(waves))

    def worth(self, layer: int, h: int, now: int) -> dict[int, float]:
        """The best z-score that any query head of the group gives to each token that may go."""
        best = {t: -math.inf for t in self.held[layer][h] if self.policy.sink <= t < now - self.policy.window}
        for hq in range(h * self.G, (h + 1) * self.G):
            q, a = self.centre(layer, hq)
            raw = [self.raw(q, a, self.keys[layer][h][t], now - t) for t in best]
            mean = sum(raw) / len(raw)
            deviation = math.sqrt(sum((x - mean) ** 2 for x in raw) / len(raw))
            if len(raw) > 1 and deviation < 1e-3 and (self.G > 1 or deviation > 1e-9):
                raise Delicate  # rounding errors, blown up
            for t, x in zip(best, raw):
                best[t] = max(best[t], (x - mean) / max(deviation, 1e-6))
        return best

    def make_room(self, layers: list[int], now: int) -> None:
        worth = [[self.worth(layer, h, now) for h in range(len(self.keys[layer]))] for layer in layers]
        if self.policy.scope == "model":
            worth = [[{t: sum(w[t] for w in heads) / len(heads) for t in heads[0]} for heads in zip(*worth)]] * len(worth)
        for layer, heads in zip(layers, worth):
            self.rows[layer] = self.shares[layer]
            for h, w in enumerate(heads):
                safe = [t for t in self.held[layer][h] if t not in w]
                rest = sorted(w, key=lambda t: (-round(w[t], 9), t))
                n = self.shares[layer][h] - self.policy.interval - len(safe)
                if 0 < n < len(rest):
                    gap = w[rest[n - 1]] - w[rest[n]]
                    if gap < 1e-5 and not (self.exact and gap < 1e-9):
                        raise Delicate
                    self.ties += gap < 1e-9
                self.held[layer][h] = sorted(safe + rest[:n])

    def take(self, start: int, stop: int, decoded: bool) -> None:
        """Tokens start .. stop; where layers must stay alike room is made before they come, as always when decoding."""
        first = decoded or self.policy.scope == "model"
        full = [i for i, heads in enumerate(self.held) if len(heads[0]) + stop - start > self.rows[i][0]]
        if full and first:
            self.make_room(full, start)
        self.held = [[[*tokens, *range(start, stop)] for tokens in heads] for heads in self.held]
        if not decoded:
            self.asked += range(start, stop)
        if full and not first:
            self.make_room(full, stop)

    def after(self, turns: list[Turn]) -> Iterator[list[list[list[int]]]]:
        """Who is held after every turn, by layer and head."""
        for turn in turns:
            for start, stop in turn.pieces():
                while start < stop:
                    end = stop
                    if self.policy.scope == "model":  # as many as there is room for
                        end = min(start + (self.rows[0][0] - len(self.held[0][0]) or self.policy.interval), stop)
                    self.take(start, end, not turn.chunk)
                    start = end
            yield self.held


def complexes(x: Tensor) -> list:
    """[..., D] as nested lists of D/2 complex numbers."""
    return torch.complex(*x.double().chunk(2, -1)).tolist()


def vectors(rng: random.Random, L: int, H: int, G: int, T: int, D: int, exact: bool) -> list[Tensor]:
    """Q and K, frequencies, mean and size, not all pairs turning.

    exact: no pair turns, equal keys abound, and keys and statistics are such that every product is exact: ties are ties.
    """
    generator = torch.Generator().manual_seed(rng.randrange(10**9))
    Q, K, mean = (torch.randn(L, *shape, D, generator=generator) for shape in ((H * G, T), (H, T), (H * G,)))
    Q += 2 * torch.randn(L, H * G, 1, D, generator=generator)  # they crowd around something
    if exact:  # pairs of whole length
        whole = torch.tensor([[3.0, 4.0], [-4.0, 3.0], [5.0, 0.0], [0.0, -1.0], [-3.0, -4.0], [1.0, 0.0]])
        K, mean = (whole[torch.randint(6, (*x.shape[:-1], D // 2), generator=generator)].mT.flatten(-2) for x in (K, mean))
    size = torch.hypot(*mean.chunk(2, -1)) + torch.rand(L, H * G, D // 2, generator=generator).mul(8).ceil() / 4
    freqs = 10.0 ** -torch.rand(D // 2, generator=generator).mul(3)
    freqs *= torch.arange(D // 2) < (0 if exact else rng.choice((D // 4, D // 2)))
    return [Q, K, freqs, mean, size]


def setting(rng: random.Random) -> TriAttention:
    """At least 3 tokens compete: of 2, one is above the mean of each query head, and that is a tie."""
    dials = dict(sink=rng.choice((0, 0, 2)), window=rng.randint(0, 4), interval=rng.choice((1, 1, 2, 4)))
    dials |= dict(budget=sum(dials.values()) + rng.randint(2, 9), aggregate=rng.choice(("mean", "max")), reach=rng.choice((0, 4, 16)))
    dials |= dict(trig=rng.random() < 0.9, mlr=rng.random() < 0.8)
    if rng.random() < 0.4:
        return TriAttention(**dials, scope="model")
    return TriAttention(**dials, heads=rng.choice(("uniform", "adaptive")), layers=rng.choice(("uniform", "pyramid")))


def test_it_keeps_what_naive_lists_keep(tmp_path):
    ties, seen = 0, set()

    def case(rng: random.Random) -> None:
        nonlocal ties
        L, H, G, T, D = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 4), rng.randint(12, 45), rng.choice((4, 8))
        policy, exact = setting(rng), rng.random() < 0.3
        Q, K, freqs, mean, size = vectors(rng, L, H, G, T, D, exact)
        if exact or rng.random() < 0.4:
            file = tmp_path / f"{rng.random()}.safetensors"  # a clock may give two files of one name the same time, and then the first is remembered
            QueryStats(mean, size, freqs).save(file)
            policy = dataclasses.replace(policy, stats=str(file))
        engine, turns = replay(policy, Q, K, torch.ones_like(K), freqs), conversation(rng, T)
        rows = [kv.shares for kv in engine.slots]
        got = [[kept(engine, layer) for layer in range(L)] for turn in turns if turn.play(engine) is None]
        shares = [kv.shares for kv in engine.slots]
        mean, size = (complexes(mean), size.tolist()) if policy.stats else (None, None)
        naive = Naive(policy, complexes(K), complexes(Q), freqs.tolist(), mean, size, rows, shares, exact)
        for turn, mine, want in zip(turns, got, naive.after(turns)):
            assert mine == want, f"{turn}, {policy}"
        ties += naive.ties
        seen.add((policy.scope, policy.aggregate, bool(policy.stats), G))

    agree(case)
    assert ties > 100, f"only {ties} ties"
    assert len(seen) == 2 * 2 * 2 * 4
