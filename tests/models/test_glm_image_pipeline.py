"""GlmImagePipeline of diffusers under a policy: the same call and images, fewer passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmaccel
from tests.fixtures.glm_pipeline import build_pipeline
from tests.fixtures.tiny_lms import PassCounter

pytest.importorskip("diffusers", reason="diffusers is an optional extra")


def paint(pipe: Any, prompts: Any) -> torch.Tensor:
    return pipe(
        prompts, height=128, width=128, num_inference_steps=1, guidance_scale=1.0,
        generator=torch.Generator().manual_seed(5), output_type="pt",
    ).images  # fmt: skip


@pytest.mark.slow
def test_the_pipelines_call_is_served() -> None:
    pipe = build_pipeline()
    assert mmaccel.supports(pipe).family == "glm_image"
    made, passes = [], []
    for policy in (mmaccel.Autoregressive(), mmaccel.Jacobi(window=8)):
        with PassCounter(pipe.vision_language_encoder) as counter:
            with mmaccel.attach(pipe, policy, seed=[4, 5], strict=True) as run:
                made.append(paint(pipe, ["a cat", "two dogs on a hill"]))
        assert run.stats is not None and run.stats.fallbacks == [] and run.stats.tokens == 42
        passes.append(counter.passes)
    assert torch.equal(*made) and made[0].shape[:2] == (2, 3)
    assert passes[1] < passes[0] == 22  # the prompt's, and 4 x 4 + 2 x 2 + 1 tokens
    assert float(made[0].std()) > 0.01


def test_the_pipelines_generator_seeds_the_policy_where_attach_does_not() -> None:
    pipe = build_pipeline()
    with mmaccel.attach(pipe, mmaccel.Jacobi(window=8), strict=True):
        assert torch.equal(paint(pipe, "a cat"), paint(pipe, "a cat"))
