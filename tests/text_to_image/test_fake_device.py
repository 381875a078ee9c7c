"""Pipelines on a fake device: no operation mixes it with the CPU, and tokens equal the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import Autoregressive, Jacobi, TextToImage
from tests.fixtures.fake_device import DEVICE, FakeTensor, fake_device, same
from tests.fixtures.tiny_model import CAPTIONS, masked_beside_plain

Make = Callable[[Any], Tensor]
PARAMS: dict[str, Any] = dict(guidance_scale=2.0, top_k=12, top_p=0.9, min_p=0.01)
WINDOW = [
    Autoregressive(), Jacobi("adaptive"), Jacobi(4, drafts="above"),
    *(mmaccel.SpeculativeJacobi(4, coupling=c) for c in ("independent", "maximal", "gumbel")),
    mmaccel.Speculative(4), mmaccel.GroupedSpeculative(4),
]  # fmt: skip
CANVAS = [
    mmaccel.Stepwise(order="halton"), mmaccel.EntropyBounded(gamma=1.0),
    mmaccel.ConfidentParallel(rule="frechet", factor=0.5), mmaccel.KLStable(), mmaccel.LocalLeap(),
    mmaccel.AdaptiveBlock(), mmaccel.RevisedParallel(),
    mmaccel.LosslessUnmask(block=8, cache="prefix"), mmaccel.Stepwise(block=8, cache="dual"),
    mmaccel.EntropyBounded(budget_nats=1.0, block=4, cache=mmaccel.CachePlan("vicinity", margin=2)),
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


@pytest.mark.slow
@pytest.mark.parametrize("policy", WINDOW, ids=repr)
def test_images_by_window(tiny_folder: Path, policy: Any) -> None:
    assert same(draw(tiny_folder, policy))


@pytest.mark.slow
@pytest.mark.parametrize("policy", CANVAS, ids=lambda policy: repr(policy)[:50])
def test_images_by_canvas(masked: Path, policy: Any) -> None:
    assert same(draw(masked, policy))


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
