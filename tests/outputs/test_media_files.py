"""Sound and clips on disk: written whole with their JSON files, and frames read back."""

from __future__ import annotations

import json
import random
import struct
import sys
import wave
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

from mmaccel.errors import MissingBackendError, OptionError
from mmaccel.outputs import video_files
from mmaccel.outputs.sound_files import read_sound, write_sound
from mmaccel.outputs.video_files import pick_format, read_frames, write_video


def read(file: Path) -> tuple[int, np.ndarray[Any, Any]]:
    with wave.open(str(file)) as sound:
        assert (sound.getnchannels(), sound.getsampwidth()) == (1, 2)
        data = sound.readframes(sound.getnframes())
        return sound.getframerate(), np.frombuffer(data, "<i2")


def test_a_sound_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it cannot be written, its facts are."""
    file = tmp_path / "a.wav"
    write_sound(file, torch.tensor([0.0, 0.5, -1.0, 1.0, 2.0, -3.0]), 8000, {"text": "ü"})
    rate, samples = read(file)
    assert rate == 8000 and samples.tolist() == [0, 16384, -32767, 32767, 32767, -32767]
    assert json.loads(file.with_suffix(".json").read_text(encoding="utf-8")) == {"text": "ü"}
    before = file.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wave.Wave_write, "writeframes", fail)
    for name in ("a.wav", "b.wav"):
        with pytest.raises(OSError, match="No space"):
            write_sound(tmp_path / name, torch.ones(9), 8000, {})
    assert file.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.wav", "b.json"]


def test_an_mp4_looks_like_its_frames(tmp_path: Path) -> None:
    ramp = torch.linspace(0, 255, 64).to(torch.uint8)
    frames = torch.stack(
        [ramp.roll(k).expand(32, 64)[..., None].expand(-1, -1, 3) for k in range(6)]
    )
    write_video(tmp_path / "a.mp4", frames, 12.5, {"seed": 1})
    read = torch.stack(
        [torch.from_numpy(np.asarray(f).copy()) for f in read_frames(tmp_path / "a.mp4", 9)]
    )
    assert read.shape == frames.shape
    assert float((read.float() - frames.float()).abs().mean()) < 6
    import av

    with av.open(str(tmp_path / "a.mp4")) as container:
        assert container.streams.video[0].average_rate == 12.5
    assert json.loads((tmp_path / "a.json").read_text()) == {"seed": 1}


def test_reading_keeps_the_last_frames_and_the_side_that_is_up(tmp_path: Path) -> None:
    pages = [Image.new("RGB", (6, 4), (10 * k, 0, 0)) for k in range(12)]
    pages[0].save(tmp_path / "a.gif", save_all=True, append_images=pages[1:])
    assert len(read_frames(tmp_path / "a.gif", 9)) == 9
    pages[0].save(tmp_path / "a.webp", save_all=True, append_images=pages[1:], lossless=True)
    read = [frame.getpixel((0, 0)) for frame in read_frames(tmp_path / "a.webp", 3)]
    assert read == [(90, 0, 0), (100, 0, 0), (110, 0, 0)]
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    pages[0].save(tmp_path / "a.jpg", exif=exif)
    assert read_frames(tmp_path / "a.jpg", 9)[0].size == (4, 6)


@pytest.mark.parametrize("fps", [5.0, 8.0, 24.0])
@pytest.mark.parametrize(("name", "unit"), [("a.gif", 10), ("a.webp", 1)])
def test_equal_frames_that_an_encoder_joined_are_read_again(
    tmp_path: Path, name: str, unit: int, fps: float
) -> None:
    shades = [0, 0, 0, 90, 180, 180]
    frames = torch.tensor(shades, dtype=torch.uint8)[:, None, None, None].expand(-1, 4, 6, 3)
    write_video(tmp_path / name, frames, fps, {})
    with Image.open(tmp_path / name) as opened:
        times = []
        for page in range(3):
            opened.seek(page)
            opened.load()
            times.append(opened.info["duration"])
    assert abs(sum(times) - 1000 * 6 / fps) <= unit / 2  # the clip's length
    read = [frame.getpixel((0, 0))[0] for frame in read_frames(tmp_path / name, 9)]  # type: ignore[index]
    assert read == shades
    assert len(read_frames(tmp_path / name, 4)) == 4
    pages = [Image.new("RGB", (6, 4), (10 * k, 0, 0)) for k in range(3)]
    times = [70, 100, 80]  # of an animation without a common rate
    pages[0].save(tmp_path / "b.gif", save_all=True, append_images=pages[1:], duration=times)
    assert len(read_frames(tmp_path / "b.gif", 9)) == 3


def test_a_video_that_breaks_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_video(tmp_path / "a.mp4", torch.zeros(2, 4, 6, 3, dtype=torch.uint8), 5.0, {})
    for error in (RuntimeError, AttributeError, OSError):
        monkeypatch.setattr(video_files, "_rotate", Mock(side_effect=error("a packet")))
        with pytest.raises(OptionError, match="which PyAV does not read .a packet.; save it again"):
            read_frames(tmp_path / "a.mp4", 9)


def test_odd_sides_are_named_before_a_clip_is_made() -> None:
    video_files.check_sides(".webp", (17, 16))
    with pytest.raises(OptionError, match="--format: expected even sides for mp4, .* of 17x16"):
        video_files.check_sides(".mp4", (17, 16))


def test_sound_is_read_as_it_was_written(tmp_path: Path) -> None:
    waveform = torch.linspace(-1, 1, 50)
    write_sound(tmp_path / "a.wav", waveform, 8000, {})
    read, rate = read_sound(tmp_path / "a.wav")
    assert rate == 8000 and torch.allclose(read, waveform, atol=2**-14)
    with wave.open(str(tmp_path / "b.wav"), "wb") as sound:
        sound.setparams((2, 2, 16_000, 0, "NONE", ""))
        sound.writeframes(np.array([[0, 16384], [-16384, 0]], "<i2").tobytes())
    read, rate = read_sound(tmp_path / "b.wav")
    assert (read.tolist(), rate) == ([0.25, -0.25], 16_000)


def test_pages_that_are_no_moments_are_left_out(tmp_path: Path) -> None:
    for name, kind in (("a.jpg", "MPO"), ("a.tiff", "TIFF")):
        photo, preview = Image.new("RGB", (40, 30), "red"), Image.new("RGB", (10, 10), "blue")
        photo.save(tmp_path / name, format=kind, save_all=True, append_images=[preview])
        assert [frame.size for frame in read_frames(tmp_path / name, 9)] == [(40, 30)], kind


def test_a_video_is_turned_as_its_file_says(tmp_path: Path) -> None:
    frames = torch.zeros(3, 32, 48, 3, dtype=torch.uint8)
    frames[:, :, :24, 0] = 255
    write_video(tmp_path / "a.mp4", frames, 25.0, {})
    data = bytearray((tmp_path / "a.mp4").read_bytes())
    place = data.index(b"tkhd") + 44  # of the matrix in version 0 of the box
    assert struct.unpack_from(">9i", data, place) == (1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    struct.pack_into(">9i", data, place, 0, 1 << 16, 0, -1 << 16, 0, 0, 32 << 16, 0, 1 << 30)
    (tmp_path / "b.mp4").write_bytes(data)  # a quarter with the clock: what was left is above
    for frame in read_frames(tmp_path / "b.mp4", 2):
        above, below = frame.getpixel((16, 8)), frame.getpixel((16, 40))
        assert frame.size == (32, 48) and above[0] > 200 and below[0] < 50  # type: ignore[index]


@pytest.mark.filterwarnings("ignore")  # Pillow's own, over what it reads nevertheless
@pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.png", "a.tiff"])
def test_broken_files_are_read_or_refused(tmp_path: Path, name: str) -> None:
    pages = [
        Image.fromarray(np.random.default_rng(k).integers(0, 256, (20, 30, 3), dtype=np.uint8))
        for k in range(4)
    ]
    pages[0].save(tmp_path / name, save_all=True, append_images=pages[1:])
    whole = (tmp_path / name).read_bytes()
    draw, refused = random.Random(0), 0
    for k in range(150):
        broken = bytearray(whole[: draw.randrange(len(whole))] if k % 2 else whole)
        for _ in range(3 * (1 - k % 2)):
            broken[draw.randrange(len(broken))] = draw.randrange(256)
        (tmp_path / "broken").write_bytes(broken)
        try:
            assert read_frames(tmp_path / "broken", 9)
        except OptionError as error:
            refused += str(error).startswith("start: expected an image")
    assert refused > 9


def test_without_pyav(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_format(None) == "mp4" and pick_format("webp") == "webp"
    import av

    with monkeypatch.context() as patched:
        patched.setattr(av, "codecs_available", {"mpeg4"})
        assert pick_format(None) == "webp" and pick_format("webp") == "webp"
        with pytest.raises(MissingBackendError, match="expected an av with libx264"):
            pick_format("mp4")
    monkeypatch.setitem(sys.modules, "av", None)
    assert pick_format(None) == "webp" and pick_format("webp") == "webp"
    with pytest.raises(MissingBackendError, match=r"pip install 'mmaccel\[video\]', or choose"):
        pick_format("mp4")
    (tmp_path / "a.mp4").write_bytes(b"\0" * 64)
    with pytest.raises(OptionError, match=r"for videos pip install 'mmaccel\[video\]'"):
        read_frames(tmp_path / "a.mp4", 9)


def test_what_the_encoder_says_is_an_oserror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import av

    def refuse(*args: Any, **options: Any) -> None:
        raise av.error.ProtocolNotFoundError(1330794744, "Protocol not found")

    monkeypatch.setattr(av, "open", refuse)
    with pytest.raises(OSError, match="Protocol not found"):
        write_video(tmp_path / "a.mp4", torch.zeros(1, 16, 16, 3, dtype=torch.uint8), 25.0, {})
    assert not list(tmp_path.glob("*.mp4")) and not list(tmp_path.glob(".*"))
