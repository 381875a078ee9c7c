"""Methods against slow versions written from the papers, one token at a time."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, normalize

import mmaccel
from mmaccel.reduction.visual_tokens import tome
from mmaccel.reduction.visual_tokens.attention_mass import attention_mass
from mmaccel.reduction.visual_tokens.context import make_context
from mmaccel.reduction.visual_tokens.contract import read_reducers
from mmaccel.reduction.visual_tokens.plan import reduce
from tests.reduction.samples import DEPTH, Sample, batch, image, tiled, video
from tests.reduction.test_budgets import slow_share


def slow_divprune(x: Tensor, k: int) -> list[int]:
    unit = normalize(x.double(), dim=1)
    distance = 1 - unit @ unit.T
    n = len(x)
    first = max(range(n), key=lambda i: min(float(distance[i, j]) for j in range(n) if j != i))
    chosen = [first]
    while len(chosen) < k:
        rest = [i for i in range(n) if i not in chosen]
        chosen.append(max(rest, key=lambda i: min(float(distance[i, j]) for j in chosen)))
    return sorted(chosen)


@pytest.mark.parametrize("k", (1, 20))
def test_divprune(k: int) -> None:
    rows = [image(6, 7, 1), image(5, 5, 2)]
    plan = mmaccel.DivPrune(n_keep=k).plan(batch(rows))
    assert plan.keep.tolist() == [slow_divprune(sample.x, k) for sample in rows]


def slow_cdpruner(sample: Sample, k: int, weight: float, unlike: bool) -> list[int]:
    """The subset grown by the largest determinant, computed whole for every candidate."""
    unit = normalize(sample.x.double(), dim=1)
    question = normalize(sample.text.double(), dim=1).mean(0)
    relevance = (unit @ question) * (-1 if unlike else 1)
    relevance = (relevance - relevance.min()) / (relevance.max() - relevance.min())
    scale = (weight / (2 - 2 * weight) * relevance).exp()
    kernel = scale[:, None] * (unit @ unit.T).fill_diagonal_(1) * scale
    chosen: list[int] = []
    while len(chosen) < k:
        rest = [i for i in range(sample.n) if i not in chosen]
        chosen.append(
            max(rest, key=lambda i: float(kernel[[*chosen, i]][:, [*chosen, i]].logdet()))
        )
    return sorted(chosen)


@pytest.mark.parametrize("unlike", [True, False])
@pytest.mark.parametrize("weight", [0.0, 0.5, 0.9])
def test_cdpruner(weight: float, unlike: bool) -> None:
    rows = [image(6, 7, 1), image(5, 5, 2)]
    plan = mmaccel.CDPruner(n_keep=9, weight=weight, unlike=unlike).plan(batch(rows))
    assert plan.keep.tolist() == [slow_cdpruner(sample, 9, weight, unlike) for sample in rows]


def test_divprune_without_all_pairs_goes_on_in_the_same_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mmaccel.reduction.visual_tokens import divprune

    sample = image(6, 7, 1)
    monkeypatch.setattr(divprune, "_PAIRS", 0)
    keep = mmaccel.DivPrune(n_keep=12).plan(batch([sample])).keep[0].tolist()
    unit = normalize(sample.x, dim=1)
    chosen = [int((unit @ unit.mean(0)).argmin())]
    while len(chosen) < 12:
        nearest = (1 - unit @ unit[chosen].T).amin(1)
        nearest[chosen] = -1
        chosen.append(int(nearest.argmax()))
    assert keep == sorted(chosen)


def slow_pixel_prune(x: Tensor, columns: int, threshold: float) -> list[int]:
    """For each patch of a grid `[N, P]` the one that stands for it, one after the other."""
    stands: list[int] = []

    def is_like(first: int, second: int) -> bool:
        return float((x[first] - x[second]).abs().max()) <= threshold

    for k in range(len(x)):
        row, column = divmod(k, columns)
        sources = [stands[k - 1]] if column else []
        if row:
            above = stands[k - columns]
            corner = stands[k - columns - 1] if column else above
            is_edge = bool(column) and is_like(corner, sources[0]) and not is_like(corner, above)
            sources = [above] if is_edge or not column else sources
        stands.append(next((s for s in sources if is_like(k, s)), k))
    return stands


@pytest.mark.parametrize("threshold", (0.0, 0.3, 1.0))
def test_pixel_prune(threshold: float) -> None:
    rows = [image(9, 12, 1, channels=3), image(13, 5, 2, channels=3), image(1, 8, 3, channels=3)]
    rows = [replace(sample, x=(2 * sample.x).round() / 2) for sample in rows]
    rows[2] = replace(rows[2], x=torch.arange(8.0)[:, None].expand(-1, 3) * 0.25)  # a slope
    for sample in rows:
        sample.x[sample.x.abs() < 0.6] = 0.0
    plan = mmaccel.PixelPrune(threshold=threshold).plan(batch(rows, before=2))
    for row, sample in enumerate(rows):
        stands = slow_pixel_prune(sample.x, int(sample.column.max()) + 1, threshold)
        kept = sorted(set(stands))
        assert plan.keep[row, : len(kept)].tolist() == [k + 2 for k in kept]
        assert int(plan.counts[row]) == len(kept)
        assigned = plan.assign[row, 2 : 2 + sample.n].tolist()
        assert [kept[slot] for slot in assigned] == stands
    if threshold == 1.0:  # differences of a slope do not add up: every fifth differs from the last
        assert plan.keep[2, :2].tolist() == [2, 2 + 5]


def test_pixel_prune_to_a_budget_drops_what_differs_least() -> None:
    sample = image(6, 7, 1)
    context = batch([sample])
    scores = mmaccel.PixelPrune().score(context)[0]
    plan = mmaccel.PixelPrune(n_keep=10).plan(context)
    assert plan.keep[0].tolist() == sorted(scores.argsort(descending=True)[:10].tolist())
    assert plan.weight[0][plan.keep[0]].eq(1).all() and plan.weight.sum() == 10


def slow_dart(sample: Sample, layer: int, k: int) -> list[int]:
    """The lists of the pivots, read in turn until k tokens are found."""
    x, keys = sample.x, sample.keys[layer - 1]
    pivots = keys.abs().sum((1, 2)).argsort(descending=True)[:4].tolist()
    texts = sample.text_keys.abs().sum((1, 2)).argsort(descending=True)[:4].tolist()
    states = [x[i] for i in pivots] + [sample.text[i] for i in texts]
    lists = [(normalize(x, dim=1) @ normalize(state, dim=0)).argsort().tolist() for state in states]
    chosen, depth = list(pivots), 0
    while len(chosen) < k:
        for list_ in lists:
            if list_[depth] not in chosen and len(chosen) < k:
                chosen.append(list_[depth])
        depth += 1
    return sorted(chosen)


@pytest.mark.parametrize("k", (5, 13, 40))
def test_dart(k: int) -> None:
    rows = [image(6, 9, 1), image(5, 11, 2)]
    plan = mmaccel.DART(n_keep=k).plan(batch(rows, layer=2))
    assert plan.keep.tolist() == [slow_dart(sample, 2, k) for sample in rows]


def slow_vidcom2(sample: Sample, frames: int, k: int) -> list[int]:
    """As in the released code, with shares by largest remainder; frames of one size."""
    x = sample.x.double()
    quiet = x.var(0, unbiased=False).argsort()[: x.shape[1] // 2]
    vectors = normalize(x[:, quiet], dim=1).view(frames, -1, len(quiet))

    def alike(centre: Tensor) -> Tensor:
        distance = ((vectors - centre) ** 2).sum(2)
        return sum((torch.exp(-distance / (2 * 2.0**b)) for b in range(-3, 2)), torch.zeros(()))

    to_video, to_frame = alike(vectors.mean((0, 1))), alike(vectors.mean(1, keepdim=True))
    p = (-to_video.mean(1) / 0.01).softmax(0)
    weights = (1 + p - p.mean()).tolist()
    shares = slow_share(k, weights, [vectors.shape[1]] * frames)
    order = (to_video + to_frame).argsort(1)
    found = [f * vectors.shape[1] + order[f, :share] for f, share in enumerate(shares)]
    return sorted(torch.cat(found).tolist())


@pytest.mark.parametrize("k", (7, 30, 61))
def test_vidcom2(k: int) -> None:
    rows = [video(6, 4, 5, 1), video(4, 6, 5, 2)]
    for sample in rows:
        sample.x.mul_(torch.linspace(0.3, 2, 16))  # channels of unequal variance
    plan = mmaccel.VidCom2(n_keep=k).plan(batch(rows))
    for row, (sample, frames) in enumerate(zip(rows, (6, 4), strict=True)):
        assert plan.keep[row].tolist() == slow_vidcom2(sample, frames, k)


def test_tome_merges_the_most_similar_sources() -> None:
    sample = image(6, 8, 3)
    plan = mmaccel.ToMe(n_keep=40, layers=(3,)).plan(batch([sample], layer=3))
    keys = normalize(sample.keys[2].mean(1), dim=1)
    context = batch([sample], layer=3)
    chosen = tome._one_of_each(context, torch.tensor([12]))[0].nonzero()[:, 0].tolist()
    assert [d // 4 for d in chosen] == [*range(12)]  # one of every four tokens
    best = {i: max(chosen, key=lambda d: float(keys[i] @ keys[d])) for i in range(48)}  # noqa: B023
    sources = [i for i in range(48) if i not in chosen]
    sources.sort(key=lambda i: -float(keys[i] @ keys[best[i]]))
    represent = {i: int(plan.keep[0, plan.assign[0, i]]) for i in range(48)}
    assert represent == {i: best[i] if i in sources[:8] else i for i in range(48)}
    loose = mmaccel.ToMe(n_keep=16, layers=(3,), threshold=0.5).plan(batch([sample], layer=3))
    assert loose.counts[0] > 16
    for i in range(48):
        into = int(loose.keep[0, loose.assign[0, i]])
        assert into == i or keys[i] @ keys[into] >= 0.5


def test_tome_chooses_other_destinations_in_every_layer() -> None:
    sample = image(6, 8, 3)
    sample = replace(sample, keys=sample.keys[:1].expand(DEPTH, -1, -1, -1))
    kept = {
        tuple(
            mmaccel.ToMe(n_keep=12, layers=(layer,))
            .plan(batch([sample], layer=layer))
            .keep[0]
            .tolist()
        )
        for layer in (2, 3, 4)
    }
    assert len(kept) == 3


def test_counts_are_of_what_there_was_before_the_first_stage() -> None:
    x = torch.randn(2, 20, 4)
    for initial, left in ((torch.tensor([64, 32]), [8, 4]), (None, [3, 3])):
        context = make_context(
            x, layer=6, depth=8, initial=initial, queries=("last",),
            attention=lambda *_: torch.rand(2, 20),
        )  # fmt: skip
        assert mmaccel.PyramidDrop(keep=0.125).plan(context).counts.tolist() == left


def test_visionzip_merges_the_rest_into_spaced_targets() -> None:
    sample = image(8, 8, 5)
    plan = mmaccel.VisionZip(n_keep=16).plan(batch([sample]))
    mass = sample.mass["cls"][-2].sum(0)
    dominant = set(mass.argsort(descending=True)[:13].tolist())  # 16 * 10 / 64 = 2.5, rounded up
    kept = plan.keep[0].tolist()
    assert dominant <= set(kept)
    rest = [i for i in range(64) if i not in dominant]
    targets = [rest[int((i + 0.5) * len(rest) / 3)] for i in range(3)]
    assert set(kept) - dominant == set(targets)
    keys = normalize(sample.keys[-2].flatten(1), dim=1)
    y = reduce(sample.x[None], plan)[0]
    into = {i: max(targets, key=lambda t: float(keys[i] @ keys[t])) for i in rest}  # noqa: B023
    into |= {target: target for target in targets}
    for target in targets:
        own = [i for i in rest if into[i] == target]
        torch.testing.assert_close(y[kept.index(target)], sample.x[own].mean(0))


@pytest.mark.parametrize("size, keep", [((24, 24), 1 / 4), ((24, 24), 1 / 9), ((12, 12), 1 / 16)])
def test_downsample_is_average_pooling_where_it_divides(size: tuple[int, int], keep: float) -> None:
    sample = image(*size, 6)
    plan = mmaccel.Downsample(keep=keep).plan(batch([sample, sample], after=2))
    stride = round(keep**-0.5)
    pooled = avg_pool2d(sample.x.T.view(1, -1, *size), stride).flatten(2)[0].T
    y = reduce(batch([sample, sample], after=2).x, plan)
    if stride == 3:  # the middle of a cell stands for it
        assert ((sample.row[plan.keep] % 3 == 1) & (sample.column[plan.keep] % 3 == 1)).all()
    for row in y:
        distance = torch.cdist(row, pooled, compute_mode="donot_use_mm_for_euclid_dist")
        assert distance.amin(1).max() < 1e-5 and distance.amin(0).max() < 1e-5


@pytest.mark.parametrize("keep", (0.05, 0.11, 0.22, 0.4))
def test_downsample_merges_neighbours_of_one_tile(keep: float) -> None:
    sample = tiled(12, 10, (2, 2), 7)
    plan = mmaccel.Downsample(keep=keep).plan(batch([sample]))
    reach = 1.2 * keep**-0.5 + 2
    for slot in range(int(plan.counts[0])):
        own = plan.assign[0] == slot
        assert len(sample.group[own].unique()) == 1
        for axis in (sample.row, sample.column):
            assert axis[own].max() - axis[own].min() <= reach
    for group in range(5):
        sizes = plan.size[0][sample.group[plan.keep[0]] == group]
        assert sizes.max() - sizes.min() <= 1


def test_uniform_tokens_are_in_the_middle_of_equal_parts() -> None:
    for n, k in ((20, 5), (63, 14), (7, 6)):
        plan = mmaccel.UniformTokens(n_keep=k).plan(batch([image(1, n, 0)], before=2))
        assert (plan.keep[0] - 2).tolist() == [ceil((i + 0.5) * n / k) - 1 for i in range(k)]


def test_random_tokens_are_uniform_and_differ_between_seeds() -> None:
    rows = [replace(image(5, 8, 1), seed=seed) for seed in range(2000)]
    plan = mmaccel.RandomTokens(keep=0.25).plan(batch(rows))
    times = torch.bincount(plan.keep.flatten(), minlength=40)
    spread = (2000 * 0.25 * 0.75) ** 0.5
    assert ((times - 500).abs() < 4.5 * spread).all()
    together = sum({3, 4} <= set(row) for row in plan.keep.tolist())
    assert abs(together - 2000 * 10 * 9 / (40 * 39)) < 4.5 * 10.5


def test_fastv_stops_at_top_p() -> None:
    check = batch([image(4, 5, 1)], layer=2)
    mass = torch.full((1, 20), 0.001)
    mass[0, [3, 9, 17]] = torch.tensor([1.0, 2.0, 3.0])
    object.__setattr__(check, "_attention", lambda *_: mass)
    assert mmaccel.FastV(keep=0.5, top_p=0.95).plan(check).keep.tolist() == [[3, 9, 17]]
    assert mmaccel.FastV(keep=0.5, top_p=0.8).plan(check).keep.tolist() == [[9, 17]]
    assert mmaccel.FastV(n_keep=1, top_p=0.8).plan(check).keep.tolist() == [[17]]


def test_ficoco_spreads_what_it_removes_over_windows() -> None:
    sample = image(6, 6, 8)
    windows = []
    for local_penalty in (True, False):
        method = mmaccel.FiCoCoV(keep=0.75, layers=(4,), local_penalty=local_penalty)
        kept = method.plan(batch([sample], layer=4)).keep[0].tolist()
        gone = [i for i in range(36) if i not in kept]
        windows.append(len({(i // 6 // 2, i % 6 // 2) for i in gone}))
    assert windows[0] > windows[1]


def test_ficoco_merges_into_the_most_alike_that_stay() -> None:
    """Which are attended to, and unlike the others."""
    sample = image(6, 6, 9)
    plan = mmaccel.FiCoCoL(n_keep=20, layers=(3,)).plan(batch([sample], layer=3))
    keys = normalize(sample.keys[2].flatten(1), dim=1)
    kept = plan.keep[0]
    seen, alike = sample.mass["text"][2].sum(0), (keys @ keys.T).mean(1)
    scores = 0.4 * seen / seen.norm() - 0.6 * alike / alike.norm()
    assert kept.tolist() == sorted(scores.topk(20).indices.tolist())
    for i in set(range(36)) - set(kept.tolist()):
        assert int(plan.assign[0, i]) == int((keys[kept] @ keys[i]).argmax())


def test_received_attention_is_normalised_before_visual_tokens_are_picked() -> None:
    check_attention_mass()


def check_attention_mass() -> None:
    """Against the whole map; a head that looks at text alone counts nothing."""
    random = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, 300, 8, generator=random), torch.randn(2, 2, 40, 8, generator=random)
    where = torch.tensor([[5, 6, 7, 20, 21, -1], [9, 8, 30, -1, -1, -1]])
    seen = torch.rand(2, 300, 40, generator=random) < 0.7
    seen[0, 0] = False
    weights = torch.rand(2, 300, generator=random)
    q[:, 3] *= 0.1
    k[:, 1, 0] = q[:, 3].mean(1) * 4000  # the last head looks at key 0, which is text
    scores = torch.einsum("bhqd,bhsd->bhqs", q, k.repeat_interleave(2, 1)) * 0.3
    for mask, weight in ((None, None), (seen, weights)):
        whole = scores if mask is None else scores.masked_fill(~mask[:, None], -torch.inf)
        map_ = whole.softmax(-1).nan_to_num(0.0)
        total = (map_ if weight is None else map_ * weight[:, None, :, None]).sum(2)
        expected = total.gather(2, where.clamp(0)[:, None].expand(-1, 4, -1))
        expected = expected.masked_fill((where < 0)[:, None], 0)
        found = attention_mass(q, k, where, scale=0.3, seen=mask, weights=weight, per_head=True)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        summed = attention_mass(q, k, where, scale=0.3, seen=mask, weights=weight)
        torch.testing.assert_close(summed, expected.sum(1), rtol=1e-4, atol=1e-4)
    bias = torch.randn(2, 40, generator=random)
    map_ = (scores + bias[:, None, None]).softmax(-1).sum(2)
    expected = map_.gather(2, where.clamp(0)[:, None].expand(-1, 4, -1))
    found = attention_mass(q, k, where, scale=0.3, bias=bias, per_head=True)
    torch.testing.assert_close(found, expected.masked_fill((where < 0)[:, None], 0))


def test_stages_leave_what_the_schedule_says() -> None:
    method, counts = mmaccel.PyramidDrop(keep=0.125), []
    for layer in method.layers_in(DEPTH):
        context = batch([image(8, 8, 1), image(24, 24, 2)], layer=layer)
        counts.append(method.plan(context).counts.tolist())
    assert counts == [[32, 288], [16, 144], [8, 72]]
    assert method.layers_in(32) == (8, 16, 24)
    # of 24, the last of which computes what nobody reads
    assert mmaccel.FiCoCoV(keep=0.5).layers_in(23) == tuple(range(12, 23))
    assert mmaccel.ToMe(keep=0.5).layers_in(4) == (1, 2, 3)


def test_methods_are_sorted_by_stage() -> None:
    hired, fastv, tome = mmaccel.HiRED(keep=0.2), mmaccel.FastV(keep=0.5), mmaccel.ToMe(keep=0.5)
    assert read_reducers([fastv, tome, hired]) == (tome, hired, fastv)
