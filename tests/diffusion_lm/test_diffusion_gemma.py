"""DiffusionGemma under canvas policies: transformers' own class, tiny random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.pipelines.diffusion_lm.diffusion_gemma.canvas import canvas_noise
from tests.fixtures.diffusion_gemma import CANVAS, PAD, VOCAB, build_model

IDS = torch.arange(3, 17).view(2, 7)


def plain_loop(model: Any, ids: Tensor, canvases: int, seed: int) -> list[int]:
    """One row, one slot a pass, the surest first, written out."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    noise, made, fed = mmaccel.Noise.from_seed([seed], 1), ids[None], ids[None]
    slots = torch.arange(CANVAS)[None]
    for index in range(canvases):
        own = canvas_noise(noise, index)
        n = made.shape[1]
        places = torch.arange(n - fed.shape[1], n)[None]
        model.model.encoder(input_ids=fed, past_key_values=cache, position_ids=places)
        tokens, carried = torch.full((CANVAS,), -1), None
        gumbel = own.gumbel(slots, VOCAB)[0]
        for step in range(CANVAS):
            coins = own.fresh(slots + step * CANVAS, 0).coins[0]
            shown = torch.where(tokens >= 0, tokens, (coins * VOCAB).long())
            out = model(
                decoder_input_ids=shown[None], past_key_values=cache,
                self_conditioning_logits=carried,
                decoder_position_ids=torch.arange(n, n + CANVAS)[None],
            )  # fmt: skip
            scores = out.logits / (0.4 + 0.4 * (48 - step) / 48)
            carried = scores.double()
            peak = torch.where(tokens < 0, scores[0].softmax(-1).amax(-1), -1.0)
            slot = int(peak.argmax())
            tokens[slot] = (scores[0, slot] + gumbel[slot]).argmax()
        fed = tokens[None]
        made = torch.cat([made, fed], 1)
    return made[0, len(ids) :].tolist()


@torch.no_grad()
def test_stepwise_makes_the_tokens_of_a_plain_loop() -> None:
    model = build_model()
    with mmaccel.attach(model, "stepwise", seed=[4, 5], strict=True) as handle:
        out = model.generate(IDS, max_new_tokens=13)
        assert len(model.seen) == 2 * CANVAS == handle.stats.passes
    by_hand = [plain_loop(model, row, 2, 4 + index) for index, row in enumerate(IDS)]
    assert out.sequences[:, :7].equal(IDS) and out.sequences[:, 7:].tolist() == by_hand
    stats = handle.stats
    assert stats.exactness == "bitwise" and stats.nats == 0.0 and stats.fallbacks == []
    assert "library's sampler" in stats.reference and stats.prefill_passes == 2
    assert stats.tokens == stats.row_passes == 32 and stats.positions == 16 * 2 * CANVAS
    assert out.tokens_per_forward.tolist() == [1.0, 1.0]


def test_notes_are_those_of_all_canvases() -> None:
    model = build_model()
    for budget, n in ((0.0, 1), (1.0, 0)):
        with mmaccel.attach(model, mmaccel.EntropyBounded(budget_nats=budget), seed=4) as handle:
            model.generate(IDS, max_new_tokens=13)
        assert len(handle.stats.notes) == n and (handle.stats.nats == 0) == (n == 1)


@pytest.mark.parametrize(
    "policy", [mmaccel.EntropyBounded(gamma=0.5), mmaccel.ConfidentParallel(0.4)]
)
def test_a_row_does_not_depend_on_its_batch(policy: Any) -> None:
    """Padded on the left; and with rows that end at different canvases."""
    model = build_model(stability_threshold=1, confidence_threshold=2.0)
    padded = torch.tensor([[PAD] * 3 + [5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15]])
    mask = padded.ne(PAD)
    options = {"max_new_tokens": 24, "pad_token_id": PAD, "eos_token_id": [8, 29]}
    with mmaccel.attach(model, policy, seed=[8, 9], strict=True) as handle:
        whole = model.generate(padded, attention_mask=mask, **options)
        again = model.generate(padded, attention_mask=mask, **options)
    assert whole.sequences.equal(again.sequences) and len(handle.history) == 2
    for row in range(2):
        with mmaccel.attach(model, policy, seed=[8 + row], strict=True):
            alone = model.generate(padded[row][mask[row]][None], **options)
        n_new = alone.sequences.shape[1] - int(mask[row].sum())
        made = whole.sequences[row, 7:]
        assert alone.sequences[0, -n_new:].equal(made[:n_new]) and bool((made[n_new:] == PAD).all())
        assert alone.tokens_per_forward[0] == whole.tokens_per_forward[row]


def test_rows_end_behind_their_end_token_and_take_no_more_passes() -> None:
    model = build_model()
    with mmaccel.attach(model, "stepwise", seed=4, strict=True) as handle:
        free = model.generate(IDS, max_new_tokens=24).sequences[:, 7:]
        end = int(free[1, 9])  # in the second canvas
        out = model.generate(IDS, max_new_tokens=24, pad_token_id=PAD, eos_token_id=end)
    made, count = out.sequences[:, 7:].tolist(), 0
    for row in made:
        n = row.index(end) + 1 if end in row else 24
        assert row[n:] == [PAD] * (len(row) - n)
        count += n
    assert count < 48 and handle.stats.tokens == count
    assert handle.stats.row_passes < handle.history[0].row_passes


def test_no_slot_has_the_noise_of_another() -> None:
    """Where the model knows nothing, tokens are the noise's alone."""
    model = build_model()
    torch.nn.init.zeros_(model.lm_head.weight)
    with mmaccel.attach(model, mmaccel.EntropyBounded(gamma=1000.0), seed=1, strict=True):
        made = model.generate(IDS, max_new_tokens=4 * CANVAS).sequences[:, 7:]
    canvases = made.reshape(-1, CANVAS).tolist()
    assert len({tuple(canvas) for canvas in canvases}) == 8
    assert sum(a == b for a, b in zip(canvases[0], canvases[2])) < 4


def test_what_is_spent_stays_within_the_bound() -> None:
    model = build_model(stability_threshold=0, confidence_threshold=100.0)
    for policy in (mmaccel.EntropyBounded(gamma=0.3), mmaccel.EntropyBounded(gamma=0)):
        model.seen.clear()
        with mmaccel.attach(model, policy, seed=2, strict=True) as handle:
            model.generate(IDS, max_new_tokens=16)
        assert handle.stats.nats <= policy.gamma * handle.stats.row_passes
        assert len(model.seen) == handle.stats.passes and handle.stats.tokens == 32
        assert (handle.stats.passes == 16) == (policy.gamma == 0)
    with mmaccel.attach(model, mmaccel.EntropyBounded(budget_nats=1.5), seed=2) as handle:
        model.generate(IDS, max_new_tokens=16)
    assert 0 < handle.stats.nats <= 1.5 * 2 * 2  # a row and canvas


def test_the_librarys_stop_rule_ends_a_canvas_and_is_paid_for() -> None:
    model = build_model(stability_threshold=0, confidence_threshold=100.0)
    policy = mmaccel.ConfidentParallel(1.0)
    with mmaccel.attach(model, policy, seed=2, strict=True) as handle:
        first = model.generate(IDS, max_new_tokens=16).sequences
        assert handle.stats.passes == 2 and handle.stats.nats > 10
        model.generate(IDS, max_new_tokens=16, confidence_threshold=1e-9)
        assert handle.stats.passes == 16 and handle.stats.nats == 0.0
        model.generate(IDS, max_new_tokens=16, confidence_threshold=100.0, stability_threshold=2)
        assert 2 < handle.stats.passes
    with mmaccel.attach(model, mmaccel.EntropyBounded(gamma=1000.0), seed=2, strict=True):
        at_once = model.generate(IDS, max_new_tokens=16).sequences
    assert first.equal(at_once)  # both draw all slots from the first pass


def test_what_is_known_of_slots_holds_over_canvases() -> None:
    model = build_model()
    layout = mmaccel.Grid(4, 4, vocab_size=VOCAB, row_end=9)
    with mmaccel.attach(model, "confident-parallel", layout=layout, seed=1):
        made = model.generate(IDS, max_new_tokens=20).sequences[:, 7:]
    assert bool((made[:, 4:20:5] == 9).all())
