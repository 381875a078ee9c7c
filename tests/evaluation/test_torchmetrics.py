"""Fréchet distance, KID and CLIP score against torchmetrics, on the same features."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from mmaccel.evaluation.quality.clip_score import score_batches
from mmaccel.evaluation.quality.frechet import frechet_of
from mmaccel.evaluation.quality.kid import squared_mmd

pytest.importorskip("torchmetrics", reason="torchmetrics is not installed", exc_type=ImportError)


class Extractor(torch.nn.Module):
    """Images `[N, 3, 8, 8]` uint8 to `[N, 12]`, in double."""

    num_features = 12

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(192, 12, generator=generator, dtype=torch.float64) / 14

    def forward(self, images: Tensor) -> Tensor:
        return (images.flatten(1).double() / 255 @ self.weight).tanh()


@pytest.fixture(params=[(60, 60), (60, 44), (9, 11)], ids=str)
def images(request: pytest.FixtureRequest) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    n, m = request.param
    first = torch.randint(0, 256, (n, 3, 8, 8), generator=generator, dtype=torch.uint8)
    second = torch.randint(30, 256, (m, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return first, second


def test_frechet_distance(images: tuple[Tensor, Tensor]) -> None:
    from torchmetrics.image.fid import FrechetInceptionDistance

    extractor = Extractor()
    theirs = FrechetInceptionDistance(feature=extractor, normalize=False)
    theirs.set_dtype(torch.float64)
    theirs.update(images[0], real=True)
    theirs.update(images[1], real=False)
    ours = frechet_of(*(extractor(p).numpy() for p in images))
    assert ours.distance == pytest.approx(float(theirs.compute()), rel=1e-6)
    assert ours.distance > 0.01


def test_kernel_distance(images: tuple[Tensor, Tensor]) -> None:
    from torchmetrics.image.kid import KernelInceptionDistance

    extractor = Extractor()
    n = min(len(p) for p in images)
    theirs = KernelInceptionDistance(feature=extractor, subsets=6, subset_size=n // 2)
    theirs.set_dtype(torch.float64)
    theirs.update(images[0], real=True)
    theirs.update(images[1], real=False)
    torch.manual_seed(5)
    mean, std = theirs.compute()
    torch.manual_seed(5)  # the subsets that they drew
    features = [extractor(p) for p in images]
    found = [
        squared_mmd(*(f[torch.randperm(len(f))[: n // 2]].numpy() for f in features))
        for _ in range(6)
    ]
    assert torch.tensor(found).mean().item() == pytest.approx(float(mean), rel=1e-6)
    assert torch.tensor(found).std(unbiased=False).item() == pytest.approx(float(std), rel=1e-6)


class Embedding(torch.nn.Module):
    """Images and texts in one space, in the form in which torchmetrics asks for it."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.seen = torch.rand(192, 8, generator=generator, dtype=torch.float64)
        self.read = torch.rand(128, 8, generator=generator, dtype=torch.float64)
        self.config = SimpleNamespace(
            text_config=SimpleNamespace(max_position_embeddings=12),
        )

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        return pixel_values.flatten(1).double() @ self.seen

    def get_text_features(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.read[input_ids].mean(1)


def process(text=None, images=None, **_):  # type: ignore[no-untyped-def]
    if images is not None:
        return {"pixel_values": torch.stack([i.float() / 255 for i in images])}
    ids = torch.tensor([[ord(c) for c in (t + " " * 9)[:9]] for t in text])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_clip_score() -> None:
    from torchmetrics.multimodal import CLIPScore

    model, generator = Embedding(), torch.Generator().manual_seed(4)
    images = torch.randint(0, 256, (5, 3, 8, 8), generator=generator, dtype=torch.uint8)
    captions = ["a red circle", "water", "two stars", "night", "a ring"]

    def embed(batch: Tensor, texts: list[str]) -> tuple[Tensor, Tensor]:
        seen = model.get_image_features(**process(images=batch))
        return seen, model.get_text_features(**process(text=texts))

    theirs = CLIPScore(model_name_or_path=lambda: (model, process)).set_dtype(torch.float64)
    theirs.update(list(images), captions)
    ours = score_batches([(images[:2], captions[:2]), (images[2:], captions[2:])], embed)
    assert ours.mean == pytest.approx(float(theirs.compute()), rel=1e-6)
    assert ours.scores.max() - ours.scores.min() > 0.1
