"""What a pipeline keeps between calls, for every picture family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mmaccel import Jacobi
from mmaccel.pipelines.engine import Engine
from mmaccel.pipelines.text_to_image import TextToImage
from tests.checkpoints import FAMILIES, SIZES, captions
from tests.replay import Replay


@pytest.mark.parametrize("family", FAMILIES)
def test_every_picture_family_keeps_its_records(
    family: str, built: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captions of other lengths; another policy in between has the model to itself."""
    pipe = TextToImage.from_pretrained(built(family), size=SIZES.get(family))
    monkeypatch.setattr(TextToImage, "length", 20)
    monkeypatch.setattr(type(pipe.pictures), "render", lambda self, tokens, *_: [None])
    texts, policy = captions(family), Jacobi(window=4)
    calls = [(texts[:1], 5), (texts[-1:], 6), (texts[:1], 7)]
    plain = [pipe(text, policy=policy, seed=seed) for text, seed in calls]
    monkeypatch.setattr(Engine, "steps", lambda self, *_: Replay(self.sync_every, self.shelf))
    made = []
    for text, seed in calls:
        made.append(pipe(text, policy=policy, seed=seed))
        pipe(texts[:1], policy=Jacobi(window=3), seed=8)
    assert [pictures.stats.captures for pictures in made] == [1, 0, 0]
    assert all(mine.tokens.equal(own.tokens) for mine, own in zip(made, plain, strict=True))
    assert len(pipe.engine.shelf) == 2
    pipe.engine.close()
    assert len(pipe.engine.shelf) == 0
