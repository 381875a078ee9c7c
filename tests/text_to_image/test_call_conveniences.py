"""Arguments that diffusers' users know: policy by name, generator, output_type, callback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mmaccel
from tests.fixtures.tiny_model import CAPTIONS, masked_beside_plain


def test_a_policy_by_name(pipe: mmaccel.TextToImage) -> None:
    for policy, own in (
        ("jacobi", mmaccel.Jacobi()),
        ({"name": "jacobi", "window": 5}, mmaccel.Jacobi(window=5)),
    ):
        assert pipe(CAPTIONS[0], policy=policy).stats.policy == repr(own)


def test_a_generator_seeds_the_run(pipe: mmaccel.TextToImage) -> None:
    drawn = [torch.Generator().manual_seed(k) for k in (3, 3, 4)]
    first = pipe(CAPTIONS[0], generator=drawn[0])
    assert pipe(CAPTIONS[0], generator=drawn[1]).tokens.equal(first.tokens)
    assert not pipe(CAPTIONS[0], generator=drawn[2]).tokens.equal(first.tokens)
    assert not pipe(CAPTIONS[0], generator=drawn[0]).tokens.equal(first.tokens)  # it went on
    several = [torch.Generator().manual_seed(k) for k in (5, 3)]
    both = pipe(CAPTIONS[:2], generator=several).tokens
    alone = pipe(CAPTIONS[1], generator=[torch.Generator().manual_seed(3)]).tokens
    assert both[1:].equal(alone)


def test_output_types_hold_the_same_pixels(pipe: mmaccel.TextToImage) -> None:
    kinds = ("pil", "pt", "np", "tokens")
    made = {kind: pipe(CAPTIONS[:2], output_type=kind, seed=0) for kind in kinds}
    pixels = np.stack([np.asarray(image) for image in made["pil"].images])
    assert (made["np"].images * 255 == pixels).all() and made["np"].images.dtype == np.float32
    assert made["pt"].images.shape == (2, 3, *pixels.shape[1:3])
    assert (made["pt"].images.permute(0, 2, 3, 1).numpy() == made["np"].images).all()
    assert made["tokens"].images == [] and made["tokens"].tokens.equal(made["pil"].tokens)


def test_the_size_of_a_call(built: Callable[[str], Path], pipe: mmaccel.TextToImage) -> None:
    width, height = pipe.size
    own = pipe(CAPTIONS[0], width=width, height=height, seed=0)
    assert own.tokens.equal(pipe(CAPTIONS[0], seed=0).tokens)
    sized = mmaccel.TextToImage.from_pretrained(built("emu3"), size=(32, 24))
    made = sized(CAPTIONS[0], width=24, seed=0)  # the other side is the pipeline's
    wanted = sized.resize((24, 24))(CAPTIONS[0], seed=0)
    assert made.images[0].size == wanted.images[0].size != sized(CAPTIONS[0]).images[0].size
    assert made.tokens.equal(wanted.tokens)


def test_the_callback_is_called_after_every_pass(pipe: mmaccel.TextToImage) -> None:
    calls: list[tuple[int, int, int]] = []
    seen = []

    def callback(pipeline: Any, step: int, timestep: int, state: dict[str, Any]) -> None:
        assert pipeline is pipe
        calls.append((step, timestep, int(state["lengths"].min())))

    made = pipe(CAPTIONS[0], callback_on_step_end=callback, on_step=lambda p: seen.append(p.passes))
    assert [step for step, _, _ in calls] == list(range(made.stats.passes))
    assert calls[-1][1:] == (pipe.length,) * 2 and seen == [step + 1 for step, _, _ in calls]


def test_a_callback_interrupts_the_call(pipe: mmaccel.TextToImage) -> None:
    whole = pipe(CAPTIONS[:3], seed=0, batch_size=1)
    stop_at = int(whole.passes[0]) + 2  # in the middle of the second image
    calls: list[int] = []

    def stop(pipeline: Any, step: int, timestep: int, state: dict[str, Any]) -> dict[str, Any]:
        calls.append(step)
        pipeline._interrupt = len(calls) == stop_at
        return state

    cut = pipe(CAPTIONS[:3], seed=0, batch_size=1, callback_on_step_end=stop)
    assert len(calls) == stop_at == cut.stats.passes and len(cut.prompts) == 2
    assert [image.tobytes() for image in cut.images] == [whole.images[0].tobytes()]
    n = cut.stats.tokens - pipe.length
    assert 0 < n < pipe.length and cut.tokens[1, :n].equal(whole.tokens[1, :n])
    assert len(pipe(CAPTIONS[0], seed=0).images) == 1  # the next call begins anew


def test_what_else_diffusers_pipelines_have(pipe: mmaccel.TextToImage) -> None:
    (images,) = pipe(CAPTIONS[0], seed=0, output_type="pt", return_dict=False)
    assert images.equal(pipe(CAPTIONS[0], seed=0, output_type="pt").images)
    assert pipe.components["model"] is pipe.model.model  # type: ignore[attr-defined]
    assert set(pipe.components) == {"model", "tokenizer"}
    pipe.set_progress_bar_config(disable=True)
    assert not hasattr(pipe, "save_pretrained")


def test_steps_are_those_of_the_policy_that_has_them(tmp_path: Path) -> None:
    folder, _ = masked_beside_plain(tmp_path)
    masked = mmaccel.TextToImage.from_pretrained(folder)
    for steps in (3, 5):
        made = masked(CAPTIONS[0], policy="masked-parallel", num_inference_steps=steps)
        assert made.stats.passes == steps and f"steps={steps}" in made.stats.policy
