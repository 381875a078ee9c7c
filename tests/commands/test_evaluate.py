"""`mmaccel evaluate`: images, exactness, speed and words from the command line; bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mmaccel import Jacobi
from mmaccel.catalog import POLICIES, Entry
from mmaccel.cli import main
from mmaccel.demo.scenes.data import make_scenes
from mmaccel.evaluation.quality.features import extract_all, open_extractor
from mmaccel.evaluation.quality.frechet import frechet_of
from mmaccel.evaluation.quality.kid import squared_mmd
from mmaccel.results import Generation
from tests.architecture.source import ROOT
from tests.fixtures.tiny_model import CAPTIONS, N_TOKENS


def evaluate(*arguments: object) -> int:
    return main(["evaluate", *map(str, arguments)])


def save(folder: Path, images: torch.Tensor, captions: list[str] | None = None) -> Path:
    folder.mkdir()
    lines = []
    for k, image in enumerate(images):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{k:03d}.png")
        if captions is not None:
            lines.append(json.dumps({"file": f"{k:03d}.png", "prompt": captions[k], "seed": k}))
    if captions is not None:
        (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def scenes() -> tuple[list[str], torch.Tensor]:
    _, captions, images = make_scenes(11, range(24))
    return captions, images


def test_images_against_a_folder(scenes: Any, tmp_path: Path, capsys: Any) -> None:
    captions, images = scenes
    own = save(tmp_path / "own", images[:12], captions[:12])
    others = save(tmp_path / "others", images[12:] // 2)
    report_file, items_file = tmp_path / "r" / "report.json", tmp_path / "items.jsonl"
    files = ("--json", report_file, "--items", items_file)
    assert evaluate("pictures", own, "--against", others, *files) == 0
    report, said = json.loads(report_file.read_text()), capsys.readouterr().out
    extract = open_extractor("scenes")
    first, second = (extract_all([p], extract) for p in (images[:12], images[12:] // 2))
    assert report["frechet"]["distance"] == pytest.approx(frechet_of(first, second).distance)
    assert report["kid"]["value"] == pytest.approx(squared_mmd(first, second))
    assert (report["n"], report["n_against"], report["kid"]["n_second"]) == (12, 12, 12)
    assert report["frechet"]["bias"].startswith("biased") and "biased" in said
    assert 0 < report["frechet"]["floor"] and report["machine"]["versions"]["torch"]
    assert report["captions"]["n"] == 12 and report["captions"]["shares"]["whole"] > 0.8
    lines = [json.loads(line) for line in items_file.read_text().splitlines()]
    assert [line["seed"] for line in lines] == list(range(12))
    right = sum(line["verdict"]["whole"] for line in lines)
    assert right / 12 == pytest.approx(report["captions"]["shares"]["whole"])


def test_images_against_scenes_and_wrong_captions(scenes: Any, tmp_path: Path) -> None:
    captions, images = scenes
    shifted = [*captions[1:], captions[0]]
    own, file = save(tmp_path / "own", images, shifted), tmp_path / "report.json"
    assert evaluate("pictures", own, "--against", "scenes", "--count", 40, "--json", file) == 0
    report = json.loads(file.read_text())
    assert report["n_against"] == 40 and report["against"] == "scenes"
    assert report["captions"]["shares"]["whole"] < 0.2


def test_images_with_the_users_own_callables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_features.py").write_text(
        "def means(images):\n    return pictures.float().mean((2, 3))\n"
        "def flat(images):\n    return pictures.float().mean()\n"
        "def embed(images, texts):\n"
        "    import torch\n    e = torch.eye(2)\n"
        "    return e[[0] * len(texts)], e[[int('b' in t) for t in texts]]\n"
    )
    grey = torch.arange(4, dtype=torch.uint8)[:, None, None, None].expand(4, 3, 6, 6) * 10
    save(tmp_path / "one", grey, ["a", "b", "a", "a"])
    save(tmp_path / "two", grey + 7)
    options = ("--features", "my_features:means", "--clip", "my_features:embed")
    files = ("--json", tmp_path / "r.json", "--items", tmp_path / "i.jsonl")
    assert evaluate("pictures", "one", "--against", "two", *options, *files) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["frechet"]["distance"] == pytest.approx(3 * 7**2)  # the same spread, 7 apart
    assert report["frechet"]["width"] == 3 and report["clip"]["mean"] == 75.0
    items = [json.loads(line) for line in (tmp_path / "i.jsonl").read_text().splitlines()]
    assert [item["clip"] for item in items] == [100.0, 0.0, 100.0, 100.0]
    assert [item["verdict"] for item in items] == [None] * 4  # no captions of scenes
    assert evaluate("pictures", "one", "--against", "two", "--features", "my_features:flat") == 1
    assert "expected [4, D]" in capsys.readouterr().err
    assert evaluate("pictures", "two", "--clip", "my_features:embed") == 2
    assert "images with captions" in capsys.readouterr().err


def test_bad_folders(scenes: Any, tmp_path: Path, capsys: Any) -> None:
    _, images = scenes
    own, empty = save(tmp_path / "own", images[:3]), tmp_path / "empty"
    empty.mkdir()
    one = save(tmp_path / "one", images[:1])
    mixed = save(tmp_path / "mixed", images[:2])
    Image.new("RGB", (32, 16)).save(mixed / "zz.png")
    broken = save(tmp_path / "broken", images[:2])
    whole = (broken / "001.png").read_bytes()
    (broken / "001.png").write_bytes(whole[: len(whole) // 2])
    for folder, code, words in (
        (tmp_path / "none", 2, "expected a folder"),
        (empty, 2, "received none in"),
        (one, 2, "at least 2 on both sides, received 1 and 3"),
        (mixed, 1, "64x64 (000.png) and 32x16 (zz.png)"),
        (broken, 2, "001.png"),
    ):
        assert evaluate("pictures", folder, "--against", own) == code
        assert words in capsys.readouterr().err, folder
    for options, words in (
        (("--features", "inception"), "a file for inception"),
        (("--features", "inception", "--weights", own / "000.png"), "torch-fidelity"),
        (("--features", "scenes", "--weights", "w.pth"), "expected none for scenes"),
        (("--features", "no_such_module:f"), "no_such_module"),
        (("--features", "json:loads2"), "loads2"),
        (("--json", empty), "expected a file name"),
        (("--json", "-"), "expected a file name, received '-'"),
        (("--batch-size", "0"), "at least 1"),
    ):
        assert evaluate("pictures", own, "--against", own, *options) in (1, 2)
        assert words in capsys.readouterr().err, options


class Wrong(Jacobi):
    """Other tokens than guaranteed."""

    def sample(self, *args: Any, **options: Any) -> Generation:
        made = super().sample(*args, **options)
        made.tokens[:, 3] = (made.tokens[:, 3] + 1) % 30
        return made


def test_exactness_tells_what_holds_by_its_exit_code(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file = tmp_path / "exact.json"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"{CAPTIONS[0]}\n\n{CAPTIONS[1]}\n")
    options = ("--count", 3, "--samples", 2000, "--prompts", prompts, "--json", file)
    policy = ("--policy", "jacobi", "--set", "window=4")
    assert evaluate("exactness", tiny_folder, *policy, *options) == 0
    report = json.loads(file.read_text())
    names = [check["name"] for check in report["checks"]]
    law = "distribution of an enumerable model"
    batches = ["plain loop in batches", "policy in batches"]
    assert names == ["greedy", "same seeds", *batches, law]
    assert all(check["holds"] for check in report["checks"]) and report["broken"] == []
    assert report["captions"] == [CAPTIONS[0], CAPTIONS[1], CAPTIONS[0]]
    assert report["policy"].startswith("Jacobi(window=4")
    capsys.readouterr()
    target = f"{Wrong.__module__}:Wrong"
    monkeypatch.setitem(sys.modules, Wrong.__module__, sys.modules[__name__])
    monkeypatch.setitem(POLICIES, "jacobi", Entry(target, "planted"))
    assert evaluate("exactness", tiny_folder, *policy, *options) == 3
    report = json.loads(file.read_text())
    assert report["broken"][:2] == ["greedy", "same seeds"] and law in report["broken"]
    assert "BROKEN" in capsys.readouterr().out
    first = report["checks"][1]["figures"]["first_divergence"]
    assert first == [3, 3, 3]


def test_exactness_with_features_of_images(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = "def means(p):\n    return p.float().mean((2, 3))\n"
    (tmp_path / "three_means.py").write_text(code)
    file = tmp_path / "exact.json"
    options = ("--count", 12, "--samples", 0, "--features", "three_means:means", "--json", file)
    policy = ("--policy", "mc-sjd", "--set", "window=4")
    assert evaluate("exactness", tiny_folder, *policy, *options) == 0
    check = json.loads(file.read_text())["checks"][-1]
    assert check["name"] == "features of images" and check["guaranteed"] and check["holds"]
    assert check["figures"]["n_first"] == 12 and check["figures"]["power"]["level"] == 0.01
    file.unlink()
    largest = ("--seed", 2**64 - 2)  # the next seeds begin at 0 again
    assert evaluate("exactness", tiny_folder, *policy, *options, *largest) == 0 and file.exists()


def test_speed_writes_its_report(tiny_folder: Path, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "speed"
    policy = ("--policy", "jacobi", "--set", "window=4", "--batch-sizes", "1,2")
    assert evaluate("speed", tiny_folder, *policy, "--out", out, "--warm-up", 1) == 0
    names = {"speed.md", "speed.json", "speed.jsonl", "scaling.png", "tokens.png", "runs.png"}
    assert {f.name for f in out.iterdir()} == names
    report = json.loads((out / "speed.json").read_text())
    lines = [json.loads(line) for line in (out / "speed.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * 2 * (20 + 1) and sum(x["index"] < 0 for x in lines) == 4
    assert [r["batch_size"] for r in report["rows"]] == [1, 1, 2, 2]
    plain, policy_row = report["rows"][:2]
    assert plain["passes"] == N_TOKENS and plain["tokens_per_pass"] == 1.0
    assert 1 < policy_row["tokens_per_pass"] <= 4 and policy_row["passes"] < N_TOKENS
    assert sum((k + 1) * n for k, n in enumerate(policy_row["histogram"])) == 20 * N_TOKENS
    for name in ("scaling.png", "tokens.png", "runs.png"):
        with Image.open(out / name) as image:
            assert image.size == (770, 462) and len(set(image.get_flattened_data())) > 20
    text = (out / "speed.md").read_text()
    assert "| 2 | policy |" in text and "exactness: bitwise" in text
    assert "speed.md" in capsys.readouterr().out


def test_speed_refuses(tiny_folder: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    for options, words in (
        (("--runs", 19), "at least 20 and 1, received 19 and 2"),
        (("--batch-sizes", "1,x"), "integers of 1 or more"),
        (("--policy", "nonsense"), "expected one of"),
        (("--prompts", tmp_path / "none.txt"), "a text file in UTF-8"),
    ):
        assert evaluate("speed", tiny_folder, "--out", tmp_path / "s", *options) == 2
        assert words in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert evaluate("speed", tiny_folder, "--out", tmp_path / "t") == 1
    assert "pip install 'mmaccel[plots]', or give --no-plots" in capsys.readouterr().err


def test_words(tmp_path: Path, capsys: Any) -> None:
    reference, heard = tmp_path / "ref.txt", tmp_path / "hyp.txt"
    reference.write_text("A red circle.\nOne\n")
    heard.write_text("a red square\n\n")
    files = ("--json", tmp_path / "w.json", "--items", tmp_path / "w.jsonl")
    assert evaluate("words", reference, heard, *files) == 0
    assert "word error rate: 75.00 % (2 substituted, 1 deleted" in capsys.readouterr().out
    assert json.loads((tmp_path / "w.json").read_text())["rate"] == 0.75
    assert len((tmp_path / "w.jsonl").read_text().splitlines()) == 2
    assert evaluate("words", reference, heard, "--simplify") == 0
    assert "simplified texts: 50.00 %" in capsys.readouterr().out
    heard.write_text("a\n")
    assert evaluate("words", reference, heard) == 1
    assert "expected 2, one for each reference, received 1" in capsys.readouterr().err
    assert evaluate("words", reference, tmp_path / "none.txt") == 2


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom mmaccel.cli import main\nmain(['evaluate', 'speed', '--help'])\n"
        "heavy = {'torch', 'numpy', 'transformers', 'PIL', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--batch-sizes" in done.stdout
