"""Arguments of the text-to-image pipeline: lists, callbacks, devices, numbers, seeds; two runs."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel import BusyError, TextToImage
from tests.fixtures.tiny_model import CAPTIONS


@pytest.fixture(scope="module")
def pipe(tiny_folder: Path) -> TextToImage:
    return TextToImage.from_pretrained(tiny_folder)


def test_a_second_thread_is_refused_while_the_first_runs(pipe: TextToImage) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def wait(_: object) -> None:
        inside.set()
        assert go_on.wait(60)

    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(pipe(CAPTIONS[0], seed=1, on_step=wait)))
    thread.start()
    assert inside.wait(60)
    with pytest.raises(BusyError):
        pipe(CAPTIONS[1], seed=1)
    go_on.set()
    thread.join()
    assert torch.equal(made[0].tokens, pipe(CAPTIONS[0], seed=1).tokens)


def test_a_pipeline_can_be_copied(pipe: TextToImage) -> None:
    other, wanted = copy.deepcopy(pipe), pipe(CAPTIONS, seed=2).tokens
    seen = []

    def nested(_: object) -> None:
        if not seen:
            seen.append(other(CAPTIONS, seed=2).tokens)

    assert torch.equal(pipe(CAPTIONS, seed=2, on_step=nested).tokens, wanted)
    assert torch.equal(seen[0], wanted)


def test_on_step_may_end_an_image_at_nothing(pipe: TextToImage) -> None:
    out = pipe(CAPTIONS[0], on_step=lambda _: torch.tensor([-3]))
    assert out.stats.tokens == 0 and out.stats.passes == 1 and int(out.tokens.sum()) == 0


def test_pipelines_of_one_model_are_one(pipe: TextToImage) -> None:
    other = TextToImage(pipe.image_model)
    with pytest.raises(BusyError):
        pipe(CAPTIONS[0], on_step=lambda _: other(CAPTIONS[0]))  # type: ignore[arg-type, return-value]
