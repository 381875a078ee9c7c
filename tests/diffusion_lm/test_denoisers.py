"""Denoisers over published forward signatures: positions, masks, shifts, numbering."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmaccel.contracts import CanvasPass, Denoiser, Prompt
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.diffusion_lm.models import (
    DreamDenoiser,
    FastDLLMDenoiser,
    LLaDADenoiser,
    LuminaDenoiser,
    SDARDenoiser,
)
from mmaccel.pipelines.runner.packed_linear import PackedLinear
from mmaccel.samplers.canvas.cache_plan import CachePlan
from mmaccel.samplers.canvas.lossless_unmask import LosslessUnmask
from mmaccel.samplers.canvas.stepwise import Stepwise
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from tests.fixtures.canvas import PROMPTS, run
from tests.fixtures.denoiser_targets import CODES, FIRST, LENGTH, MASK, VOCAB, images
from tests.fixtures.denoisers import TinyDream, TinyFastDLLM, TinyLLaDA, TinyLumina
from tests.fixtures.fused_lms import lay_out_all
from tests.fixtures.joints import WrappedDenoiser
from tests.fixtures.sdar import TinySDAR

NEWLINE = 36  # of the models of images


class Forgetful(TinySDAR):
    """Ignores the cache that it is given."""

    def forward(self, *args: Any, **inputs: Any) -> Any:
        return super().forward(*args, **(inputs | {"past_key_values": None, "use_cache": False}))


def build(family: str) -> Any:
    """A denoiser of text around a tiny model."""
    if family == "llada":
        return LLaDADenoiser(TinyLLaDA(VOCAB, max_sequence_length=64), MASK)
    if family == "dream":
        return DreamDenoiser(TinyDream(VOCAB, mask_token_id=MASK, max_position_embeddings=64))
    if family == "lumina":
        return LuminaDenoiser(TinyLumina(VOCAB), MASK)
    if family == "sdar":
        return SDARDenoiser(TinySDAR(VOCAB, mask_token_id=MASK, block_size=4))
    if family == "sdar-uncached":
        return SDARDenoiser(Forgetful(VOCAB, mask_token_id=MASK, block_size=4))
    return FastDLLMDenoiser(TinyFastDLLM(VOCAB, bd_size=4), MASK)


UNCACHED = ("sdar-uncached", "fast-dllm")
TEXTS = (*UNCACHED, "sdar", "llada", "dream", "lumina")


class Recorded(WrappedDenoiser):
    """A denoiser that records the entries and logits of every pass."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.passes: list[tuple[CanvasPass, Tensor]] = []

    def forward(self, entries: CanvasPass) -> Tensor:
        logits = super().forward(entries)
        self.passes.append((entries, logits))
        return logits


def alone(model: Any, entries: CanvasPass, row: int) -> Tensor:
    """Logits `[Q, V]` of one row without padding, by the model's body and a mask written here."""
    seen = entries.reads[row].any(0)
    ids = entries.tokens[row][seen][None]
    positions = torch.arange(ids.shape[1])
    mask = None
    if model.block is not None:
        mask = positions // model.block <= (positions // model.block)[:, None]
    logits = model.model.body(ids, positions[None], mask).logits[0]
    before = int((~seen).sum())
    return logits[(entries.queries[row] - before - model.shift)]


@pytest.mark.parametrize("family", TEXTS)
def test_logits_are_those_of_every_row_alone(family: str) -> None:
    model = Recorded(build(family))
    assert isinstance(model.inner, Denoiser) and model.supports_kv_cache == (family not in UNCACHED)
    run(Stepwise(), model, LENGTH, 0.0)
    assert len(model.passes) == LENGTH
    for entries, logits in model.passes:
        assert logits.shape == (len(PROMPTS), entries.queries.shape[1], VOCAB)
        for row in range(len(PROMPTS)):
            wanted = alone(model.inner, entries, row)
            assert torch.allclose(logits[row], wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", TEXTS)
def test_products_in_onednns_order(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same logits, in every pass, and none of the forwards stays behind."""
    lay_out_all(monkeypatch)
    model = Recorded(build(family))
    model.inner.model.float()
    n_reordered = []
    multiply = PackedLinear.multiply_reordered
    monkeypatch.setattr(
        PackedLinear,
        "multiply_reordered",
        lambda own, x: (n_reordered.append(1), multiply(own, x))[1],
    )
    made = run(Stepwise(), model, LENGTH, 0.0)
    n_linears = sum(type(module) is nn.Linear for module in model.inner.model.modules())
    assert made.stats.passes == LENGTH and len(n_reordered) >= 2 * n_linears
    assert not any("forward" in vars(module) for module in model.inner.model.modules())
    for entries, logits in model.passes:
        wanted = alone(model.inner, entries, 0)
        assert torch.allclose(logits[0], wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", TEXTS)
def test_drafts_and_batches_change_nothing(family: str, temperature: float, guided: bool) -> None:
    model = build(family)
    others = [[9, 2, 5, 1, 1, 4, 7], [13, 3, 9, 9, 2], [5]]  # end alike in blocks of 4
    options: dict[str, Any] = {"guided": guided, "others": others}
    whole = run(Stepwise(), model, LENGTH, temperature, **options)
    assert int(whole.tokens.max()) < VOCAB and not bool((whole.tokens == MASK).any())
    for drafts in (2, 4):
        made = run(LosslessUnmask(drafts), model, LENGTH, temperature, **options)
        assert torch.equal(made.tokens, whole.tokens)
    for row in range(len(PROMPTS)):
        made = run(Stepwise(), model, LENGTH, temperature, row=row, **options)
        assert torch.equal(made.tokens[0], whole.tokens[row])


@pytest.mark.parametrize("family", ["llada", "dream", "lumina"])
def test_a_pass_over_a_block_reads_what_the_pass_before_has_written(family: str) -> None:
    """Keys and values outside the block are those of the first pass, by hand."""
    model = build(family)
    draw = torch.Generator().manual_seed(2)
    before, after = torch.randint(VOCAB - 1, (2, 1, 9), generator=draw)
    block = torch.arange(4, 7)
    after = torch.where((torch.arange(9) >= 4) & (torch.arange(9) < 7), after, before)
    reads = torch.ones(1, 1, 10, dtype=torch.bool)
    reads[..., -1] = False
    model.reserve(1, 10)
    whole = torch.arange(9)[None]
    first = CanvasPass(
        tokens=before, positions=whole, reads=reads, cache_indices=whole, queries=whole
    )
    model.forward(first)
    at = {"positions": block[None], "cache_indices": block[None], "queries": whole[:, :3]}
    logits = model.forward(replace(first, tokens=after[:, block], **at))[0]

    stored: dict[int, tuple[Tensor, Tensor]] = {}

    def store(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        stored[layer] = keys, values
        return keys, values

    def join(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        both = [known.clone() for known in stored[layer]]
        for known, new in zip(both, (keys, values), strict=True):
            known[:, :, block] = new[:, :, 1:]
        return both[0], both[1]

    body = model.model.body
    body(before, whole, None, store)
    asking = torch.arange(3, 7)[None]  # the entry before the block, too
    expected = body(after[:, asking[0]], asking, None, join).logits[0]
    expected = expected[:3] if model.shift else expected[1:]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)
    assert not any("attention" in vars(each) for each in model.model.modules())


@pytest.mark.parametrize("family", ["llada", "dream", "lumina"])
@pytest.mark.parametrize("kind", ["prefix", "dual", "vicinity"])
def test_drafts_change_nothing_over_a_cache(family: str, kind: str) -> None:
    plain = build(family)
    run(Stepwise(block=3), plain, LENGTH, 1.0)
    model = build(family)
    cache = CachePlan(kind, margin=1)
    before = model.model.tokens_processed
    whole = run(Stepwise(block=3, cache=cache), model, LENGTH, 1.0)
    assert model.model.tokens_processed - before < plain.model.tokens_processed
    made = run(LosslessUnmask(3, block=3, cache=cache), model, LENGTH, 1.0)
    assert torch.equal(made.tokens, whole.tokens) and made.stats.passes <= whole.stats.passes
    fresh = run(Stepwise(block=3, cache=CachePlan(kind, refresh=1)), model, LENGTH, 1.0)
    assert torch.equal(fresh.tokens, run(Stepwise(block=3), model, LENGTH, 1.0).tokens)


def test_a_cache_is_refused_where_there_is_none() -> None:
    for family in UNCACHED:
        with pytest.raises(UnsupportedModelError, match="entries that later passes read") as error:
            run(Stepwise(cache="prefix"), build(family), LENGTH)
        assert ("from a Forgetful" in str(error.value)) == (family == "sdar-uncached")  # its reason


def test_the_head_runs_on_queried_positions_and_rows_of_a_length_go_together() -> None:
    model = build("llada")
    inner = model.model
    inner.calls = inner.head_rows = 0
    run(Stepwise(block=2), model, LENGTH)
    assert inner.calls == LENGTH and inner.head_rows == LENGTH * 2 * len(PROMPTS)
    inner = (model := build("fast-dllm")).model
    inner.calls = inner.tokens_processed = 0
    run(Stepwise(), model, LENGTH)
    lengths = [len(row) + LENGTH for row in PROMPTS]
    assert inner.calls == LENGTH * len(set(lengths))
    assert inner.tokens_processed == LENGTH * sum(lengths)


@dataclass(frozen=True)
class Lines:
    """Every third slot ends a row of the image."""

    newline: int
    columns: int = 3
    frame: int = 6

    def forced(self, slots: Tensor) -> Tensor | None:
        return torch.where(slots % 3 == 2, self.newline, -1)

    def allowed(self, slots: Tensor) -> Tensor | None:
        return None


@pytest.mark.parametrize("family", ["mmada", "lumina"])
def test_a_range_of_the_vocabulary(family: str) -> None:
    """Prompts and tokens between rows are the model's own, the rest are codes from 0 on."""
    model = Recorded(images(family))
    assert model.vocab_size == model.mask_token == CODES
    newline = int(model.inner.to_canvas(torch.tensor(NEWLINE)))
    rows = [[5, 26, 7], [8, 2], [3], [4, 4]]  # 26 is a code and, in a prompt, a word
    tokens = torch.tensor([row + [0] * (3 - len(row)) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    prompt = Prompt(model.inner.to_canvas(tokens), lengths, branches=2, layout=Lines(newline))
    options = {"params": SamplingParams(guidance_scale=2.5), "noise": Noise.from_seed(3, 2)}
    made = Stepwise().sample(model, prompt, 6, **options)
    assert bool((made.tokens[:, 2::3] == newline).all())
    assert made.stats.passes == 4
    entries, logits = model.passes[-1]
    ids = model.inner.to_model(entries.tokens)
    assert torch.equal(ids[2:, -6:], ids[:2, -6:])  # both branches have one canvas
    assert int((ids == MASK).sum()) == 4 and set(ids[0, :3].tolist()) == {5, 26, 7}
    plain = replace(entries, tokens=ids)
    for row in range(4):
        wanted = alone(model.inner, plain, row)[:, FIRST : FIRST + CODES]
        assert torch.allclose(logits[row], wanted, rtol=0, atol=1e-6)
    drafted = LosslessUnmask(3).sample(images(family), prompt, 6, **options)
    assert torch.equal(drafted.tokens, made.tokens)
