"""diffusers' `DiffusionGemmaPipeline` under canvas policies, tiny random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.errors import AttachError, OptionError
from tests.fixtures.diffusion_gemma import CANVAS, build_model, build_pipe

TEXTS = ["hello", "abc"]


def test_output_is_that_of_generate_with_the_schedulers_temperatures() -> None:
    from diffusers import EntropyBoundScheduler

    pipe, policy = (
        build_pipe(EntropyBoundScheduler(t_min=0.9, t_max=1.5)),
        mmaccel.EntropyBounded(gamma=0.4),
    )
    with mmaccel.attach(pipe, policy, seed=3, strict=True) as handle:
        out = pipe(prompt=TEXTS, gen_length=12, eos_early_stop=False)
    inputs = pipe.processor.apply_chat_template([[{"content": text}] for text in TEXTS])
    model, warm = build_model(), {"t_min": 0.9, "t_max": 1.5}
    with mmaccel.attach(model, policy, seed=3, strict=True):
        made = model.generate(**inputs, **warm, max_new_tokens=12).sequences[:, 5:]
    assert out.sequences.equal(made) and made.shape == (2, 2 * CANVAS)
    assert handle.stats.fallbacks == [] and handle.stats.passes == len(pipe.model.seen)


def test_temperature_seed_and_output_types_are_the_calls() -> None:
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


def test_greedy_takes_the_likeliest_tokens() -> None:
    pipe, told = build_pipe(), []

    def watch(pipe: Any, step: int, inner: int, tensors: dict[str, Any]) -> dict[str, Any]:
        told.append((step, inner, tensors["canvas"].clone(), tensors["logits"]))
        return tensors

    names = ["canvas", "logits"]
    with mmaccel.attach(pipe, mmaccel.EntropyBounded(gamma=1000.0), seed=1, strict=True):
        out = pipe(
            prompt=TEXTS, gen_length=16, eos_early_stop=False, callback_on_step_end=watch,
            callback_on_step_end_tensor_inputs=names,
        )  # fmt: skip
        assert [(step, inner) for step, inner, *_ in told] == [(0, 0), (1, 0)]
        likeliest = torch.cat([logits.argmax(-1) for *_, logits in told], 1)
        assert out.sequences.equal(likeliest)
        assert out.sequences.equal(torch.cat([canvas for _, _, canvas, _ in told], 1))
        with pytest.raises(OptionError, match="as it was given"):
            pipe(
                prompt="abc", gen_length=8,
                callback_on_step_end=lambda *given: {"canvas": given[3]["canvas"] + 1},
            )  # fmt: skip


def test_rows_end_and_texts_are_cut() -> None:
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
        kept = pipe(prompt=TEXTS, eos_early_stop=False, **options)
        assert kept.sequences.equal(free) and len(kept.texts[0].split()) <= 4


def test_pipeline_and_model_are_given_back() -> None:
    pipe = build_pipe()
    kinds = type(pipe), type(pipe.model)
    before = pipe(
        prompt="abc", gen_length=8, temperature=1.0, generator=torch.Generator().manual_seed(1)
    )
    with mmaccel.attach(pipe.model, "stepwise"), pytest.raises(AttachError):
        mmaccel.attach(pipe, "stepwise")
    assert (type(pipe), type(pipe.model)) == kinds
    with mmaccel.attach(pipe, "confident-parallel"):
        with pytest.raises(AttachError):
            mmaccel.attach(pipe, "stepwise")
        with pytest.raises(AttachError):
            mmaccel.attach(pipe.model, "stepwise")
        pipe(prompt="abc", gen_length=8)
    assert (type(pipe), type(pipe.model)) == kinds
    after = pipe(
        prompt="abc", gen_length=8, temperature=1.0, generator=torch.Generator().manual_seed(1)
    )
    assert before.sequences.equal(after.sequences)
    with pytest.raises(OptionError, match="carries the logits"):
        mmaccel.attach(pipe, "lossless-unmask")
