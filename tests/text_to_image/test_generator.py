"""The generator: one model behind batches and nodes; it makes images and writes nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmaccel.batch.item import Row, make_items
from mmaccel.batch.setup import Setup
from mmaccel.batch.worker import Worker
from mmaccel.catalog import make_policy
from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.values import run_node
from mmaccel.errors import OptionError
from mmaccel.pipelines.text_to_image.generator import Finished, GenerationSettings, ImageGenerator
from mmaccel.pipelines.text_to_image.outputs import Request
from mmaccel.pipelines.text_to_image.pipeline import TextToImage
from tests.comfy.fake_comfy import Host
from tests.fixtures.tiny_model import CAPTIONS, N_TOKENS


@pytest.fixture
def generator(tiny_folder: Path) -> ImageGenerator:
    return ImageGenerator(TextToImage.from_pretrained(tiny_folder))


def settings_of(generator: ImageGenerator, name: str, **options: Any) -> GenerationSettings:
    return GenerationSettings(name, make_policy(name, **options), generator.pipe.image_model.params)


def test_an_image_comes_with_what_is_known_of_it(generator: ImageGenerator) -> None:
    plain = settings_of(generator, "autoregressive")
    made = generator.run(Request(CAPTIONS[0], 3, tag="mine"), plain)
    assert made.output.request.tag == "mine" and made.settings is plain
    assert made.shape == {"tokens": N_TOKENS, "width": 16, "height": 16}
    assert made.cost == {"passes": N_TOKENS}
    wanted = generator.pipe(CAPTIONS[0], policy=plain.policy, seed=[3])
    assert made.output.image.tobytes() == wanted.images[0].tobytes()
    relaxed = generator.run(Request(CAPTIONS[0], 3), settings_of(generator, "gsd", window=4))
    assert set(relaxed.cost) == {"passes", "total_variation", "nats"}
    assert relaxed.cost["total_variation"] > 0 and relaxed.cost["passes"] < N_TOKENS


def test_every_image_is_delivered_and_their_cost_returned(
    generator: ImageGenerator,
) -> None:
    made: list[Finished] = []
    seen: list[int] = []
    requests = [Request(CAPTIONS[k % 3], k, tag=k) for k in range(5)]
    stats = generator.run_all(
        requests, settings_of(generator, "autoregressive"), made.append, 2,
        lambda progress: seen.append(progress.passes),
    )  # fmt: skip
    assert sorted(each.output.request.tag for each in made) == [0, 1, 2, 3, 4]
    assert stats.tokens == 5 * N_TOKENS
    assert seen == list(range(1, 3 * N_TOKENS + 1))  # two, two, and one image


def test_a_size_is_the_one_it_came_in_or_the_one_asked_for(generator: ImageGenerator) -> None:
    pipe = generator.pipe
    assert generator.resize(None) is pipe and generator.resize((16, 16)) is pipe
    with pytest.raises(OptionError, match="expected 16x16, the only one of this model"):
        generator.resize((32, 32))
    assert generator.pipe is pipe


def test_a_worker_and_a_node_make_the_same_image_and_only_one_writes(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both stand on the generator: what it is told to do is told by both."""
    told: list[str] = []
    real = ImageGenerator.run_all

    def run_all(self: ImageGenerator, *values: Any) -> Any:
        told.append(values[1].name)
        return real(self, *values)

    monkeypatch.setattr(ImageGenerator, "run_all", run_all)
    monkeypatch.chdir(tmp_path)
    host = Host()
    opened = run_node(NODES["MMAccelLoadModel"], host, {"model": str(tiny_folder)}).values[0]
    chosen = run_node(NODES["MMAccelJacobiPolicy"], host, {"window": 5}).values[0]
    asked = {"model": opened, "policy": chosen, "prompt": CAPTIONS[0], "seed": 9}
    images = run_node(NODES["MMAccelGenerateImage"], host, asked).values[0]
    assert os.listdir(tmp_path) == []
    setup = Setup(
        str(tiny_folder), tmp_path / "out", policy="jacobi", options={"window": 5}, rows=1
    )
    setup.out.mkdir()
    record = Worker(setup).run(make_items([Row("one", CAPTIONS[0], seed=9)], 0)[0])
    with Image.open(setup.out / record["file"]) as opened_file:
        written = np.asarray(opened_file)
    assert np.array_equal((images[0] * 255).round().numpy().astype(np.uint8), written)
    assert told == ["jacobi", "jacobi"] and record["tokens"] == N_TOKENS
