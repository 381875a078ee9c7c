"""FastVAR, ScaleKV and other methods of caches over next-scale models, against `Reference`: the
layers of a tiny network in plain loops, over all scales of given tokens at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

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
from mmaccel.contracts import FinishedRow, Prompt
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.layers.methods import LayerMethods, reducing
from mmaccel.pipelines.hosts.next_scale.cache import ScaleCache
from mmaccel.pipelines.hosts.next_scale.model import NextScaleModel
from mmaccel.pipelines.hosts.next_scale.network import NextScaleConfig, NextScaleTransformer
from mmaccel.reduction.kv_cache.contract import CachedLayer
from mmaccel.results import Generation
from mmaccel.samplers.canvas.fast_var import ScaleFiller, resize
from mmaccel.samplers.noise import Stream
from mmaccel.tokenizers_vq.multi_scale import MultiScaleQuantizer, Scales
from tests.fixtures.arriving import Arriving
from tests.fixtures.lanes import every
from tests.matrix.examples import Target, make

SIDES, V, DEPTH, HEADS = (1, 2, 4, 5), 11, 3, 2
BASES = [sum(n * n for n in SIDES[:k]) for k in range(5)]
TEXTS = [[11, 14, 15, 12], [11, 12], [11, 16, 12]] + [[11, 12]] * 3
CLASSES = [[13], [14], [16]] + [[19]] * 3
SEEDS = [100, 101, 102]  # as of `Arriving`


@cache
def model_of(kind: str) -> NextScaleModel:
    """A random model of classes or of texts."""
    torch.manual_seed(1)
    others: dict[str, Any] = {"positions": "rotary", "adaptive": "none", "is_gated": True}
    others |= {"has_unit_keys": False, "attention_scale": 2.0}
    config = NextScaleConfig(
        SIDES, V, 4, 32, DEPTH, HEADS, 48, 9, kind, **others if kind == "text" else {}
    )
    network = NextScaleTransformer(config).eval().requires_grad_(False)
    network.head.weight.mul_(8)
    for weights in network.blocks.parameters():
        weights.mul_(1.6)
    network.lvl_embed.weight.mul_(0.3)
    if kind == "class":
        network.pos_1LC.mul_(8)  # otherwise all entries of a scale are alike
    quantizer = MultiScaleQuantizer(SIDES, V, 4).eval().requires_grad_(False)
    quantizer.embedding.weight.mul_(3)
    return NextScaleModel(network, quantizer)


def prompt_of(kind: str, rows: Sequence[int]) -> Prompt:
    """Rows with their guidance branches."""
    ids = TEXTS if kind == "text" else CLASSES
    own = [torch.tensor(ids[i]) for i in (*rows, *(row + 3 for row in rows))]
    lengths = torch.tensor([len(each) for each in own])
    tokens = torch.nn.utils.rnn.pad_sequence(own, batch_first=True)
    return Prompt(tokens, lengths, 2, layout=Scales(SIDES, V))


def decode(
    policy: Any, method: Any = None, kind: str = "class", rows: tuple[int, ...] = (0, 1, 2),
    batching: ContinuousBatching | None = None, **params: Any,
) -> Generation:  # fmt: skip
    prompt = replace(prompt_of(kind, rows), batching=batching)
    noise = Noise.from_seed([SEEDS[row] for row in rows], len(rows))
    given = SamplingParams(**{"guidance_scale": 3.0} | params)
    model, methods = model_of(kind), LayerMethods(kv_cache=method)
    with torch.no_grad(), reducing(model, methods, 2):
        made: Generation = policy.sample(model, prompt, BASES[-1], params=given, noise=noise)
        methods.record(made.stats, model)
    return made


def area(outputs: Tensor, n: int) -> Tensor:
    """Outputs `[E, W]` of a square scale for one of n entries: means of what a place covers."""
    own, side = math.isqrt(len(outputs)), math.isqrt(n)
    spans = [range(i * own // side, -(-(i + 1) * own // side)) for i in range(side)]
    places = [[r * own + c for r in rows for c in columns] for rows in spans for columns in spans]
    return torch.stack([outputs[place].mean(0) for place in places])


@dataclass
class Reference:
    """A row's classes logits by scale, `[n, V]` each, of its tokens `[L]`.

    Attributes:
        pick: (scale, layer, part, entries) -> numbers of those that are computed; others take the
            part's outputs at the scale `source`.
        cut: (layer, seen, queries of the scale, keys of a head) -> entries that stay.
    """

    pick: Callable[[int, int, int, Tensor], list[int]] = lambda k, layer, part, x: [*range(len(x))]
    source: int = 0
    cut: Callable[[int, int, Tensor, Tensor], list[int]] = lambda *a: [*range(len(a[3]))]

    @torch.no_grad()
    def logits(self, tokens: Tensor, condition: int) -> list[Tensor]:
        model = model_of("class")
        network, quantizer = model.model, model.quantizer
        c = network.class_emb.weight[condition]
        first = c + network.lvl_embed.weight[0] + network.pos_start[0, 0] + network.pos_1LC[0, 0]
        xs, total = [first[None]], torch.zeros(1, 4, SIDES[-1], SIDES[-1])
        for k in range(1, len(SIDES)):
            total = total + quantizer.spread(tokens[None, BASES[k - 1] : BASES[k]], k - 1)
            xs.append(network.entries(quantizer.shrink(total, k), k)[0])
        for layer, block in enumerate(network.blocks):
            parts = block.ada_lin(c).view(6, -1)
            for part, run in enumerate((self._attend, self._think)):
                picks = [self.pick(k, layer, part, x) for k, x in enumerate(xs)]
                normed = [F.layer_norm(x, x.shape[1:], eps=1e-6) for x in xs]
                some = [
                    (y * (1 + parts[2 + part]) + parts[4 + part])[pick]
                    for y, pick in zip(normed, picks, strict=True)
                ]
                outs = [out * parts[part] for out in run(block, layer, some)]
                for k, (x, pick) in enumerate(zip(xs, picks, strict=True)):
                    filled = x.new_zeros(x.shape)
                    if len(pick) < len(x):
                        filled = area(outs[self.source], len(x))
                    filled[pick] = outs[k]
                    xs[k] = x + filled
        return [network.logits(x[None], c[None])[0] for x in xs]

    def _think(self, block: Any, layer: int, some: list[Tensor]) -> list[Tensor]:
        return [block.ffn.fc2(F.gelu(block.ffn.fc1(y), approximate="tanh")) for y in some]

    def _attend(self, block: Any, layer: int, some: list[Tensor]) -> list[Tensor]:
        attn, outs, held, seen = block.attn, [], [torch.zeros(2, 0, 16)] * HEADS, 0
        for y in some:
            q, k, v = (y @ attn.mat_qkv.weight.T).view(len(y), 3, HEADS, -1).unbind(1)
            q, v = q + attn.q_bias.view(HEADS, -1), v + attn.v_bias.view(HEADS, -1)
            q = F.normalize(q, dim=-1) * attn.scale_mul_1H11.exp().view(HEADS, 1)
            k, heads, seen = F.normalize(k, dim=-1), [], seen + len(y)
            for h in range(HEADS):
                keys, values = torch.cat((held[h], torch.stack((k[:, h], v[:, h]))), 1)
                heads.append((q[:, h] @ keys.T).softmax(-1) @ values)
                stay = self.cut(layer, seen, q[:, h], keys)
                held[h] = torch.stack((keys, values))[:, stay]
            outs.append(attn.proj(torch.cat(heads, 1)))
        return outs

    def agrees(self, made: Generation) -> bool:
        """Whether greedy tokens of all rows, with guidance 3, are those of the logits."""
        for row, tokens in enumerate(made.tokens):
            ids = (CLASSES[row][0] - V, CLASSES[row + 3][0] - V)
            pairs = zip(*(self.logits(tokens, condition) for condition in ids), strict=True)
            for k, (own, other) in enumerate(pairs):
                guided = other + (1 + 2 * k / 3) * (own - other)
                if not guided.argmax(-1).equal(tokens[BASES[k] : BASES[k + 1]]):
                    return False
        return True


def pruned(policy: FastVAR, seed: int = 0) -> Reference:
    """FastVAR, entry by entry."""
    first = len(SIDES) - len(policy.keep)

    def pick(k: int, layer: int, part: int, x: Tensor) -> list[int]:
        if k < first or layer < policy.first_layer:
            return [*range(len(x))]
        ranks = [float(((entry - x.mean(0)) ** 2).sum()) for entry in x]
        if policy.choose == "random":
            slots = torch.arange(BASES[k], BASES[k + 1])[None]
            noise = Noise.from_seed([seed], 1)
            ranks = noise.uniforms(slots, 1, Stream.CHOICE, 2 * layer + part + 1)[0, :, 0].tolist()
        order = sorted(range(len(x)), key=lambda i: -ranks[i])
        return sorted(order[: math.ceil(len(x) * policy.keep[k - first])])

    return Reference(pick, first - policy.cached)


FAST = [
    FastVAR(),
    FastVAR((0.3,), cached=2),
    FastVAR((0.5, 0.2), first_layer=1),
    FastVAR((0.4,), choose="random"),
]


@pytest.mark.parametrize("policy", FAST[:3], ids=repr)
def test_fast_var_is_what_the_paper_says(policy: FastVAR) -> None:
    made = decode(policy, temperature=0.0)
    assert pruned(policy).agrees(made)
    wrong = replace(policy, cached=3 - policy.cached)  # planted: filled from another scale
    assert not pruned(policy).agrees(decode(wrong, temperature=0.0))
    counts = [n * n for n in SIDES]
    for k, share in enumerate(policy.keep, len(SIDES) - len(policy.keep)):
        layers = policy.first_layer, DEPTH - policy.first_layer
        mean = (layers[0] * counts[k] + layers[1] * math.ceil(counts[k] * share)) / DEPTH
        counts[k] = math.ceil(mean)
    assert made.stats.positions == 2 * 3 * sum(counts) and made.stats.passes == len(SIDES)
    assert made.stats.exactness == "relaxed"


def test_random_entries_are_by_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = FAST[3]
    one = decode(policy, rows=(0,), temperature=0.0)
    assert pruned(policy, SEEDS[0]).agrees(one)
    assert not pruned(policy, SEEDS[1]).agrees(one)

    def draw(self: ScaleFiller, scale: int, rows: Tensor | None, n: int) -> Tensor:
        return torch.rand(2, n)

    monkeypatch.setattr(ScaleFiller, "_draw", draw)  # planted: by torch's generator
    assert not pruned(policy, SEEDS[0]).agrees(decode(policy, rows=(0,), temperature=0.0))


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


def cut_by(method: ScaleKV) -> Reference:
    """ScaleKV, entry by entry, with the budgets of its released tables."""

    def cut(layer: int, seen: int, queries: Tensor, keys: Tensor) -> list[int]:
        n, total = len(method.drafters), method.budget * DEPTH
        least = max(int(method.least * method.budget), method.window + 1)
        count = min(seen, (total - (DEPTH - n) * least) // n)
        if layer not in method.drafters:
            count = (total - n * count) // (DEPTH - n)
        length, side, own = len(keys), math.isqrt(len(queries)), math.isqrt(method.window)
        grid = [*range(max(len(queries) - method.window, 0), len(queries))]
        if side >= own:
            middles = [side // own * i + (side // own - 1) // 2 for i in range(own)]
            grid = [r * side + c for r in middles for c in middles]
        votes = (queries[grid] @ keys.T).softmax(-1).sum(0)
        stay = [length - len(queries) + i for i in grid]
        votes[stay] = 0
        reach = method.kernel // 2
        near = [float(votes[max(i - reach, 0) : i + reach + 1].max()) for i in range(length)]
        first = {*stay, length - 1}
        order = sorted(range(length), key=lambda i: (i not in first, -near[i], i))
        return sorted(order[:count])

    return Reference(cut=cut)


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
    assert cut_by(method).agrees(made) and made.stats.exactness == "relaxed"
    assert "the cached entries that ScaleKV" in made.stats.reference
    assert len(rooms) == len(SIDES)
    assert all(sum(own) <= method.budget * DEPTH for own in rooms)
    for bug in (
        {"kernel": method.kernel + 2},
        {"budget": method.budget + 1},
        {"drafters": tuple({0, 1, 2} - {*method.drafters})},
    ):
        assert not cut_by(replace(method, **bug)).agrees(made), bug


def test_planted_budget_is_exceeded_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    method, count = SCALE_KV[0], ScaleKV.count
    monkeypatch.setattr(ScaleKV, "count", lambda self, layer: count(self, layer) + 1)
    made = decode(NextScale(), method, temperature=0.0)
    assert not cut_by(method).agrees(made)
    monkeypatch.setattr(ScaleKV, "count", count)
    monkeypatch.setattr(  # the last entries instead of the grid
        ScaleKV, "observe", lambda self, h, w: range(max(h * w - self.window, 0), h * w)
    )
    assert not cut_by(method).agrees(decode(NextScale(), method, temperature=0.0))


@pytest.mark.parametrize(
    ("depth", "drafters", "rows"),
    [  # seen, and what drafters and others keep in the released tables of a tenth
        (32, (0, 23), [(921, 920, 632), (1497, 1490, 594), (2521, 2510, 526), (4121, 4100, 420)]),
        (32, (0,), [(6425, 6385, 465)]),
        (40, (0, 1, 2), [(921, 909, 629), (2521, 2463, 503), (4121, 4054, 374)]),
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


REDUCED = [(policy, None) for policy in FAST] + [(NextScale(), each) for each in methods()]
REDUCED.append((FAST[0], SCALE_KV[0]))


@pytest.mark.parametrize(("policy", "method"), every(4, REDUCED), ids=str)
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
        assert whole.stats.exactness == "relaxed"
        finished: list[FinishedRow] = []
        decode(policy, method, kind, batching=ContinuousBatching(2, finished.append))
        arriving = Arriving([1, 2], lambda rows, kind=kind: prompt_of(kind, rows), 2, 1)
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
