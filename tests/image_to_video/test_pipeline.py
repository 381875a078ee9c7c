"""`ImageToVideo`: tokens of a plain loop, frames of the codec, and the given frames."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmaccel import ImageToVideo, Jacobi, SpeculativeJacobi
from mmaccel.errors import OptionError
from mmaccel.pipelines.image_to_video.preprocessing import read_start
from tests.fixtures.media import image
from tests.fixtures.video import SHAPE, VOCAB, Transformer, build_video

FRAME = SHAPE[1] * SHAPE[2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_video(tmp_path_factory.mktemp("cosmos"))


@pytest.fixture(scope="module")
def pipe(folders: tuple[Path, Path]) -> ImageToVideo:
    return ImageToVideo.from_pretrained(folders[0], codec=folders[1])


def test_greedy_tokens_are_a_plain_loops(pipe: ImageToVideo) -> None:
    plain = Transformer()
    for n_given, start in ((1, image()), (9, [image(k) for k in range(9)])):
        clip = pipe(start, temperature=0, policy=Jacobi(window=5))[0]
        tokens = clip.tokens.flatten()[: (1 if n_given == 1 else 2) * FRAME]
        while len(tokens) < 3 * FRAME:
            tokens = torch.cat((tokens, plain(tokens)[-1].argmax()[None]))
        assert clip.n_given == n_given and torch.equal(clip.tokens.flatten(), tokens)
        assert clip.passes < len(tokens)


def test_other_policies_stay_within_the_clip(pipe: ImageToVideo) -> None:
    made = pipe(image(), seed=[1, 2], policy=SpeculativeJacobi(window=8, coupling="maximal"))
    assert made.stats.exactness == "distribution"
    for clip in made.clips:
        assert clip.tokens.shape == SHAPE and 0 <= int(clip.tokens.min())
        assert int(clip.tokens.max()) < VOCAB and clip.passes <= 2 * FRAME


def test_without_a_seed_torchs_generator_draws_one(pipe: ImageToVideo) -> None:
    torch.manual_seed(2)
    first, second = (pipe(image()) for _ in range(2))
    assert first.stats.seed == first[0].seed != second.stats.seed
    torch.manual_seed(2)
    assert pipe(image()).stats.seed == first.stats.seed
    ((frames,),) = pipe(image(), seed=second.stats.seed, return_dict=False)
    assert torch.equal(frames, second[0].frames)
    assert set(pipe.components) == {"model", "codec"}


def test_frames_are_the_codecs(pipe: ImageToVideo, folders: tuple[Path, Path]) -> None:
    clip = pipe(image(), seed=4)[0]
    assert (clip.frames.shape, clip.frames.dtype) == ((17, 32, 48, 3), torch.uint8)
    assert (clip.fps, clip.n_given) == (25.0, 1)
    encoder, decoder = (torch.jit.load(str(folders[1] / f"{n}coder.jit")) for n in ("en", "de"))
    whole = decoder(clip.tokens[None])[0].permute(1, 2, 3, 0)
    wanted = ((whole + 1) / 2).clamp(0, 1).mul(255).to(torch.uint8)
    assert int((clip.frames.int() - wanted.int()).abs().max()) <= 1
    given = torch.from_numpy(np.asarray(image()).copy()).permute(2, 0, 1)[None, :, None]
    tokens = encoder((given / 127.5 - 1).expand(-1, -1, 17, -1, -1))[0][0, 0]
    assert torch.equal(clip.tokens[0], tokens.long())


def test_which_frames_are_read_and_how_they_are_cut() -> None:
    frames = [image(k, (30, 20)) for k in range(12)]
    as_numbers = torch.stack([torch.from_numpy(np.asarray(frame).copy()) for frame in frames])
    read = read_start(frames, (30, 20), (1, 9))
    assert read.shape == (9, 3, 20, 30) and float(read.abs().max()) <= 1
    back = read.add(1).mul(127.5).round().to(torch.uint8).permute(0, 2, 3, 1)
    assert torch.equal(back, as_numbers[3:])  # the last nine
    for same in (as_numbers, as_numbers / 255, as_numbers.double() / 255, tuple(frames)):
        assert torch.equal(read_start(same, (30, 20), (1, 9)), read)
    assert torch.equal(read_start(frames[:5], (30, 20), (1, 9))[0], read_start(
        frames[4], (30, 20), (1, 9))[0])  # fmt: skip
    wide = Image.new("RGB", (90, 20), "red")
    wide.paste((0, 0, 255), (30, 0, 60, 20))
    middle = read_start(wide, (30, 20), (1,))[0]
    assert torch.equal(middle, torch.tensor([-1.0, -1, 1])[:, None, None].expand(3, 20, 30))
    tall = read_start(wide.rotate(90, expand=True).resize((10, 45)), (30, 20), (1,))[0]
    assert tall.shape == (3, 20, 30) and float(tall[2].mean()) > 0.9
    assert read_start(Image.new("L", (7, 5), 255), (30, 20), (1,)).unique().tolist() == [1.0]


@pytest.mark.parametrize("size", [(7, 50), (50, 7), (31, 23), (96, 64), (1, 9)])
def test_only_the_visible_part_is_scaled(size: tuple[int, int]) -> None:
    """The result equals scaling all of it and then cropping."""
    wanted = (48, 32)
    scale = max(wanted[0] / size[0], wanted[1] / size[1])
    whole = (math.ceil(scale * size[0]), math.ceil(scale * size[1]))
    left, top = round((whole[0] - 48) / 2), round((whole[1] - 32) / 2)
    scaled = image(3, size).resize(whole, Image.Resampling.BILINEAR)
    cut = np.asarray(scaled.crop((left, top, left + 48, top + 32))).astype(int)
    read = read_start(image(3, size), wanted, (1,))[0].permute(1, 2, 0).add(1).mul(127.5)
    assert np.abs(read.numpy() - cut).max() <= 1.01


def test_images_of_all_kinds() -> None:
    strip = Image.new("RGB", (1, 60000), "red")  # scaled as a whole: more than a terabyte
    assert read_start(strip, (4000, 16), (1,))[0, :, 8, 99].tolist() == [1.0, -1.0, -1.0]
    ramp = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    for kind in ("<u2", ">u2"):
        mode = "I;16" if kind == "<u2" else "I;16B"
        deep = Image.frombytes(mode, (16, 16), ramp.astype(kind).tobytes())
        read = read_start(deep, (16, 16), (1,))[0].add(1).mul(127.5).round()
        assert torch.equal(read, torch.arange(256.0).view(16, 16).expand(3, -1, -1))
    lying = image(0, (30, 20))
    lying.getexif()[0x0112] = 6
    rotated = read_start(lying, (20, 30), (1,))
    assert torch.equal(
        rotated, read_start(image(0, (30, 20)).rotate(270, expand=True), (20, 30), (1,))
    )
    for mode in ("1", "P", "CMYK", "RGBA", "LA"):
        assert read_start(Image.new(mode, (5, 4)), (16, 16), (1,)).shape == (1, 3, 16, 16)


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (Image.new("RGB", (0, 5)), "expected images of pixels, received one of 0x5"),
        (Image.new("F", (5, 5)), "expected 8 or 16 bits a channel, .* mode 'F'"),
        (Image.new("I", (5, 5)), "expected 8 or 16 bits a channel, .* mode 'I'"),
        (None, "received NoneType 'None'; open it"),
        ("clip.mp4", "received str 'clip.mp4'"),
        ([], "received list"),
        ([1, 2], "received list"),
        (torch.zeros(3, 4, 4), r"received a tensor \[3, 4, 4\] of torch.float32"),
        (torch.zeros(1, 3, 4, 4), r"received a tensor \[1, 3, 4, 4\]"),
        (torch.zeros(0, 4, 4, 3), r"received a tensor \[0, 4, 4, 3\]"),
        (torch.zeros(1, 4, 4, 3, dtype=torch.int64), "of torch.int64"),
        (torch.full((1, 4, 4, 3), 1.5), "expected floats in 0..1, received 1.5..1.5"),
        (torch.full((1, 4, 4, 3), float("nan")), "expected floats in 0..1, received nan..nan"),
    ],
)
def test_a_bad_start_is_refused(pipe: ImageToVideo, start: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        pipe(start)
