"""Picture files of strangers: the formats that are read, and sizes that are refused unread."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import EpsImagePlugin, Image, PngImagePlugin

from mmaccel.errors import OptionError, ShapeError
from mmaccel.evaluation.quality import image_folder
from mmaccel.evaluation.quality.image_folder import open_image, read_facts
from mmaccel.outputs import video_files
from mmaccel.outputs.video_files import read_frames
from mmaccel.pipelines.hosts.loading import pictures
from mmaccel.pipelines.image_to_text.prompts import read_image, read_images

DOORS: dict[str, Callable[[Path], Any]] = {
    "answer": read_image,
    "animate": lambda file: read_frames(file, 9),
    "evaluate": open_image,
    "export": read_facts,
}
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"


def write_header(file: Path, width: int, height: int) -> None:
    """A PNG with a header and no pixels: whoever decodes it fails otherwise."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    end = b"\0\0\0\0IEND" + struct.pack(">I", zlib.crc32(b"IEND"))
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk + b"\0\0\0\0IDAT\x35\xaf\x06\x1e" + end)


@pytest.mark.parametrize("door", DOORS)
def test_no_program_runs_what_a_picture_contains(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []

    def run(*arguments: Any, **_: Any) -> Any:
        ran.append(arguments)
        return Image.new("RGB", (9, 9)).im

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", run)
    file = tmp_path / ("photo.png" if door == "export" else "photo.jpg")  # facts are in PNGs
    file.write_bytes(POSTSCRIPT)
    with pytest.raises(OptionError) as refused:
        DOORS[door](file)
    said = str(refused.value)
    assert ran == [] and "expected an image" in said and file.name in said and "\n" not in said


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("side", [9_460, 60_000])  # above our limit, Pillow's
def test_pixels_are_counted_before_they_are_decoded(
    door: str, side: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("pixels were decoded")

    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", load)
    file = tmp_path / "large.png"
    write_header(file, side, side)
    with pytest.raises(OptionError, match="expected at most 89478485 pixels, received .*large.png"):
        DOORS[door](file)


@pytest.mark.parametrize("kind", [*pictures.FORMATS, "MPO"])
def test_formats_of_pictures_are_read(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "picture"  # without a suffix: the content decides
    Image.new("RGB", (6, 4), "red").save(file, format=kind)
    assert read_image(file).size == (6, 4) and open_image(file).size == (6, 4)


@pytest.mark.parametrize("kind", ["EPS", "PCX", "TGA", "PPM", "ICO", "PDF", "SGI"])
def test_other_formats_are_not(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    Image.new("RGB", (16, 16)).save(file, format=kind)
    with pytest.raises(OptionError, match="read as PNG, JPEG, WebP, GIF, BMP or TIFF .*; save it"):
        read_image(file)


def test_frames_are_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [Image.new("RGB", (20, 10), (k, 0, 0)) for k in range(12)]
    file = tmp_path / "a.gif"
    pages[0].save(file, save_all=True, append_images=pages[1:])
    room = 8 * 200  # five, and what Pillow holds
    assert len(read_frames(file, 5, room=room)) == 5
    with pytest.raises(OptionError, match="at most 1600 pixels in .*, received .* 9 of 20x10"):
        read_frames(file, 6, room=room)
    monkeypatch.setattr(video_files, "MAX_DECODED", 11 * 200)
    monkeypatch.setattr(video_files, "upright_rgb", lambda opened: pytest.fail("decoded"))
    with pytest.raises(OptionError, match="2200 pixels in all frames together, .* in 12 frames"):
        read_frames(file, 5)


def test_pictures_are_counted_together_and_jpegs_shrunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "MAX_TOGETHER", 2_000)
    png, jpeg = tmp_path / "a.png", tmp_path / "b.jpg"
    for file in (png, jpeg):
        Image.new("RGB", (40, 32), "red").save(file)
    assert [image.size for image in read_images([png, jpeg], 1)[0]] == [(40, 32), (20, 16)]
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("decoded"))
    with pytest.raises(OptionError, match="at most 2000 pixels in all pictures .* received 2560"):
        read_images([[png], [png]], 2)


def test_images_of_unlike_sizes_are_not_decoded(tmp_path: Path) -> None:
    items = []
    for k, side in enumerate((40, 40, 30)):
        items.append(image_folder.Item(tmp_path / f"{k}.png"))
        write_header(items[-1].file, side, side)
    with pytest.raises(ShapeError, match="one size, received 40x40"):
        next(image_folder.read_pixels(items))
