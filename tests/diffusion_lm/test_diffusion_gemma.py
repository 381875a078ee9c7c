"""DiffusionGemma under canvas policies: the classes of transformers and diffusers, tiny weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.errors import BusyError
from mmaccel.pipelines.hosts.diffusion_lm.diffusion_gemma.canvas import canvas_noise
from mmaccel.policies import CanvasInterrupt
from tests.fixtures.diffusion_gemma import CANVAS, PAD, VOCAB, build_model, build_pipe
from tests.fixtures.tiny_lms import falls_back

IDS = torch.arange(3, 17).view(2, 7)
TEXTS = ["hello", "abc"]


def plain_loop(model: Any, ids: Tensor, canvases: int, seed: int) -> list[int]:
    """One row, one slot a pass, the most confident first."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    noise, made, new = mmaccel.Noise.from_seed([seed], 1), ids[None], ids[None]
    slots = torch.arange(CANVAS)[None]
    for index in range(canvases):
        own = canvas_noise(noise, index)
        n = made.shape[1]
        positions = torch.arange(n - new.shape[1], n)[None]
        model.model.encoder(input_ids=new, past_key_values=cache, position_ids=positions)
        tokens, carried = torch.full((CANVAS,), -1), None
        gumbel = own.gumbel(slots, VOCAB)[0]
        for step in range(CANVAS):
            coins = own.fresh(slots + step * CANVAS, 0).coins[0]
            shown = torch.where(tokens >= 0, tokens, (coins * VOCAB).long())
            out = model(
                decoder_input_ids=shown[None],
                past_key_values=cache,
                self_conditioning_logits=carried,
                decoder_position_ids=torch.arange(n, n + CANVAS)[None],
            )
            scores = out.logits / (0.4 + 0.4 * (48 - step) / 48)
            carried = scores.double()
            peak = torch.where(tokens < 0, scores[0].softmax(-1).amax(-1), -1.0)
            slot = int(peak.argmax())
            tokens[slot] = (scores[0, slot] + gumbel[slot]).argmax()
        new = tokens[None]
        made = torch.cat([made, new], 1)
    return made[0, len(ids) :].tolist()


@torch.no_grad()
def test_stepwise_generates_the_tokens_of_a_plain_loop() -> None:
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


def test_notes_hold_for_all_canvases() -> None:
    model = build_model()
    for budget, n in ((0.0, 1), (1.0, 0)):
        with mmaccel.attach(model, mmaccel.EntropyBounded(budget_nats=budget), seed=4) as handle:
            model.generate(IDS, max_new_tokens=13)
        assert len(handle.stats.notes) == n and (handle.stats.nats == 0) == (n == 1)


@pytest.mark.slow
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


def test_rows_end_after_their_end_token_and_take_no_more_passes() -> None:
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
    """With uniform logits, tokens depend on the noise alone."""
    model = build_model()
    torch.nn.init.zeros_(model.lm_head.weight)
    with mmaccel.attach(model, mmaccel.EntropyBounded(gamma=1000.0), seed=1, strict=True):
        made = model.generate(IDS, max_new_tokens=4 * CANVAS).sequences[:, 7:]
    canvases = made.reshape(-1, CANVAS).tolist()
    assert len({tuple(canvas) for canvas in canvases}) == 8
    assert sum(a == b for a, b in zip(canvases[0], canvases[2])) < 4


def test_the_librarys_stop_rule_ends_a_canvas_and_counts_in_nats() -> None:
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


def test_a_given_first_canvas_runs_the_original() -> None:
    model = build_model()
    begun: dict[str, Any] = {"max_new_tokens": 8, "decoder_input_ids": torch.full((2, CANVAS), 5)}
    torch.manual_seed(1)
    plain = model.generate(IDS, **begun).sequences
    with falls_back(model, "decoder_input_ids", mmaccel.EntropyBounded(), seed=1) as handle:
        torch.manual_seed(1)
        assert model.generate(IDS, **begun).sequences.equal(plain)
    assert handle.stats.passes == 48


class CallAt:
    """A logits processor that calls a function at its n-th call."""

    def __init__(self, n: int, then: Any) -> None:
        self.left, self.then = n, then

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.left -= 1
        if not self.left:
            self.then()
        return scores


def test_interrupts_have_the_tokens_so_far_and_calls_do_not_nest() -> None:
    from transformers import LogitsProcessorList

    model = build_model()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with mmaccel.attach(model, "stepwise", seed=4, strict=True) as handle:
        free = model.generate(IDS, max_new_tokens=16).sequences[:, 7:]
        processors = LogitsProcessorList([CallAt(CANVAS + 4, interrupt)])
        with pytest.raises(CanvasInterrupt) as found:
            model.generate(IDS, max_new_tokens=16, logits_processor=processors)
        committed, made = found.value.is_committed, found.value.generation
        assert committed.sum(1).tolist() == [11, 11] and committed[:, :CANVAS].all()
        assert made.tokens[committed].equal(free[committed]) and made.stats.passes == 11
        processors = LogitsProcessorList([CallAt(2, lambda: model.generate(IDS))])
        with pytest.raises(BusyError, match="one call at a time"):
            model.generate(IDS, max_new_tokens=16, logits_processor=processors)
        assert model.generate(IDS, max_new_tokens=16).sequences[:, 7:].equal(free)
        assert len(handle.history) == 2


def test_the_pipeline_generates_with_the_schedulers_temperatures() -> None:
    from diffusers import EntropyBoundScheduler

    pipe = build_pipe(EntropyBoundScheduler(t_min=0.9, t_max=1.5))
    policy = mmaccel.EntropyBounded(gamma=0.4)
    with mmaccel.attach(pipe, policy, seed=3, strict=True) as handle:
        out = pipe(prompt=TEXTS, gen_length=12, eos_early_stop=False)
    inputs = pipe.processor.apply_chat_template([[{"content": text}] for text in TEXTS])
    model, warm = build_model(), {"t_min": 0.9, "t_max": 1.5}
    with mmaccel.attach(model, policy, seed=3, strict=True):
        made = model.generate(**inputs, **warm, max_new_tokens=12).sequences[:, 5:]
    assert out.sequences.equal(made) and made.shape == (2, 2 * CANVAS)
    assert handle.stats.fallbacks == [] and handle.stats.passes == len(pipe.model.seen)


def test_the_pipeline_takes_temperature_seed_and_output_type_from_the_call() -> None:
    pipe, made = build_pipe(), []
    with mmaccel.attach(pipe, "stepwise", strict=True):
        for seed, temperature in ((1, 1.0), (1, 1.0), (2, 1.0)):
            own = torch.Generator().manual_seed(seed)
            out = pipe(prompt="hello", gen_length=8, temperature=temperature, generator=own)
            made.append(out.sequences)
        sequences, texts = pipe(messages=[{"content": "abc"}], gen_length=8, return_dict=False)
        assert texts == [" ".join(map(str, sequences[0].tolist()))]
        assert pipe(prompt="abc", gen_length=8, output_type="seq").texts is None
        with pytest.raises(ValueError, match="gen_length"):
            pipe(prompt="abc", gen_length=0)
        with pytest.raises(TypeError):
            pipe(word="abc")
    assert made[0].equal(made[1]) and not made[0].equal(made[2])


def test_greedy_takes_the_likeliest_tokens_and_callbacks_see_them() -> None:
    pipe, calls = build_pipe(), []

    def watch(pipe: Any, step: int, inner: int, tensors: dict[str, Any]) -> dict[str, Any]:
        calls.append((step, inner, tensors["canvas"].clone(), tensors["logits"]))
        return tensors

    names = ["canvas", "logits"]
    with mmaccel.attach(pipe, mmaccel.EntropyBounded(gamma=1000.0), seed=1, strict=True):
        out = pipe(
            prompt=TEXTS, gen_length=16, eos_early_stop=False, callback_on_step_end=watch,
            callback_on_step_end_tensor_inputs=names,
        )  # fmt: skip
        assert [(step, inner) for step, inner, *_ in calls] == [(0, 0), (1, 0)]
        likeliest = torch.cat([logits.argmax(-1) for *_, logits in calls], 1)
        assert out.sequences.equal(likeliest)
        assert out.sequences.equal(torch.cat([canvas for _, _, canvas, _ in calls], 1))


@pytest.mark.slow
def test_texts_of_the_pipeline_are_cut_at_the_end_token() -> None:
    pipe = build_pipe()
    with mmaccel.attach(pipe, "stepwise", seed=1, strict=True) as handle:
        free = pipe(prompt=TEXTS, gen_length=16, temperature=1.0, eos_early_stop=False).sequences
        end = int(free[0, 3])
        options: dict[str, Any] = {"gen_length": 16, "temperature": 1.0, "eos_token_id": end}
        out = pipe(prompt=TEXTS, **options)
        for row, text in zip(out.sequences.tolist(), out.texts):
            n = row.index(end) + 1 if end in row else len(row)
            assert row[n:] == [end] * (len(row) - n) and len(text.split()) == n
        assert handle.stats.tokens == sum(len(text.split()) for text in out.texts)
        assert handle.stats.row_passes < handle.history[0].row_passes
        whole = pipe(prompt=TEXTS, eos_early_stop=False, **options)
        assert whole.sequences.equal(free) and len(whole.texts[0].split()) <= 4
