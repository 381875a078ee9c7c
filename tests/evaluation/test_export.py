"""Folders for prompt suites: what each reads, missing images, names that cannot be."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from mmaccel.cli import main
from mmaccel.evaluation.quality.image_folder import list_items


def draw(folder: Path, prompt: str, seed: int, red: int, size: int = 8) -> Path:
    """An image as `mmaccel generate` writes them, all of one shade of red."""
    folder.mkdir(exist_ok=True)
    info, file = PngInfo(), folder / f"{seed:04d}-{red}.png"
    info.add_text("mmaccel", json.dumps({"prompt": prompt, "seed": seed}))
    Image.new("RGB", (size, size), (red, 0, 0)).save(file, pnginfo=info)
    return file


def red_of(file: Path, place: tuple[int, int] = (0, 0)) -> int:
    with Image.open(file) as image:
        return image.convert("RGB").getpixel(place)[0]


def export(tmp_path: Path, suite: str, prompts: Path, *options: str) -> tuple[int, Path]:
    out = tmp_path / f"for-{suite}"
    fixed = ["--suite", suite, "--prompts", str(prompts), "--out", str(out)]
    return main(["evaluate", "export", str(tmp_path / "made"), *fixed, *options]), out


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Four images of each of two prompts, seeds not in the order of the names."""
    for k in range(4):
        draw(tmp_path / "made", "a cat", 3 - k, 10 + k)
        draw(tmp_path / "made", "a  dog", 4 + k, 100 + k)
    Image.new("RGB", (30, 30)).save(tmp_path / "made" / "contact-jacobi.png")
    return tmp_path / "made"


def test_geneval(made: Path, tmp_path: Path) -> None:
    rows = [{"tag": "single_object", "prompt": "a dog"}, {"tag": "counting", "prompt": "a cat"}]
    source = tmp_path / "evaluation_metadata.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out = export(tmp_path, "geneval", source)
    files = sorted(str(f.relative_to(out)) for f in out.rglob("*") if f.is_file())
    samples = [f"{p:05d}/samples/{k:04d}.png" for p in range(2) for k in range(4)]
    assert code == 0 and files == sorted(["00000/metadata.jsonl", "00001/metadata.jsonl", *samples])
    assert [json.loads((out / f"{k:05d}/metadata.jsonl").read_text()) for k in (0, 1)] == rows
    assert [red_of(out / f"00001/samples/{k:04d}.png") for k in range(4)] == [13, 12, 11, 10]
    link, source_file = out / "00000/samples/0000.png", made / "0004-100.png"
    assert source_file.exists() and link.read_bytes() == source_file.read_bytes()


def test_dpg(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = tmp_path / "prompts"
    source.mkdir()
    (source / "COCOval_1.txt").write_text("a cat\n")
    code, out = export(tmp_path, "dpg", source)
    assert code == 0 and [f.name for f in out.iterdir()] == ["COCOval_1.png"]
    grid = out / "COCOval_1.png"
    corners = [red_of(grid, place) for place in ((0, 0), (8, 0), (0, 8), (15, 15))]
    assert corners == [13, 12, 11, 10]
    (grid).unlink()
    code, _ = export(tmp_path, "dpg", source, "--per-prompt", "3")
    assert code == 2 and "expected one of 1, 4" in capsys.readouterr().err


def test_hpsv2(made: Path, tmp_path: Path) -> None:
    source = tmp_path / "lists"
    source.mkdir()
    (source / "anime.json").write_text(json.dumps(["a dog", "a cat"]))
    (source / "photo.json").write_text(json.dumps(["a cat"]))
    code, out = export(tmp_path, "hpsv2", source)
    files = sorted(str(f.relative_to(out)) for f in out.rglob("*.jpg"))
    assert code == 0 and files == ["anime/00000.jpg", "anime/00001.jpg", "photo/00000.jpg"]
    with Image.open(out / "photo/00000.jpg") as image:
        assert image.format == "JPEG"
    assert abs(red_of(out / "anime/00001.jpg") - 13) <= 2  # the next image of the prompt ...
    assert abs(red_of(out / "photo/00000.jpg") - 12) <= 2  # ... for the next time it is asked for


def test_vbench(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder, source = tmp_path / "made", tmp_path / "all_dimension.txt"
    folder.mkdir()
    lines = []
    for k in range(5):
        (folder / f"clip{k}.mp4").write_bytes(bytes([k]))
        lines.append({"file": f"clip{k}.mp4", "prompt": "A cat, running.", "seed": 4 - k})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    source.write_text("A cat, running.\n")
    code, out = export(tmp_path, "vbench", source)
    assert code == 0
    found = {f.name: f.read_bytes() for f in out.iterdir()}
    assert found == {f"A cat, running.-{k}.mp4": bytes([4 - k]) for k in range(5)}
    lines = [{**x, "prompt": "a/b"} for x in lines]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    source.write_text("a/b\n")
    out.rename(tmp_path / "before")
    assert export(tmp_path, "vbench", source)[0] == 2
    assert "can be a file's name" in capsys.readouterr().err


def test_links_are_followed_and_an_interrupted_export_leaves_nothing(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "evaluation_metadata.jsonl"
    source.write_text(json.dumps({"prompt": "a cat"}))
    file = next(made.glob("*-10.png"))
    (tmp_path / "store").mkdir()
    file.symlink_to(Path("..") / "store" / file.rename(tmp_path / "store" / file.name).name)

    def interrupted(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", interrupted)
        assert export(tmp_path, "geneval", source)[0] == 130
    assert {f.name for f in tmp_path.iterdir()} == {"made", "store", source.name}
    code, out = export(tmp_path, "geneval", source)
    last = out / "00000/samples/0003.png"
    assert code == 0 and not last.is_symlink() and red_of(last) == 10


def test_missing_images_are_listed_and_nothing_is_written(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source = tmp_path / "evaluation_metadata.jsonl"
    texts = ("a cat", "a bird", "a fish")
    source.write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts))
    code, out = export(tmp_path, "geneval", source)
    said = capsys.readouterr().err
    assert code == 2 and not out.exists()
    assert "fewer of 2 of 3 prompts: 00001 (0 of 4): a bird; 00002 (0 of 4): a fish" in said
    code, out = export(tmp_path, "geneval", source, "--partial")
    assert code == 0 and [f.name for f in out.iterdir()] == ["00000"]
    assert "2 prompts left out" in capsys.readouterr().out
    assert export(tmp_path, "geneval", source, "--partial")[0] == 2
    assert "expected an empty folder" in capsys.readouterr().err


def test_prompts_that_are_not_there_are_named(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for suite in ("geneval", "dpg", "hpsv2", "vbench"):
        assert export(tmp_path, suite, tmp_path / "none")[0] == 2
        assert "none', which is not there; check the path" in capsys.readouterr().err


def test_what_counts_in_a_folder(made: Path, tmp_path: Path) -> None:
    items = list_items(made)
    assert len(items) == 8 and {i.prompt for i in items} == {"a cat", "a  dog"}  # no sheet
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in ("b.png", "a.jpg"):
        Image.new("RGB", (4, 4)).save(plain / name)
    (plain / "notes.txt").write_text("x")
    assert [(i.file.name, i.prompt) for i in list_items(plain)] == [
        ("a.jpg", None),
        ("b.png", None),
    ]
    (plain / "prompts.jsonl").write_text('{"file": "a.jpg", "prompt": "a cat"}\n\n')
    assert [(i.file.name, i.prompt, i.seed) for i in list_items(plain)] == [
        ("a.jpg", "a cat", None)
    ]
