"""What Cosmos' published code says where its files do not, and what a codec may not return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmaccel import Filters, ImageToVideo
from mmaccel.errors import NumericsError, OptionError
from mmaccel.pipelines.checkpoint import Place
from mmaccel.pipelines.cosmos_rotary import Yarn, clip_angles
from mmaccel.pipelines.cosmos_video import CosmosVideo
from mmaccel.pipelines.cosmos_window import _yarn_of, load_cosmos_window
from mmaccel.pipelines.jit_codec import JitCodec
from tests.video_beds import build_video


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


def test_what_the_files_do_not_say(tmp_path: Path) -> None:
    model, codec = build_video(tmp_path)
    (model / "config.json").unlink()
    window, shape = load_cosmos_window(model, Place())
    assert shape == (5, 40, 64) and window.max_positions == 12800
    assert _yarn_of({}, 40) == Yarn((3, 40, 64), scale=2.0, fast=4.0, slow=1.0)
    assert _yarn_of({}, 16) is None
    video = CosmosVideo(window, shape, JitCodec(codec, Place()))
    assert video.filters == Filters(temperature=1.0, top_p=0.8)
    assert (video.size, video.fps, video.starts) == ((1024, 640), 25.0, (1, 9))
    assert CosmosVideo(window, (2, 40, 64), video.codec).starts == (1,)  # nine would be all


def test_columns_are_stretched_by_the_rows_of_the_first_clips() -> None:
    """As published, whatever the number of columns then."""
    angles = [clip_angles((1, 1, 3), 24, 100.0, Yarn((3, 4, n))) for n in (8, 64)]
    assert torch.equal(*angles)
    assert not torch.equal(angles[0], clip_angles((1, 1, 3), 24, 100.0, Yarn((3, 40, 8))))


def test_what_goes_to_the_codec_and_comes_from_it(tmp_path: Path) -> None:
    window: Any = load_cosmos_window(build_video(tmp_path)[0], Place())[0]
    codec: Any = _Codec(torch.tensor([-2.0, -1, 0, 1, 1.5])[:, None, None, None].expand(5, 3, 1, 1))
    video = CosmosVideo(window, (3, 2, 3), codec)
    frames = torch.rand(9, 3, 32, 48)
    assert video.encode(frames).shape == (2, 2, 3)
    assert torch.equal(codec.seen, torch.cat((frames, frames[-1:].expand(8, -1, -1, -1))))
    assert video.encode(frames[:1]).shape == (1, 2, 3)
    tokens = torch.zeros(3, 2, 3, dtype=torch.int64)
    assert video.render(tokens)[:, 0, 0, 1].tolist() == [0, 0, 127, 255, 255]
    codec.frames = torch.tensor([0.0, float("nan")])[:, None, None, None].expand(2, 3, 1, 1)
    with pytest.raises(NumericsError, match="codec: expected frames in -1..1, received NaN"):
        video.render(tokens)


def test_a_codec_computes_in_the_models_dtype(tmp_path: Path) -> None:
    for name in ("encoder.jit", "decoder.jit"):
        torch.jit.script(_Weighted()).save(str(tmp_path / name))
    codec = JitCodec(tmp_path, Place("cpu", torch.bfloat16))
    frames = codec.decode(torch.full((2, 2, 3), 257))
    assert frames.dtype == torch.float32 and frames.shape == (2, 3, 2, 3)
    assert frames.unique().tolist() == [256.0]  # which is what 257 is in bfloat16


def test_place_and_cuda_graphs_are_looked_at_first() -> None:
    for options in ({"device": "nowhere"}, {"dtype": torch.int8}, {"cuda_graphs": "steam"}):
        name = next(iter(options))
        with pytest.raises(OptionError, match=f"{name}: expected"):
            ImageToVideo.from_pretrained("none", **options)  # type: ignore[arg-type]
