"""Cosmos: the published transformer's logits, defaults of its files, and files of other models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmaccel import ImageToVideo, SamplingParams
from mmaccel.contracts import Pass
from mmaccel.errors import NumericsError
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig
from mmaccel.pipelines.models.cosmos.token_model import (
    Yarn,
    _Settings,
    _yarn_of,
    clip_angles,
    load_cosmos_window,
)
from mmaccel.pipelines.models.cosmos.video import CosmosVideo, JitCodec
from tests.fixtures.media import image
from tests.fixtures.shared import media_folders
from tests.fixtures.video import VOCAB, YARN, Transformer, build_video


class _Codec:
    """Keeps what it encodes, and decodes to what it was given."""

    def __init__(self, frames: Tensor) -> None:
        self.frames, self.seen = frames, frames

    def encode(self, frames: Tensor) -> Tensor:
        self.seen = frames
        return torch.zeros((len(frames) - 1) // 8 + 1, 2, 3, dtype=torch.int64)

    def decode(self, tokens: Tensor) -> Tensor:
        return self.frames


class _Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.weight.dtype)[:, None] * self.weight


@pytest.mark.parametrize("config", [{}, YARN])
def test_logits_are_those_of_the_published_transformer(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    model, codec = build_video(tmp_path, **config)
    window = ImageToVideo.from_pretrained(model, codec=codec).model
    tokens = torch.randint(0, VOCAB, (18,), generator=torch.Generator().manual_seed(0))
    window.reserve(1, 18)
    got = window.forward(Pass(tokens[None], torch.zeros(1, dtype=torch.int64)))[0]
    wanted, other = Transformer(config or None)(tokens), Transformer(None if config else YARN)
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5)
    assert float((got - other(tokens)).abs().max()) > 1e-2  # the stretch is seen


def test_columns_are_stretched_by_the_rows_of_the_first_clips() -> None:
    """As published, whatever the number of columns then."""
    angles = [clip_angles((1, 1, 3), 24, 100.0, yarn=Yarn((3, 4, n))) for n in (8, 64)]
    assert torch.equal(*angles)
    assert not torch.equal(angles[0], clip_angles((1, 1, 3), 24, 100.0, yarn=Yarn((3, 40, 8))))


def test_what_the_files_do_not_say(tmp_path: Path) -> None:
    model, codec = build_video(tmp_path)
    (model / "config.json").unlink()
    window, shape = load_cosmos_window(model, LoadConfig())
    assert shape == (5, 40, 64) and window.max_positions == 12800
    assert _yarn_of(_Settings(), 40) == Yarn((3, 40, 64), scale=2.0, fast=4.0, slow=1.0)
    assert _yarn_of(_Settings(), 16) is None
    video = CosmosVideo(window, shape, JitCodec(codec, LoadConfig()))
    assert video.params == SamplingParams(temperature=1.0, top_p=0.8)
    assert (video.size, video.fps, video.starts) == ((1024, 640), 25.0, (1, 9))
    assert CosmosVideo(window, (2, 40, 64), video.codec).starts == (1,)  # nine would be all


def test_what_goes_to_the_codec_and_comes_from_it(tmp_path: Path) -> None:
    window: Any = load_cosmos_window(build_video(tmp_path)[0], LoadConfig())[0]
    codec: Any = _Codec(torch.tensor([-2.0, -1, 0, 1, 1.5])[:, None, None, None].expand(5, 3, 1, 1))
    video = CosmosVideo(window, (3, 2, 3), codec)
    frames = torch.rand(9, 3, 32, 48)
    assert video.encode(frames).shape == (2, 2, 3)
    assert torch.equal(codec.seen, torch.cat((frames, frames[-1:].expand(8, -1, -1, -1))))
    assert video.encode(frames[:1]).shape == (1, 2, 3)
    tokens = torch.zeros(3, 2, 3, dtype=torch.int64)
    assert video.render(tokens)[:, 0, 0, 1].tolist() == [0, 0, 127, 255, 255]
    codec.frames = torch.tensor([0.0, float("nan")])[:, None, None, None].expand(2, 3, 1, 1)
    with pytest.raises(
        NumericsError, match="frames: expected values in -1..1, received NaN or inf"
    ):
        video.render(tokens)


def test_a_codec_computes_in_the_models_dtype(tmp_path: Path) -> None:
    for name in ("encoder.jit", "decoder.jit"):
        torch.jit.script(_Weighted()).save(str(tmp_path / name))
    codec = JitCodec(tmp_path, LoadConfig(dtype=torch.bfloat16))
    frames = codec.decode(torch.full((2, 2, 3), 257))
    assert frames.dtype == torch.float32 and frames.shape == (2, 3, 2, 3)
    assert frames.unique().tolist() == [256.0]  # which is what 257 is in bfloat16


def test_the_codec_runs_without_an_optimiser_that_changes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, codec_folder = media_folders("cosmos")
    pipe = ImageToVideo.from_pretrained(model, codec=codec_folder)
    codec: Any = pipe.video.codec  # type: ignore[attr-defined]
    seen: list[bool] = []

    def watched(own: Any) -> Any:
        def call(*args: Any) -> Any:
            seen.append(torch._C._get_graph_executor_optimize())
            return own(*args)

        return call

    for name in ("_encoder", "_decoder"):
        monkeypatch.setattr(codec, name, watched(getattr(codec, name)))
    pipe(image())
    assert seen == [False, False] and torch._C._get_graph_executor_optimize()
