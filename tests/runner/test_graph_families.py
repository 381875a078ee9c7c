"""CUDA graphs that a pipeline caches between calls, for every image family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmaccel import Jacobi, Noise, SamplingParams
from mmaccel.pipelines.runner.cuda_graphs import GraphCache
from mmaccel.pipelines.runner.engine import Engine
from mmaccel.pipelines.text_to_image.pipeline import TextToImage
from tests.fixtures.checkpoints import FAMILIES, SIZES, captions
from tests.fixtures.graph_replay import Replay


@pytest.mark.parametrize("family", FAMILIES)
def test_every_image_family_reuses_its_graphs(
    family: str, built: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of other lengths, with calls of another policy in between."""
    pipe = TextToImage.from_pretrained(built(family), size=SIZES.get(family))
    monkeypatch.setattr(type(pipe.image_model), "render", lambda self, tokens, *_: [None])
    texts, policy = sorted(captions(family), key=len), Jacobi(window=4)
    calls = [(texts[:1], 5), (texts[-1:], 6), (texts[:1], 7)]
    plain = [pipe(text, policy=policy, seed=seed) for text, seed in calls]
    monkeypatch.setattr(Engine, "runner", lambda self, *_: Replay(self.sync_every, self.cache))
    made = []
    for text, seed in calls:
        made.append(pipe(text, policy=policy, seed=seed))
        pipe(texts[:1], policy=Jacobi(window=3), seed=8)
    assert [images.stats.captures for images in made] == [1, 0, 0]
    assert all(mine.tokens.equal(own.tokens) for mine, own in zip(made, plain, strict=True))
    assert len(pipe.engine.cache) == 2
    pipe.engine.close()
    assert len(pipe.engine.cache) == 0


def test_row_inputs_of_the_caller_stay_as_they_are(built: Callable[[str], Path]) -> None:
    """The next run's lengths are not written into the first prompt's."""
    pipe, cache = TextToImage.from_pretrained(built("janus")), GraphCache()
    window: Any = pipe.model
    made, prompts, before = [], [], []
    for text in sorted(captions("janus"), key=len):
        window.setup.runner = Replay(1, cache)
        prompt = pipe.image_model.prompt([pipe.image_model.encode(text)], False)
        prompts.append(prompt.lengths)
        before.append(prompt.lengths.tolist())
        noise = Noise.from_seed(3, 1)
        run = Jacobi(window=3).sample(window, prompt, 16, params=SamplingParams(), noise=noise)
        made.append(run.stats.captures)
    assert made == [1, 0, 0] and before[0] != before[-1]
    assert [lengths.tolist() for lengths in prompts] == before
