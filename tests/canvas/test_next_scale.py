"""Next-scale models and `NextScale`: passes over a cache against whole passes and a network written
by hand; rows alone, in company, and at different scales.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel import ContinuousBatching, NextScale, Noise, SamplingParams, Stepwise
from mmaccel.contracts import CanvasPass, FinishedRow, Prompt
from mmaccel.errors import OptionError, ShapeError, UnsupportedModelError
from mmaccel.pipelines.hosts.next_scale import network as networks
from mmaccel.pipelines.hosts.next_scale.model import NextScaleModel
from mmaccel.policies import CanvasInterrupt, CanvasProgress
from mmaccel.results import Generation
from mmaccel.tokenizers_vq.multi_scale import Scales
from tests.fixtures.arriving import Arriving
from tests.fixtures.canvas import masked
from tests.fixtures.next_scale import KINDS, N_CODES, N_SLOTS, SIDES, build, network, prompt
from tests.fixtures.next_scale import quantizer as make_quantizer

ALL = [0, 1, 2]
GUIDED = SamplingParams(guidance_scale=3.0)


def decode(
    kind: str, policy: Any = None, rows: Any = ALL, given: Prompt | None = None, **options: Any
) -> Generation:
    """Guided rows of `PROMPTS`, each with the seed 100 and its number."""
    model = options.pop("model", None) or build(kind)
    noise = Noise.from_seed([100 + row for row in rows], len(rows))
    options.setdefault("params", GUIDED)
    made: Generation = (policy or NextScale()).sample(
        model, given or prompt(kind, rows), N_SLOTS, noise=noise, **options
    )
    return made


def scale_logits(model: NextScaleModel, rows: Prompt, codes: Tensor) -> Tensor:
    """`[R, L, V]` of codes `[B, L]`, scale by scale over the cache."""
    model.reserve(len(rows.tokens), N_SLOTS)
    model.begin(rows)
    parts, before, found = codes.split(model.lengths, 1), None, []
    for scale, part in enumerate(parts):
        found.append(model.forward_scale(scale, before, None, None)[0])
        before = part
    return torch.cat(found, 1)


def whole_logits(model: NextScaleModel, rows: Prompt, codes: Tensor) -> Tensor:
    """The same of one pass over everything."""
    width = rows.tokens.shape[1]
    ids = torch.stack([row.roll(width - int(n)) for row, n in zip(rows.tokens, rows.lengths)])
    tokens = torch.cat((ids, codes.repeat(rows.branches, 1)), 1)
    at = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    reads = (at >= width - rows.lengths[:, None])[:, None]
    return model.forward(
        CanvasPass(tokens, positions=at, reads=reads, cache_indices=at, queries=at[:, width:])
    )


def passes_agree(kind: str) -> bool:
    model, rows = build(kind), prompt(kind)
    codes = torch.randint(N_CODES, (3, N_SLOTS), generator=torch.Generator().manual_seed(0))
    by_scale, whole = scale_logits(model, rows, codes), whole_logits(model, rows, codes)
    return torch.allclose(by_scale, whole, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_passes_over_the_cache_are_one_pass_over_everything(kind: str) -> None:
    assert passes_agree(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_sees_the_next_is_rejected(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = F.scaled_dot_product_attention

    def everything(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        seen = None if mask is None or mask.dtype == torch.bool else mask.amax(2, keepdim=True)
        return attend(q, k, v, mask if seen is None else seen, **options)

    monkeypatch.setattr(networks.F, "scaled_dot_product_attention", everything)
    assert not passes_agree(kind)


def var_by_hand(model: NextScaleModel, row: int, codes: Tensor) -> Tensor:
    """Logits `[5, V]` of a class-conditional VAR of sides 1 and 2 (section 3.3), entry by entry."""
    w = {name: value.detach() for name, value in model.model.state_dict().items()}
    quantizer, width, n_heads = model.quantizer, 32, 2
    label = w["class_emb.weight"][row]
    vector = quantizer.embedding.weight[codes[0]].view(1, -1, 1, 1).expand(-1, -1, 2, 2)
    phi = quantizer.phi[0]
    total = vector / 2 + F.conv2d(vector, phi.weight, phi.bias, padding=1) / 2
    x = [label + w["pos_start"][0, 0] + w["pos_1LC"][0, 0] + w["lvl_embed.weight"][0]]
    for k in range(4):
        word = w["word_embed.weight"] @ total[0, :, k // 2, k % 2] + w["word_embed.bias"]
        x.append(word + w["pos_1LC"][0, 1 + k] + w["lvl_embed.weight"][1])
    sees = [range(1)] + [range(5)] * 4
    for layer in range(model.model.config.depth):
        b = {n.split(".", 2)[2]: v for n, v in w.items() if n.startswith(f"blocks.{layer}.")}
        change = b["ada_lin.1.weight"] @ F.silu(label) + b["ada_lin.1.bias"]
        gamma_1, gamma_2, scale_1, scale_2, shift_1, shift_2 = change.split(width)

        def normed(y: Tensor) -> Tensor:
            return (y - y.mean()) / (y.var(correction=0) + 1e-6).sqrt()

        entries = []
        for y in x:
            qkv = b["attn.mat_qkv.weight"] @ (normed(y) * (1 + scale_1) + shift_1)
            biases = b["attn.q_bias"], torch.zeros(width), b["attn.v_bias"]
            q, k, v = (part.view(n_heads, -1) for part in (qkv + torch.cat(biases)).split(width))
            sharp = b["attn.scale_mul_1H11"].view(-1, 1).clamp(max=4.60517).exp()
            q, k = (each / each.norm(dim=1, keepdim=True) for each in (q, k))
            entries.append((q * sharp, k, v))
        for e, y in enumerate(x):
            seen = []
            for h in range(n_heads):
                scores = torch.stack([entries[e][0][h] @ entries[o][1][h] for o in sees[e]])
                values = torch.stack([entries[o][2][h] for o in sees[e]])
                seen.append(scores.softmax(0) @ values)
            y = y + gamma_1 * (b["attn.proj.weight"] @ torch.cat(seen) + b["attn.proj.bias"])
            inner = b["ffn.fc1.weight"] @ (normed(y) * (1 + scale_2) + shift_2) + b["ffn.fc1.bias"]
            inner = F.gelu(inner, approximate="tanh")
            x[e] = y + gamma_2 * (b["ffn.fc2.weight"] @ inner + b["ffn.fc2.bias"])
    change = w["head_nm.ada_lin.1.weight"] @ F.silu(label) + w["head_nm.ada_lin.1.bias"]
    scale, shift = change.split(width)
    out = torch.stack([normed(y) * (1 + scale) + shift for y in x])
    return out @ w["head.weight"].T + w["head.bias"]


def test_logits_are_those_of_a_network_written_by_hand() -> None:
    model = build("class", sides=(1, 2))
    rows = replace(prompt("class", [1]), layout=Scales((1, 2), N_CODES))
    codes = torch.tensor([[4, 0, 9, 2, 7]])
    found = scale_logits(model, rows, codes)
    for branch, id in enumerate(rows.tokens[:, 0].tolist()):
        by_hand = var_by_hand(model, id - N_CODES, codes[0])
        assert torch.allclose(found[branch], by_hand, atol=1e-4), branch


@pytest.mark.parametrize("kind", KINDS)
def test_it_has_stepwise_tokens_in_a_pass_a_scale_alone_and_in_company(kind: str) -> None:
    counts: list[list[int]] = []
    made = decode(kind, on_step=lambda progress: counts.append(progress.lengths.tolist()))
    plain = decode(kind, Stepwise())
    assert made.tokens.equal(plain.tokens) and (made.lengths == N_SLOTS).all()
    assert made.stats.passes == 3 and plain.stats.passes == N_SLOTS and made.stats.nats == 0
    assert counts == [[1] * 3, [5] * 3, [14] * 3] and made.stats.exactness == "bitwise"
    for row in ALL:
        assert decode(kind, rows=[row]).tokens.equal(made.tokens[row : row + 1])
    noise = Noise.from_seed([7, 8, 9], 3)
    other = NextScale().sample(build(kind), prompt(kind), N_SLOTS, params=GUIDED, noise=noise)
    assert (other.tokens != made.tokens).any(1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_at_different_scales_share_a_pass(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = decode(kind).tokens
    scales: list[int] = []
    forward = NextScaleModel.forward_scale

    def note(self: NextScaleModel, scale: int, *others: Any) -> Any:
        scales.append(scale)
        return forward(self, scale, *others)

    monkeypatch.setattr(NextScaleModel, "forward_scale", note)
    found: dict[int, Tensor] = {}

    def keep(row: FinishedRow) -> None:
        found[row.row] = row.tokens

    waiting = Arriving([1, 2], lambda rows: prompt(kind, rows), 2, most=1)
    given = replace(prompt(kind, [0]), batching=ContinuousBatching(3, keep, waiting))
    made = decode(kind, rows=[0], given=given)
    assert len(scales) > made.stats.passes, "no two scales shared a pass"
    assert all(found[row].equal(alone[row]) for row in ALL)
    one = replace(prompt(kind), batching=ContinuousBatching(1, keep))
    decode(kind, given=one)
    assert all(found[row].equal(alone[row]) for row in ALL)


@pytest.mark.parametrize("kind", ["class", "text"])
def test_guidance_grows_with_the_scales(kind: str) -> None:
    """Greedy tokens are the best of u + s_k (c - u), with s_k 1, 2 and 3 at the three scales."""
    greedy = replace(GUIDED, temperature=0.0)
    made, model, rows = decode(kind, params=greedy), build(kind), prompt(kind)
    logits = scale_logits(model, rows, made.tokens)
    c, u = logits.unflatten(0, (2, 3))
    scale = torch.tensor([1.0] + [2.0] * 4 + [3.0] * 9)[:, None]
    assert made.tokens.equal((u + scale * (c - u)).argmax(-1))
    for constant in (1.0, 2.0, 3.0):
        assert not made.tokens.equal((u + constant * (c - u)).argmax(-1))


@dataclass(frozen=True)
class Given(Scales):
    """Forces the first slots."""

    n: int = 0

    def forced(self, slots: Tensor) -> Tensor:  # type: ignore[override]
        return torch.where(slots < self.n, slots % 5, -1)


@pytest.mark.parametrize(("n", "passes"), [(1, 2), (3, 2), (5, 1), (9, 1), (14, 0)])
def test_scales_that_a_layout_gives_are_read(n: int, passes: int) -> None:
    given = replace(prompt(), layout=Given(SIDES, N_CODES, n))
    made, plain = decode("text", given=given), decode("text", Stepwise(), given=given)
    assert made.tokens.equal(plain.tokens) and made.stats.passes == passes
    assert made.tokens[:, :n].eq(torch.arange(n) % 5).all()


def test_a_run_ends_where_the_caller_says() -> None:
    whole = decode("text").tokens

    def cut(progress: CanvasProgress) -> Tensor | None:
        return torch.tensor([1, 7, 14]) if progress.passes == 1 else None

    made = decode("text", on_step=cut)
    assert made.lengths.tolist() == [1, 7, 14] and made.stats.passes == 3
    for row, n in enumerate(made.lengths.tolist()):
        assert made.tokens[row, :n].equal(whole[row, :n])

    def interrupt(progress: CanvasProgress) -> None:
        if progress.passes == 2:
            raise KeyboardInterrupt

    with pytest.raises(CanvasInterrupt) as stopped:
        decode("text", on_step=interrupt)
    assert stopped.value.is_committed.sum(1).tolist() == [5, 5, 5]
    assert stopped.value.generation.tokens[:, :5].equal(whole[:, :5])


def test_half_precision_has_its_numbers_in_the_cache() -> None:
    model = NextScaleModel(network("text").bfloat16(), make_quantizer())
    made = decode("text", model=model)
    assert model.dtype == torch.bfloat16 and model._cache.keys[0].dtype == torch.bfloat16
    assert made.stats.dtype == "bfloat16" and (made.tokens < N_CODES).all()


def test_what_does_not_fit_the_scales_is_refused_before_a_pass() -> None:
    noise, params = Noise.from_seed(0, 3), SamplingParams(guidance_scale=2.0)
    for policy in (NextScale(), Stepwise()):
        for length in (N_SLOTS - 1, N_SLOTS + 1):
            with pytest.raises(OptionError, match=f"length: expected 14 slots.*received {length}"):
                policy.sample(build(), prompt(), length, params=params, noise=noise)
    for sides in ((2, 3), ()):
        with pytest.raises(ShapeError, match=r"sides: expected .*; begin with 1"):
            network("class", sides=sides)


def test_a_model_of_one_scale_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="its slots are of one scale; choose Lossless"):
        noise = Noise.from_seed(0, 3)
        NextScale().sample(masked(), prompt(), N_SLOTS, params=SamplingParams(), noise=noise)
