"""What graphs that are cached between calls leave of their prompts.

That every image family reuses them is proved in tests/text_to_image/test_requests.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmaccel import Jacobi, Noise, SamplingParams
from mmaccel.pipelines.runner.cuda_graphs import GraphCache
from mmaccel.pipelines.text_to_image.pipeline import TextToImage
from tests.fixtures.checkpoints import captions
from tests.fixtures.graph_replay import Replay


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
