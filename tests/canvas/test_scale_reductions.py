"""FastVAR, ScaleKV and other methods of caches over next-scale models, against `Reference`: the
layers of a tiny network in plain loops, over all scales of given tokens at once.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import (
    ChunkKV,
    ContinuousBatching,
    FastVAR,
    KNorm,
    NextScale,
    Noise,
    OptionError,
    SamplingParams,
    ScaleKV,
    Stepwise,
)
from mmaccel.capabilities import explain, refuse
from mmaccel.catalog import METHODS
from mmaccel.contracts import FinishedRow
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.layers.methods import LayerMethods, reducing
from mmaccel.pipelines.hosts.next_scale.cache import ScaleCache
from mmaccel.pipelines.hosts.next_scale.model import NextScaleModel
from mmaccel.reduction.kv_cache.contract import CachedLayer
from mmaccel.results import Generation
from mmaccel.samplers.canvas.fast_var import resize
from mmaccel.samplers.noise import Stream
from tests.fixtures.arriving import Arriving
from tests.fixtures.lanes import every
from tests.fixtures.next_scale import N_CODES, PROMPTS, build, keep_scale_kv, prompt
from tests.fixtures.var import Blocks, Branch, likeliest
from tests.matrix.examples import Target, make

SIDES, DEPTH = (1, 2, 4, 5), 3
BASES = [sum(n * n for n in SIDES[:k]) for k in range(5)]
SEEDS = [100, 101, 102]  # as of `Arriving`


@cache
def model_of(kind: str) -> NextScaleModel:
    return build(kind, sides=SIDES, depth=DEPTH)


def decode(
    policy: Any, method: Any = None, kind: str = "class", rows: tuple[int, ...] = (0, 1, 2),
    batching: ContinuousBatching | None = None, **params: Any,
) -> Generation:  # fmt: skip
    given = replace(prompt(kind, rows, SIDES), batching=batching)
    noise = Noise.from_seed([SEEDS[row] for row in rows], len(rows))
    sampling = SamplingParams(**{"guidance_scale": 3.0} | params)
    model, methods = model_of(kind), LayerMethods(kv_cache=method)
    with torch.no_grad(), reducing(model, methods, 2):
        made: Generation = policy.sample(model, given, BASES[-1], params=sampling, noise=noise)
        methods.record(made.stats, model)
    return made


def area(outputs: Tensor, n: int) -> Tensor:
    """Outputs `[E, W]` of a square scale for one of n entries: means of what a place covers."""
    own, side = math.isqrt(len(outputs)), math.isqrt(n)
    spans = [range(i * own // side, -(-(i + 1) * own // side)) for i in range(side)]
    places = [[r * own + c for r in rows for c in columns] for rows in spans for columns in spans]
    return torch.stack([outputs[place].mean(0) for place in places])


class Reference(Blocks):
    """The layers of the class model over all scales of a row's tokens at once, as published; a
    subclass leaves out entries.
    """

    def __init__(self) -> None:
        level = torch.arange(len(SIDES)).repeat_interleave(torch.tensor(SIDES) ** 2)
        super().__init__(model_of("class").model.state_dict(), level)

    def agrees(self, made: Generation) -> bool:
        """Whether greedy tokens of all rows, with guidance 3, are those of the logits."""
        for row, tokens in enumerate(made.tokens):
            sums = model_of("class")._sums(tokens[None])
            ids = (PROMPTS["class"][branch][row][0] - N_CODES for branch in (0, 1))
            if not likeliest(self, *ids, sums, cfg=2.0).equal(tokens):
                return False
        return True


class Pruned(Reference):
    """FastVAR, entry by entry."""

    def __init__(self, policy: FastVAR, seed: int = 0) -> None:
        super().__init__()
        self.policy, self.seed, self.first = policy, seed, len(SIDES) - len(policy.keep)
        self.is_computed = torch.ones(BASES[-1], dtype=torch.bool)

    def sees(self, layer: int, q: Tensor, k: Tensor) -> Tensor:
        return super().sees(layer, q, k) & self.is_computed

    def around(self, layer: int, part: int, x: Tensor, branch: Branch) -> Tensor:
        """Others take the part's outputs at an earlier scale."""
        picks = [self.pick(k, layer, part, x[0, self.level == k]) for k in range(len(SIDES))]
        self.is_computed[:] = False
        self.is_computed[[BASES[k] + i for k, pick in enumerate(picks) for i in pick]] = True
        outputs, source = branch(x)[0], self.first - self.policy.cached
        for k in range(self.first, len(SIDES)):
            filled = area(outputs[self.level == source], SIDES[k] ** 2)
            filled[picks[k]] = outputs[self.level == k][picks[k]]
            outputs[self.level == k] = filled
        return outputs[None]

    def pick(self, k: int, layer: int, part: int, x: Tensor) -> list[int]:
        """Numbers of the entries `[n n, W]` of a scale that are computed."""
        policy = self.policy
        if k < self.first or layer < policy.first_layer:
            return [*range(len(x))]
        ranks = [float(((entry - x.mean(0)) ** 2).sum()) for entry in x]
        if policy.choose == "random":
            slots = torch.arange(BASES[k], BASES[k + 1])[None]
            noise = Noise.from_seed([self.seed], 1)
            ranks = noise.uniforms(slots, 1, Stream.CHOICE, 2 * layer + part + 1)[0, :, 0].tolist()
        order = sorted(range(len(x)), key=lambda i: -ranks[i])
        return sorted(order[: math.ceil(len(x) * policy.keep[k - self.first])])


FAST = [
    FastVAR(),
    FastVAR((0.3,), cached=2),
    FastVAR((0.5, 0.2), first_layer=1),
    FastVAR((0.4,), choose="random"),
]


@pytest.mark.parametrize("policy", FAST[:3], ids=repr)
def test_fast_var_is_what_the_paper_says(policy: FastVAR) -> None:
    made = decode(policy, temperature=0.0)
    assert Pruned(policy).agrees(made)
    wrong = replace(policy, cached=3 - policy.cached)  # planted: filled from another scale
    assert not Pruned(policy).agrees(decode(wrong, temperature=0.0))
    counts = [n * n for n in SIDES]
    for k, share in enumerate(policy.keep, len(SIDES) - len(policy.keep)):
        layers = policy.first_layer, DEPTH - policy.first_layer
        mean = (layers[0] * counts[k] + layers[1] * math.ceil(counts[k] * share)) / DEPTH
        counts[k] = math.ceil(mean)
    assert made.stats.positions == 2 * 3 * sum(counts) and made.stats.passes == len(SIDES)
    assert made.stats.exactness == "relaxed"


def test_random_entries_are_by_the_seed() -> None:
    policy = FAST[3]
    one = decode(policy, rows=(0,), temperature=0.0)
    assert Pruned(policy, SEEDS[0]).agrees(one)
    assert not Pruned(policy, SEEDS[1]).agrees(one)


@pytest.mark.parametrize("kind", ["class", "text"])
def test_fast_var_that_keeps_all_is_next_scale(kind: str) -> None:
    plain = decode(NextScale(), kind=kind)
    for policy in (FastVAR((1.0,)), FastVAR((0.5, 0.2), first_layer=DEPTH)):
        made = decode(policy, kind=kind)
        assert made.tokens.equal(plain.tokens)
        assert made.stats.positions == plain.stats.positions
    assert not decode(FastVAR(), kind=kind).tokens.equal(plain.tokens)


def test_more_scales_than_the_model_has_are_refused() -> None:
    for policy in (FastVAR((0.5,) * 4), FastVAR((0.5, 0.5), cached=3)):
        with pytest.raises(OptionError, match="FastVAR.keep: expected fewer .* 4, received"):
            decode(policy)


class Cut(Reference):
    """ScaleKV, entry by entry, with the budgets of its released tables."""

    def __init__(self, method: ScaleKV) -> None:
        super().__init__()
        self.method = method

    def sees(self, layer: int, q: Tensor, k: Tensor) -> Tensor:
        seen = torch.zeros(*q.shape[:3], q.shape[2], dtype=torch.bool)
        for head in range(q.shape[1]):
            held: list[int] = []
            for low, high in itertools.pairwise(BASES):
                held += range(low, high)
                seen[0, head, low:high, held] = True
                stay = self.cut(layer, high, q[0, head, low:high], k[0, head, held])
                held = [held[i] for i in stay]
        return seen

    def cut(self, layer: int, seen: int, queries: Tensor, keys: Tensor) -> list[int]:
        """Entries of a head that stay after a scale."""
        method, length = self.method, len(keys)
        side, own = math.isqrt(len(queries)), math.isqrt(method.window)
        grid = [*range(max(len(queries) - method.window, 0), len(queries))]
        if side >= own:
            middles = [side // own * i + (side // own - 1) // 2 for i in range(own)]
            grid = [r * side + c for r in middles for c in middles]
        votes = (queries[grid] @ keys.T).softmax(-1).sum(0)
        stay = [length - len(queries) + i for i in grid]
        votes[stay] = 0
        return keep_scale_kv(method, layer, DEPTH, seen, votes, {*stay, length - 1})


def test_scales_that_are_no_squares() -> None:
    """What others take over has the place that it had, and a grid has the middle of each part."""
    two = torch.arange(6.0).view(1, 6, 1)
    wide = resize(two, (2, 3), (4, 6)).view(4, 6)
    assert all(wide[r, c] == r // 2 * 3 + c // 2 for r in range(4) for c in range(6))
    assert resize(wide.view(1, 24, 1), (4, 6), (2, 3)).equal(two)
    method = ScaleKV(window=4)
    assert list(method.observe(3, 7)) == [0 * 7 + 1, 0 * 7 + 4, 1 * 7 + 1, 1 * 7 + 4]
    assert list(method.observe(1, 9)) == [5, 6, 7, 8]


SCALE_KV = [
    ScaleKV(budget=12, window=4, kernel=3, least=0.6),
    ScaleKV(budget=6, window=1, drafters=(1,), least=0.5),
    ScaleKV(budget=7, window=4, kernel=1, drafters=(0, 2)),
]


@pytest.mark.parametrize("method", SCALE_KV, ids=repr)
def test_scale_kv_is_what_the_paper_says(method: ScaleKV, monkeypatch: pytest.MonkeyPatch) -> None:
    rooms: list[list[int]] = []
    evict = ScaleCache._evict

    def noted(self: ScaleCache, evictor: Any, layer: int, *given: Any) -> None:
        evict(self, evictor, layer, *given)
        if layer == DEPTH - 1:
            rooms.append([keys.shape[2] - 1 for keys in self.keys])
            assert rooms[-1] == self.lengths.amax(1).tolist()  # no room for what is gone

    monkeypatch.setattr(ScaleCache, "_evict", noted)
    made = decode(NextScale(), method, temperature=0.0)
    assert Cut(method).agrees(made) and made.stats.exactness == "relaxed"
    assert "the cached entries that ScaleKV" in made.stats.reference
    assert len(rooms) == len(SIDES)
    assert all(sum(own) <= method.budget * DEPTH for own in rooms)
    for bug in (
        {"kernel": method.kernel + 2},
        {"budget": method.budget + 1},
        {"drafters": tuple({0, 1, 2} - {*method.drafters})},
    ):
        assert not Cut(replace(method, **bug)).agrees(made), bug


def test_planted_the_last_entries_look_instead_of_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ScaleKV, "observe", lambda self, h, w: range(max(h * w - self.window, 0), h * w)
    )
    assert not Cut(SCALE_KV[0]).agrees(decode(NextScale(), SCALE_KV[0], temperature=0.0))


@pytest.mark.parametrize(
    ("depth", "drafters", "rows"),
    [  # seen, and what drafters and others keep in the released tables of a tenth
        (32, (0, 23), [(921, 920, 632), (4121, 4100, 420)]),
        (32, (0,), [(6425, 6385, 465)]),
        (40, (0, 1, 2), [(921, 909, 629), (4121, 4054, 374)]),
    ],
)
def test_budgets_are_about_those_that_were_released(
    depth: int, drafters: tuple[int, ...], rows: list[tuple[int, int, int]]
) -> None:
    method = ScaleKV(drafters=drafters)
    states = torch.zeros(1, 1, 1, 1)
    for seen, most, least in rows:
        length = torch.tensor([seen])
        for index, expected in ((drafters[0], most), (depth - 1, least)):
            layer = CachedLayer(index, depth, states, states, length, states, 1.0, seen=length)
            assert int(method.count(layer)) == pytest.approx(expected, rel=0.03)
            twice = ScaleKV(drafters=(*drafters, *drafters, depth))  # a layer of the model, once
            assert twice.count(layer).equal(method.count(layer))


def methods() -> list[Any]:
    return [make("kv_cache", name, Target(None)) for name in METHODS["kv_cache"]]


CASES = [(policy, None) for policy in (NextScale(), *FAST)]
CASES += [(NextScale(), each) for each in methods()] + [(FAST[0], SCALE_KV[0])]


@pytest.mark.parametrize(("policy", "method"), every(5, CASES), ids=str)
def test_a_row_is_the_row_alone(policy: Any, method: Any) -> None:
    """Of ragged texts, guided, in a batch and where others go on; what does not go says so."""
    reasons = explain(method, model_of("text"))
    if reasons:
        with pytest.raises(UnsupportedModelError, match="a pass adds|after every scale"):
            refuse(reasons)
        return
    kinds = ["text", "class"]
    if isinstance(method, KNorm):  # keys of the other one are equally long
        kinds.pop()
    for kind in kinds:
        whole = decode(policy, method, kind)
        finished: list[FinishedRow] = []
        decode(policy, method, kind, batching=ContinuousBatching(2, finished.append))
        arriving = Arriving([1, 2], lambda rows, kind=kind: prompt(kind, rows, SIDES), 2, 1)
        batching = ContinuousBatching(3, finished.append, arriving)
        decode(policy, method, kind, (0,), batching)  # rows at different scales
        assert sorted(each.row for each in finished) == [0, 0, 1, 1, 2, 2]
        for row in range(3):
            assert decode(policy, method, kind, (row,)).tokens[0].equal(whole.tokens[row])
        assert all(each.tokens.equal(whole.tokens[each.row]) for each in finished)
    if method is not None and not isinstance(method, KNorm):
        large = decode(policy, replace(method, budget=99), "text")
        assert large.tokens.equal(decode(policy, None, "text").tokens)


def test_layers_share_what_the_first_of_them_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    plan = ChunkKV.plan

    def noted(self: ChunkKV, layer: CachedLayer, scores: Tensor) -> Tensor:
        asked.append(layer.index)
        return plan(self, layer, scores)

    monkeypatch.setattr(ChunkKV, "plan", noted)
    decode(NextScale(), ChunkKV(budget=9, chunk=3, window=3, reuse=2))
    assert asked == [0, 2] * 2  # the scales after which a row has more than the budget


def test_which_methods_go_over_scales() -> None:
    names = {type(each).__name__ for each in methods() if not explain(each, model_of("text"))}
    assert names >= {"SnapKV", "KNorm", "KeyDiff", "StreamingLLM", "RandomEviction", "ScaleKV"}
    assert not names & {"H2O", "KVzip", "Chelsea", "QuantizedCache", "RaaS"}
    assert explain(Stepwise(), SCALE_KV[0])  # computes everything anew
