"""Sound and clips on disk: written with their JSON files, and frames read back."""

from __future__ import annotations

import json
import struct
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from mmaccel.errors import MissingBackendError, OptionError
from mmaccel.outputs.sound_files import read_sound, write_sound
from mmaccel.outputs.video_files import pick_format, read_frames, write_video


def test_a_sound_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "a.wav"
    write_sound(file, torch.tensor([0.0, 0.5, -1.0, 1.0, 2.0, -3.0]), 8000, {"text": "ü"})
    with wave.open(str(file)) as sound:
        assert (sound.getnchannels(), sound.getsampwidth(), sound.getframerate()) == (1, 2, 8000)
        samples = np.frombuffer(sound.readframes(9), "<i2").tolist()
    assert samples == [0, 16384, -32767, 32767, 32767, -32767]
    assert json.loads(file.with_suffix(".json").read_text(encoding="utf-8")) == {"text": "ü"}
    read, rate = read_sound(file)
    assert rate == 8000 and torch.allclose(read[:3], torch.tensor([0.0, 0.5, -1.0]), atol=2**-14)
    with wave.open(str(file), "wb") as sound:
        sound.setparams((2, 2, 16_000, 0, "NONE", ""))
        sound.writeframes(np.array([[0, 16384], [-16384, 0]], "<i2").tobytes())
    read, rate = read_sound(file)
    assert (read.tolist(), rate) == ([0.25, -0.25], 16_000)


def test_an_mp4_looks_like_its_frames_and_is_turned_as_it_says(tmp_path: Path) -> None:
    frames = torch.zeros(3, 32, 48, 3, dtype=torch.uint8)
    frames[:, :, :24, 0] = 255
    write_video(tmp_path / "a.mp4", frames, 12.5, {"seed": 1})
    read = torch.stack([torch.tensor(np.asarray(f)) for f in read_frames(tmp_path / "a.mp4", 9)])
    assert read.shape == frames.shape and float((read.float() - frames.float()).abs().mean()) < 6
    assert json.loads((tmp_path / "a.json").read_text()) == {"seed": 1}
    data = bytearray((tmp_path / "a.mp4").read_bytes())
    place = data.index(b"tkhd") + 44  # of the matrix in version 0 of the box
    assert struct.unpack_from(">9i", data, place) == (1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    struct.pack_into(">9i", data, place, 0, 1 << 16, 0, -1 << 16, 0, 0, 32 << 16, 0, 1 << 30)
    (tmp_path / "b.mp4").write_bytes(data)  # a quarter with the clock: what was left is above
    for frame in read_frames(tmp_path / "b.mp4", 2):
        above, below = frame.getpixel((16, 8)), frame.getpixel((16, 40))
        assert frame.size == (32, 48) and above[0] > 200 and below[0] < 50  # type: ignore[index]


def test_reading_keeps_the_last_frames_and_the_side_that_is_up(tmp_path: Path) -> None:
    """Pages that are no moments are left out."""
    pages = [Image.new("RGB", (6, 4), (10 * k, 0, 0)) for k in range(12)]
    for name in ("a.gif", "a.webp"):
        pages[0].save(tmp_path / name, save_all=True, append_images=pages[1:], lossless=True)
        read = [frame.getpixel((0, 0)) for frame in read_frames(tmp_path / name, 3)]
        assert read == [(90, 0, 0), (100, 0, 0), (110, 0, 0)]
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    pages[0].save(tmp_path / "a.jpg", exif=exif)
    assert read_frames(tmp_path / "a.jpg", 9)[0].size == (4, 6)
    for name, kind in (("b.jpg", "MPO"), ("b.tiff", "TIFF")):
        preview = Image.new("RGB", (10, 10), "blue")
        pages[0].save(tmp_path / name, format=kind, save_all=True, append_images=[preview])
        assert [frame.size for frame in read_frames(tmp_path / name, 9)] == [(6, 4)], kind


@pytest.mark.parametrize("fps", [5.0, 24.0])
@pytest.mark.parametrize(("name", "unit"), [("a.gif", 10), ("a.webp", 1)])
def test_equal_frames_that_an_encoder_joined_are_read_again(
    tmp_path: Path, name: str, unit: int, fps: float
) -> None:
    shades = [0, 0, 0, 90, 180, 180]
    frames = torch.tensor(shades, dtype=torch.uint8)[:, None, None, None].expand(-1, 4, 6, 3)
    write_video(tmp_path / name, frames, fps, {})
    with Image.open(tmp_path / name) as opened:
        pages = ImageSequence.Iterator(opened)
        total = sum(page.copy().info["duration"] for page in pages)
    assert abs(total - 1000 * 6 / fps) <= unit / 2  # the clip's length
    read = [frame.getpixel((0, 0))[0] for frame in read_frames(tmp_path / name, 9)]  # type: ignore[index]
    assert read == shades and len(read_frames(tmp_path / name, 4)) == 4
    pages = [Image.new("RGB", (6, 4), (10 * k, 0, 0)) for k in range(3)]
    times = [70, 100, 80]  # of an animation without a common rate
    pages[0].save(tmp_path / "b.gif", save_all=True, append_images=pages[1:], duration=times)
    assert len(read_frames(tmp_path / "b.gif", 9)) == 3


def test_without_pyav(tmp_path: Path, monkeypatch: Any) -> None:
    import av

    assert pick_format(None) == "mp4"
    with monkeypatch.context() as patched:
        patched.setattr(av, "codecs_available", {"mpeg4"})
        assert pick_format(None) == "webp"
        with pytest.raises(MissingBackendError, match="the package av with libx264"):
            pick_format("mp4")
    monkeypatch.setitem(sys.modules, "av", None)
    assert pick_format(None) == "webp"
    with pytest.raises(MissingBackendError, match=r"'mmaccel\[video\]', or choose"):
        pick_format("mp4")
    (tmp_path / "a.mp4").write_bytes(b"\0" * 64)
    with pytest.raises(OptionError, match=r"for videos pip install 'mmaccel\[video\]'"):
        read_frames(tmp_path / "a.mp4", 9)
