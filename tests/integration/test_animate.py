"""`mmaccel animate`: files in, files out, and what it refuses."""

from __future__ import annotations

import json
import random
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmaccel import ImageToVideo
from mmaccel.cli import main
from mmaccel.commands import media_job
from mmaccel.errors import MissingBackendError, OptionError
from mmaccel.outputs.video_files import pick_format, read_frames, write_video
from mmaccel.pipelines.cosmos_video import CosmosVideo
from tests.video_beds import build_video


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_video(tmp_path_factory.mktemp("cosmos"))


@pytest.fixture
def start(tmp_path: Path) -> Path:
    values = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    file = tmp_path / "red fox.png"
    Image.fromarray(values).save(file)
    return file


def run(folders: tuple[Path, Path], *arguments: object) -> int:
    model, codec = map(str, folders)
    return main(["animate", "--model", model, "--codec", codec, *map(str, arguments)])


def read_webp(file: Path) -> torch.Tensor:
    """Its frames; those that are alike are written once, and shown for longer."""
    frames = []
    with Image.open(file) as opened:
        for page in range(getattr(opened, "n_frames", 1)):
            opened.seek(page)
            frame = torch.from_numpy(np.asarray(opened.convert("RGB")).copy())
            frames += [frame] * (opened.info["duration"] // 40)
    return torch.stack(frames)


def test_files_hold_the_pipelines_clips(
    folders: tuple[Path, Path], start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    asked = (start, "--count", 3, "--seed", 7, "--format", "webp", "--top-p", 1, "--out", out)
    assert run(folders, *asked) == 0
    said = capsys.readouterr().out
    assert f"3 clips in {out}" in said and "bitwise" in said
    files = sorted(out.glob("*.webp"))
    assert [file.name[:13] for file in files] == ["0007-red-fox-", "0008-red-fox-", "0009-red-fox-"]
    pipe = ImageToVideo.from_pretrained(folders[0], codec=folders[1])
    with Image.open(start) as picture:
        wanted = pipe(picture, seed=[7, 8, 9], top_p=1.0)
    for file, clip in zip(files, wanted.clips):
        assert torch.equal(read_webp(file), clip.frames)
        facts = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
        assert (facts["start"], facts["seed"], facts["n_given"]) == ("red fox.png", clip.seed, 1)
        assert (facts["frames"], facts["fps"], facts["tokens"]) == (17, 25.0, 18)
        assert (facts["policy"], facts["exactness"], facts["top_p"]) == ("jacobi", "bitwise", 1.0)
        assert (facts["passes"], facts["total_variation"]) == (clip.passes, 0.0)
    before = {file.name: file.read_bytes() for file in files}
    assert run(folders, *asked, "--batch-size", 2, "--window", 3) == 0  # another policy, same clips
    again = [file for file in out.glob("*.webp") if file.name not in before]
    assert sorted(file.read_bytes() for file in again) == sorted(before.values())
    assert run(folders, *asked, "--batch-size", 3) == 0 and len(list(out.glob("*.webp"))) == 6
    assert len(list(out.glob("*.json"))) == 6 and not list(out.glob(".*"))
    spelt = (folders[0] / ".." / folders[0].name, folders[1])
    assert run(spelt, *asked) == 0 and len(list(out.glob("*.webp"))) == 6
    inexact = (*asked, "--policy", "mc-sjd", "--out", tmp_path / "inexact")
    for rows in (1, 2):  # on which a last bit may hang
        assert run(folders, *inexact, "--batch-size", rows) == 0
    assert len(list((tmp_path / "inexact").glob("*.webp"))) == 6


def test_an_mp4_can_be_continued(folders: tuple[Path, Path], start: Path, tmp_path: Path) -> None:
    out, more = tmp_path / "out", tmp_path / "more"
    assert run(folders, start, "--out", out) == 0
    (clip,) = out.glob("*.mp4")
    frames = read_frames(clip, 99)
    assert len(frames) == 17 and frames[0].size == (48, 32)
    assert len(read_frames(clip, 9)) == 9
    assert run(folders, clip, start, "--out", more, "--format", "webp") == 0
    given = {
        json.loads(file.read_text(encoding="utf-8"))["n_given"] for file in more.glob("*.json")
    }
    assert given == {1, 9} and len(list(more.glob("*.webp"))) == 2


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
            refused += str(error).startswith("start: expected a picture")
    assert refused > 9


def test_names_that_ffmpeg_would_take_for_protocols(
    folders: tuple[Path, Path], start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run(folders, start, "--out", "clips:today") == 0
    (clip,) = Path("clips:today").glob("*.mp4")
    assert len(read_frames(clip, 99)) == 17
    assert run(folders, "x" * 300, "--out", "out") == 2
    assert "start: expected a file" in capsys.readouterr().err


def test_starts_of_one_name_do_not_overwrite_each_other(
    folders: tuple[Path, Path], start: Path, tmp_path: Path
) -> None:
    """They begin alike: only the frames behind the first are others."""
    files = [tmp_path / name / "c.webp" for name in ("red", "blue")]
    for file in files:
        pages = [Image.new("RGB", (48, 32), file.parent.name) for _ in range(8)]
        for k, page in enumerate(pages):
            page.putpixel((k, 0), (255, 255, 255))  # pages that are alike would become one
        file.parent.mkdir()
        with Image.open(start) as first:
            first.save(file, save_all=True, append_images=pages, lossless=True)
    assert [len(read_frames(file, 9)) for file in files] == [9, 9]
    out = tmp_path / "out"
    assert run(folders, *files, "--format", "webp", "--out", out) == 0
    assert len(list(out.glob("*.webp"))) == 2


def test_without_pyav(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_format(None) == "mp4" and pick_format("webp") == "webp"
    with pytest.raises(OptionError, match="--format: expected one of mp4, webp, received 'gif'"):
        pick_format("gif")
    import av

    with monkeypatch.context() as patched:
        patched.setattr(av, "codecs_available", {"mpeg4"})
        assert pick_format(None) == "webp" and pick_format("webp") == "webp"
        with pytest.raises(MissingBackendError, match="expected an av with libx264"):
            pick_format("mp4")
    monkeypatch.setitem(sys.modules, "av", None)
    assert pick_format(None) == "webp" and pick_format("webp") == "webp"
    with pytest.raises(MissingBackendError, match=r"pip install 'mmaccel\[video\]', or take"):
        pick_format("mp4")
    (tmp_path / "a.mp4").write_bytes(b"\0" * 64)
    with pytest.raises(OptionError, match=r"for videos pip install 'mmaccel\[video\]'"):
        read_frames(tmp_path / "a.mp4", 9)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["none.png"], 2, "start: expected a file, received 'none.png'"),
        (["words.txt"], 2, "which PyAV does not read"),
        (["cut.png"], 2, "which Pillow does not read"),
        (["red fox.png", "--format", "gif"], 2, "--format: expected one of mp4, webp"),
        (["red fox.png", "--count", "0"], 2, "--count: expected at least 1"),
        (["red fox.png", "--batch-size", "0"], 2, "--batch-size: expected at least 1"),
        (["red fox.png", "--seed", str(2**64)], 2, "seed: expected a 64-bit integer"),
        (["red fox.png", "--temperature", "-1"], 2, "temperature"),
        (["red fox.png", "--policy", "stepwise"], 2, "policy: expected one of"),
        (["red fox.png", "--set", "windw=3"], 2, "windw"),
        (["red fox.png", "--dtype", "int8"], 2, "--dtype: expected one of"),
        ([], 2, "Missing argument 'starts'"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(
    folders: tuple[Path, Path], start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str,
) -> None:  # fmt: skip
    def load(*args: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(media_job, "open_pipe", load)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("no picture", encoding="utf-8")
    (tmp_path / "cut.png").write_bytes(start.read_bytes()[:200])
    assert run(folders, *arguments, "--out", "out") == code
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_ctrl_c_keeps_what_is_made(
    folders: tuple[Path, Path], start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    render, calls = CosmosVideo.render, []

    def stop(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return render(*args)

    monkeypatch.setattr(CosmosVideo, "render", stop)
    out, together = tmp_path / "out", ("--count", 3, "--batch-size", 3, "--format", "webp")
    assert run(folders, start, *together, "--out", out) == 130
    assert "kept 1 of 3 clips" in capsys.readouterr().err and len(list(out.glob("*.webp"))) == 1


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


def test_a_full_disk_is_said(
    folders: tuple[Path, Path], start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(media_job, "write_video", full)
    assert run(folders, start, "--out", tmp_path / "out") == 1
    assert "received No space left on device; kept 0 of 1 clips" in capsys.readouterr().err
