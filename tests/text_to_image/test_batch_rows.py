"""Rows of a prompt file with their own size."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmaccel import TextToImage
from mmaccel.batch.modalities import Images
from mmaccel.batch.prompts import Row, make_items
from mmaccel.batch.worker import Worker
from mmaccel.pipelines.models import glm_image
from tests.fixtures.checkpoints import captions
from tests.fixtures.lanes import mostly_slow

Built = Callable[[str], Path]
# the size at loading, and two others
OTHERS = {
    "emu3": [(32, 24), (24, 32), (16, 16)],
    "lumina-mgpt": [(64, 32), (32, 64), (32, 32)],
    "glm-image": [(128, 96), (96, 128), (96, 96)],
    "llamagen-c2i": [(64, 64), (32, 32), (48, 48)],
}


def read_images(out: Path) -> dict[str, tuple[dict[str, Any], bytes]]:
    """Metadata and pixels of each image, by id."""
    images = {}
    for file in out.glob("*.png"):
        with Image.open(file) as image:
            facts = json.loads(image.text["mmaccel"])  # type: ignore[attr-defined]
            images[facts["id"]] = facts, image.tobytes()
    return images


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """GLM-Image's diffusion model runs one step instead of 50."""
    own = partial(glm_image.GlmImageImages, num_inference_steps=1)
    monkeypatch.setattr(glm_image, "GlmImageImages", own)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("family", mostly_slow(OTHERS, "emu3"))
def test_sizes_of_a_file_share_one_model(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """The model is loaded once, and images equal those of a model loaded with their size."""
    first, second, third = OTHERS[family]
    sizes = [second, None, third]
    text = captions(family)
    rows = [Row(f"r{k}", text[k % 2], seed=k, size=size) for k, size in enumerate(sizes)]
    opened, whole = [], Images.open

    def count(images: Images) -> TextToImage:
        opened.append(whole(images))
        return opened[-1]

    with monkeypatch.context() as patch:
        patch.setattr(Images, "open", count)
        size = "x".join(map(str, first))
        images = Images(model=str(built(family)), out=tmp_path, size=size, rows=2)
        worker, items = Worker(images), make_items(rows, 0)
        pointers = parameters(opened[0])
        worker.check(items)
        worker.run_all(items, lambda record: None)
    assert len(opened) == 1 and parameters(worker.pipe) == pointers and pointers
    found = read_images(tmp_path)
    for row in rows:
        facts, pixels = found[row.id]
        size = row.size or first
        alone = TextToImage.from_pretrained(built(family), size=size)
        own = alone(row.prompt, seed=[row.seed])  # type: ignore[list-item]
        width, height = own.images[0].size
        assert (facts["width"], facts["height"]) == (width, height) and alone.size == size
        assert width * size[1] == height * size[0]  # Emu3's tiny decoder makes a quarter
        assert pixels == own.images[0].tobytes()


def parameters(pipe: TextToImage) -> set[int]:
    """Which objects the generator's weights are."""
    return set(map(id, pipe.model.model.parameters()))  # type: ignore[union-attr]
