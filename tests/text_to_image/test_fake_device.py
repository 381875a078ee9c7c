"""Pipelines on a fake device: no operation mixes it with the CPU, and tokens equal the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import mmaccel
from benchmarks.canvas import GrammarText
from mmaccel import Autoregressive, ImageToVideo, Jacobi, TextToImage, TextToSpeech
from mmaccel.pipelines.text_to_image.registry import find_source
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from scripts.training.grammar_tasks import EVALUATION_SEED, make_examples
from tests.fixtures.checkpoints import FAMILIES, SIZES, captions
from tests.fixtures.fake_device import DEVICE, FakeTensor, fake_device, same
from tests.fixtures.speech import FAMILIES as SPEAKERS
from tests.fixtures.speech import SECONDS, TEXTS
from tests.fixtures.tiny_model import CAPTIONS, masked_beside_plain
from tests.fixtures.video import build_video

Make = Callable[[Any], Tensor]
PARAMS: dict[str, Any] = dict(guidance_scale=2.0, top_k=12, top_p=0.9, min_p=0.01)
WINDOW = [
    Autoregressive(), Jacobi("adaptive"), Jacobi(4, drafts="above"),
    *(mmaccel.SpeculativeJacobi(4, coupling=c) for c in ("independent", "maximal", "gumbel")),
    mmaccel.Speculative(4), mmaccel.GroupedSpeculative(4),
]  # fmt: skip
CANVAS = [
    mmaccel.Stepwise(order="halton"), mmaccel.LosslessUnmask(),
    mmaccel.EntropyBounded(gamma=1.0), mmaccel.EntropyBounded(budget_nats=1.0),
    mmaccel.ConfidentParallel(), mmaccel.ConfidentParallel(rule="frechet", factor=0.5),
    mmaccel.KLStable(), mmaccel.LocalLeap(), mmaccel.AdaptiveBlock(), mmaccel.RevisedParallel(),
    mmaccel.LosslessUnmask(block=8, cache="prefix"), mmaccel.Stepwise(block=8, cache="dual"),
    mmaccel.EntropyBounded(gamma=0.5, block=4, cache=mmaccel.CachePlan("vicinity", margin=2)),
    mmaccel.MaskedParallel(steps=4), mmaccel.MaskedParallel(order="halton", choose="first"),
]  # fmt: skip


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return masked_beside_plain(tmp_path_factory.mktemp("masked"))[0]


def draw(folder: Path, policy: Any) -> Make:
    """Two images of a model by a policy."""

    def make(device: Any) -> Tensor:
        pipe = TextToImage.from_pretrained(folder, device=device, dtype="fp32")
        assert pipe.model.device == device
        return pipe(CAPTIONS[:2], policy=policy, seed=[3, 4], **PARAMS).tokens

    return make


@pytest.mark.parametrize("policy", WINDOW, ids=repr)
def test_images_by_window(tiny_folder: Path, policy: Any) -> None:
    assert same(draw(tiny_folder, policy))


@pytest.mark.parametrize("policy", CANVAS, ids=lambda policy: repr(policy)[:50])
def test_images_by_canvas(masked: Path, policy: Any) -> None:
    assert same(draw(masked, policy))


@pytest.mark.parametrize("family", FAMILIES)
def test_images_of_every_family(built: Callable[[str], Path], family: str) -> None:
    def make(device: Any) -> Tensor:
        pipe = TextToImage.from_pretrained(
            built(family), size=SIZES.get(family), device=device, dtype="fp32"
        )
        assert pipe.model.device == device
        if family == "glm-image":
            pipe.image_model.diffusion_options = {"num_inference_steps": 1}  # type: ignore[attr-defined]
        made = pipe(captions(family)[:2], policy=Jacobi(40), seed=[3, 4])
        pixels = [torch.from_numpy(np.asarray(image).copy()) for image in made.images]
        return torch.cat([made.tokens.cpu().flatten(), *(p.flatten() for p in pixels)])

    assert same(make)


@pytest.mark.parametrize("family", SPEAKERS)
def test_speech(speech_folders: dict[str, tuple[Path, Path]], family: str) -> None:
    model, codec = speech_folders[family]

    def make(device: Any) -> Tensor:
        pipe = TextToSpeech.from_pretrained(model, codec=codec, device=device, dtype="fp32")
        assert pipe.model.device == device
        said = pipe(TEXTS, seed=[1, 2, 3], batch_size=2, max_seconds=SECONDS[family])
        return torch.cat([made.waveform for made in said.utterances])

    assert same(make)


@pytest.mark.parametrize("policy", [None, Jacobi(4, drafts="previous-frame")], ids=repr)
def test_clips(tmp_path: Path, policy: Any) -> None:
    model, codec = build_video(tmp_path)
    start = Image.new("RGB", (48, 32), "red")

    def make(device: Any) -> Tensor:
        pipe = ImageToVideo.from_pretrained(model, codec=codec, device=device, dtype="fp32")
        assert pipe.model.device == device
        clips = pipe(start, policy=policy, seed=[1, 2, 3], batch_size=2).clips
        return torch.stack([clip.frames for clip in clips])

    assert same(make)


def test_answers() -> None:
    folder = find_source("grammar-masked")
    prompts = [made.prompt for made in make_examples(EVALUATION_SEED, range(2), "sort")]

    def make(device: Any) -> Tensor:
        text = GrammarText(folder, device)
        noise = Noise.from_seed(3, len(prompts), device)
        made = mmaccel.EntropyBounded(0.5).sample(
            text.model, text.prompt(prompts), text.length, params=SamplingParams(), noise=noise
        )
        return torch.cat([row[:n] for row, n in zip(made.tokens, made.lengths.tolist())])

    assert same(make)


def test_the_device_refuses_what_an_accelerator_refuses() -> None:
    near = torch.arange(3.0)
    with fake_device() as device:
        there = torch.arange(3.0, device=device)
        assert (
            isinstance(there, FakeTensor)
            and there.device == DEVICE
            and torch.equal(there.cpu(), near)
        )
        for wrong in (
            lambda: there + near, lambda: torch.cat([there, near]), lambda: there.add_(near),
            lambda: near[there.long()], lambda: near.masked_fill_(there > 0, 1), there.numpy,
        ):  # fmt: skip
            with pytest.raises((RuntimeError, TypeError), match="expected"):
                wrong()
        assert (there + torch.tensor(1.0)).tolist() == [1, 2, 3]  # a number
        assert there[torch.tensor([2, 0])].tolist() == [2, 0]
        near.copy_(there + 1)
        assert near.tolist() == [1, 2, 3] and type(there.to("cpu")) is Tensor
        layer = torch.nn.Linear(3, 2).to(device)
        assert layer(there).device == device and type(there.new_zeros(2)) is FakeTensor
        with pytest.raises(RuntimeError, match="expected all tensors on one device"):
            layer(near)
