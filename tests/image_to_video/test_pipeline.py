"""`ImageToVideo`: tokens of a plain loop, frames of the codec, and the given frames."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image

from mmaccel import ImageToVideo, Jacobi, SpeculativeJacobi
from mmaccel.pipelines.image_to_video.preprocessing import read_start
from tests.fixtures.media import image
from tests.fixtures.shared import media_folders, media_pipe
from tests.fixtures.video import SHAPE, VOCAB, Transformer

FRAME = SHAPE[1] * SHAPE[2]


@pytest.fixture
def pipe() -> ImageToVideo:
    """One for all tests, which leave it as it was."""
    made: ImageToVideo = media_pipe("cosmos")
    return made


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


def test_frames_are_the_codecs(pipe: ImageToVideo) -> None:
    clip = pipe(image(), seed=4)[0]
    assert (clip.frames.shape, clip.frames.dtype) == ((17, 32, 48, 3), torch.uint8)
    assert (clip.fps, clip.n_given) == (25.0, 1)
    codec = media_folders("cosmos")[1]
    encoder, decoder = (torch.jit.load(str(codec / f"{n}coder.jit")) for n in ("en", "de"))
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
    assert torch.equal(
        read_start(frames[:5], (30, 20), (1, 9))[0], read_start(frames[4], (30, 20), (1, 9))[0]
    )
    wide = Image.new("RGB", (90, 20), "red")
    wide.paste((0, 0, 255), (30, 0, 60, 20))
    middle = read_start(wide, (30, 20), (1,))[0]
    assert torch.equal(middle, torch.tensor([-1.0, -1, 1])[:, None, None].expand(3, 20, 30))
    tall = read_start(wide.rotate(90, expand=True).resize((10, 45)), (30, 20), (1,))[0]
    assert tall.shape == (3, 20, 30) and float(tall[2].mean()) > 0.9
    assert read_start(Image.new("L", (7, 5), 255), (30, 20), (1,)).unique().tolist() == [1.0]


@pytest.mark.parametrize("size", [(7, 50), (96, 64)])
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
