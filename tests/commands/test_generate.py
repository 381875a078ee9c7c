"""`mmaccel generate`: images and their metadata, comparisons, wrong options, Ctrl-C."""

from __future__ import annotations

import gc
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

import mmaccel
from mmaccel import loading
from mmaccel.cli import main
from mmaccel.commands.jobs import batch as batch_job
from mmaccel.commands.jobs import image as image_job
from mmaccel.outputs import image_files
from mmaccel.pipelines.loading.sources import content_hash
from mmaccel.pipelines.models.scenes import WordImages
from tests.architecture.source import ROOT
from tests.fixtures.tiny_model import (
    CAPTIONS,
    N_TOKENS,
    break_weights,
    build_tiny,
    build_tiny_clips,
)


@pytest.fixture
def generate(tiny_folder: Path, tmp_path: Path):
    """Run `mmaccel generate` on the tiny model into `tmp_path / "out"`; returns code and folder."""

    def run(*arguments: str) -> tuple[int, Path]:
        out = tmp_path / "out"
        fixed = ["--model", str(tiny_folder), "--out", str(out)]
        fixed += [] if "--seed" in arguments else ["--seed", "0"]
        return main(["generate", *arguments, *fixed]), out

    return run


def test_images_carry_their_facts(generate, tiny_folder: Path) -> None:
    code, out = generate(CAPTIONS[0], "--count", "2", "--seed", "7", "--window", "5")
    *names, sheet = sorted(f.name for f in out.iterdir())
    assert code == 0 and sheet.startswith("contact-jacobi-")
    assert [name[:-13] for name in names] == [
        "0007-a-red-circle-jacobi",
        "0008-a-red-circle-jacobi",
    ]
    pipe = mmaccel.TextToImage.from_pretrained(tiny_folder)
    for seed, name in zip((7, 8), names):
        again = pipe(CAPTIONS[0], seed=[seed], policy=mmaccel.Autoregressive())
        with Image.open(out / name) as image:
            assert list(image.get_flattened_data()) == list(again.images[0].get_flattened_data())
            facts, line = json.loads(image.text["mmaccel"]), image.text["parameters"]
        assert (facts["prompt"], facts["seed"], facts["policy"]) == (CAPTIONS[0], seed, "jacobi")
        assert facts["versions"]["torch"] == torch.__version__
        assert facts["versions"]["mmaccel"] == mmaccel.__version__
        assert facts["policy_options"] == {"window": 5, "drafts": "auto", "tree": None}
        assert facts["weights"] == content_hash(tiny_folder)
        assert facts["tokens"] == N_TOKENS and facts["exactness"] == "bitwise"
        assert facts["guidance_scale"] == 2.0 and facts["top_k"] is None
        steps = f"Steps: {N_TOKENS}, Sampler: jacobi, CFG scale: 2.0, Seed: {seed}, Size: "
        assert line.startswith(f"{CAPTIONS[0]}\n{steps}")
        assert ', Policy: "jacobi(window=5, drafts=auto)", ' in line
        assert f", Forward passes: {facts['passes']}, " in line


def test_images_do_not_depend_on_the_batch_size(generate) -> None:
    runs = []
    for size in ("1", "3"):
        _, out = generate(CAPTIONS[1], "--count", "3", "--batch-size", size, "--window", "6")
        images = [Image.open(file) for file in sorted(out.glob("0*.png"))]
        facts = [json.loads(image.text["mmaccel"]) for image in images]
        own = [(f["tokens"], f["passes"], f["tokens_per_pass"]) for f in facts]
        runs.append((own, [image.tobytes() for image in images]))
    assert runs[0] == runs[1] and len({passes for _, passes, _ in runs[0][0]}) > 1
    assert facts[0]["batch"]["images"] == 3
    assert facts[0]["batch"]["stats"]["tokens"] == 3 * N_TOKENS


def test_a_prompt_is_encoded_once(generate, monkeypatch) -> None:
    texts: list[str] = []
    own = WordImages.encode

    def count(self: WordImages, text: str) -> Any:
        texts.append(text)
        return own(self, text)

    monkeypatch.setattr(WordImages, "encode", count)
    generate(CAPTIONS[0], CAPTIONS[1], "--batch-size", "1", "--threads", "1")
    assert [texts.count(caption) for caption in CAPTIONS[:2]] == [1, 1]


def test_only_the_same_image_is_overwritten(generate) -> None:
    runs = ([], [], ["--temperature", "0.5"], ["--window", "3"], ["--top-k", "5"])
    found = [{f.name for f in generate(CAPTIONS[1], "--count", "1", *r)[1].iterdir()} for r in runs]
    assert [len(names) for names in found] == [1, 1, 2, 3, 4]
    _, out = generate(CAPTIONS[2], "--count", "1")
    assert len(list(out.iterdir())) == 5


def test_a_single_image_has_no_sheet(generate, capsys) -> None:
    _, out = generate(CAPTIONS[1])
    (file,) = out.iterdir()
    assert capsys.readouterr().out.startswith(f"{file}: {N_TOKENS} tokens in ")
    _, out = generate(CAPTIONS[1], "--compare")
    assert {name.name[:5] for name in out.iterdir()} == {"0000-", "compa"}


def test_a_drawn_seed_is_said_and_makes_the_same_images(
    tiny_folder: Path, tmp_path: Path, capsys
) -> None:
    command = ["generate", CAPTIONS[1], "--count", "2", "--model", str(tiny_folder), "--out"]
    drawn = []
    for name, given in (("a", []), ("b", ["--seed", "-1"])):
        assert main([*command, str(tmp_path / name), *given]) == 0
        said = capsys.readouterr().out
        drawn.append(int(re.search(r"^seed: (\d+), drawn; the same command with", said)[1]))
        assert f" --seed {drawn[-1]} makes the same again\n" in said
    assert drawn[0] != drawn[1]
    made = {file.name: file for file in (tmp_path / "a").iterdir()}
    assert main([*command, str(tmp_path / "c"), "--seed", str(drawn[0])]) == 0
    assert ", drawn" not in capsys.readouterr().out
    again = {file.name: file for file in (tmp_path / "c").iterdir()}
    assert again.keys() == made.keys() and len(made) == 3
    for k in range(2):
        (name,) = (name for name in made if name.startswith(f"{drawn[0] + k:04d}-"))
        with Image.open(made[name]) as first, Image.open(again[name]) as second:
            assert first.tobytes() == second.tobytes()
            assert json.loads(first.text["mmaccel"])["seed"] == drawn[0] + k
            assert f", Seed: {drawn[0] + k}, " in first.text["parameters"]


def test_sheets_show_the_first_images_of_many(generate, monkeypatch) -> None:
    monkeypatch.setattr("mmaccel.commands.jobs.image._MAX_SHOWN", 4)
    drawn = []
    draw = image_job.draw_sheet
    spy = lambda panels, **options: drawn.append(panels) or draw(panels, **options)  # noqa: E731
    monkeypatch.setattr(image_job, "draw_sheet", spy)
    code, out = generate(CAPTIONS[1], "--count", "6", "--batch-size", "3")
    ((panel,),) = drawn
    assert code == 0 and len(list(out.glob("0*.png"))) == 6
    assert len(panel.images) == len(panel.prompts) == 4
    assert panel.note.endswith("(the first 4 of 6)")


def test_compare_says_yes_only_when_it_is_so(generate, capsys) -> None:
    code, out = generate(CAPTIONS[1], "--count", "3", "--compare", "--window", "6")
    said = capsys.readouterr().out
    assert code == 0 and "yes" in said and "The same images, token for token" in said
    assert len(list(out.glob("compare-jacobi-*.png"))) == 1
    code, out = generate(CAPTIONS[1], "--count", "3", "--compare", "--policy", "mc-sjd")
    said = capsys.readouterr().out
    assert code == 0 and "no, " in said and "of 3 images identical" in said


def test_the_last_line_says_what_the_run_cost(generate, capsys) -> None:
    _, out = generate(*CAPTIONS[:2], "--window", "6", "--batch-size", "2")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "images in" in line]
    numbers = (
        r"(\d+) tokens in (\d+) forward passes, ([\d.]+) tokens a pass for each row, [\d.]+ s$"
    )
    tokens, passes, share = re.search(numbers, line).groups()
    facts = []
    for file in sorted(out.glob("0*.png")):
        with Image.open(file) as image:
            facts.append(json.loads(image.text["mmaccel"])["passes"])
    assert int(tokens) == 2 * N_TOKENS and int(passes) == max(facts)  # of one batch
    assert float(share) == pytest.approx(int(tokens) / sum(facts), abs=0.005)
    generate(CAPTIONS[0], "--compare")
    assert re.search(r"s, [\d.]+ times as fast as token by token$", capsys.readouterr().out, re.M)


def test_compared_sheet_shows_the_same_images_on_both_sides(generate) -> None:
    _, out = generate(CAPTIONS[1], "--count", "4", "--compare")
    (file,) = out.glob("compare-*.png")
    with Image.open(file) as sheet:
        sheet.load()
        width, height = sheet.size
        left = sheet.crop((40, 112, 40 + 496, 112 + 240))
        right = sheet.crop((40 + 496 + 56, 112, 40 + 496 + 56 + 496, 112 + 240))
    assert (width, left.size) == (2 * 40 + 2 * 496 + 56, right.size)
    assert len(set(left.get_flattened_data())) > 100
    difference = [a != b for a, b in zip(left.get_flattened_data(), right.get_flattened_data())]
    assert sum(difference) == 0


def test_warming_up_takes_no_more_rows_than_there_are_images(
    tiny_folder: Path, tmp_path: Path, monkeypatch
) -> None:
    rows = []
    monkeypatch.setattr(image_job, "warm_up", lambda *arguments: rows.append(arguments[-1]))
    options = ["--compare", "--count", "2", "--batch-size", "500", "--out", str(tmp_path)]
    assert main(["generate", CAPTIONS[0], "--model", str(tiny_folder), *options]) == 0
    assert rows == [2, 2]


def test_other_tools_names_of_options(generate, tiny_folder: Path) -> None:
    ours = ("--out", "--guidance", "2.5", "--count", "2", "--device", "cpu", "--dtype", "float32")
    theirs = ("-o", "--guidance-scale", "2.5", "-n", "2", "--device", "auto", "--dtype", "fp32")
    found = []
    for out, *options in (ours, theirs):
        where = tiny_folder.parent / f"names{len(found)}"
        assert main(["generate", *CAPTIONS[:2], "--model", str(tiny_folder), out, str(where),
                     "--seed", "0", *options]) == 0  # fmt: skip
        found.append(sorted(file.name for file in where.iterdir()))
    assert found[0] == found[1] and len(found[0]) == 5  # two images of each prompt, and the sheet
    names = [name[:-13] for name in found[0][:4]]
    assert names == ["0000-a-red-circle-jacobi", "0001-a-red-circle-jacobi",
                     "0002-a-blue-square-jacobi", "0003-a-blue-square-jacobi"]  # fmt: skip


@pytest.mark.parametrize("command", ["generate", "speak", "animate"])
def test_a_folder_that_cannot_be_made_is_refused_before_a_model_is_loaded(
    command: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    for name in ("a.png", "b.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lost").symlink_to("nowhere")
    for out in ("b.png", "b.png/out/more", "lost"):
        assert main([command, "a.png", "--model", "./no-model", "--out", out]) == 1
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "(Not a directory); choose another" in said
        assert f"--out: expected a folder that can be written, received '{out}'" in said
    locked = tmp_path / "locked"
    monkeypatch.setattr(os, "access", lambda path, mode: path != locked or not mode & os.W_OK)
    assert main([command, "a.png", "--model", "./no-model", "--out", "locked"]) == 2
    locked.mkdir()
    assert main([command, "a.png", "--model", "./no-model", "--out", str(locked)]) == 1
    assert "(Permission denied)" in capsys.readouterr().err


CODEC = "pixels: expected values in 0..1, received NaN or infinity from the codec; copy its weights"
LAST_BIAS = {"file_name": "tokenizer.safetensors", "weight": "decoder.7.bias"}


@pytest.mark.parametrize(
    ("command", "build"), [("generate", build_tiny), ("animate", build_tiny_clips)]
)
@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({}, "scores: expected finite logits"),
        (LAST_BIAS, CODEC),
        (LAST_BIAS | {"value": math.inf}, CODEC),
    ],
)
def test_weights_that_are_no_numbers_fail_with_one_line(
    command: str, build: Any, broken: dict[str, Any], says: str, tmp_path: Path, capsys
) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    break_weights(build(folder), **broken)
    arguments = ["--model", str(folder), "--out", str(tmp_path / "out")]
    assert main([command, CAPTIONS[0], *arguments]) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith(f"mmaccel: {says}")
    assert list((tmp_path / "out").iterdir()) == []


def test_ctrl_c_keeps_finished_images_and_removes_the_unfinished(
    generate, monkeypatch, capsys
) -> None:
    write = image_files.write_whole
    finished: list[Path] = []

    def stop_in_the_third(file: Path, save: Any) -> None:
        write(file, lambda path: (save(path), len(finished) == 2 and interrupt()))
        finished.append(file)

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(image_files, "write_whole", stop_in_the_third)
    code, out = generate(CAPTIONS[0], "--count", "9")
    assert code == 130 and sorted(out.iterdir()) == sorted(finished) and len(finished) == 2
    assert "mmaccel: stopped; 2 of 9 images are in" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_in_a_terminal(tiny_folder: Path, tmp_path: Path) -> None:
    fixed = ["--model", str(tiny_folder), "--out", str(tmp_path), "--count", "100000"]
    # a background job inherits an ignored SIGINT, which a terminal does not have
    process = subprocess.Popen(
        [sys.executable, "-m", "mmaccel.cli", "generate", CAPTIONS[0], *fixed],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL, text=True,
        stderr=subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 300
        while len(list(tmp_path.glob("*.png"))) < 3:
            assert process.poll() is None and time.monotonic() < deadline, process.stderr
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    files = list(tmp_path.iterdir())
    assert len(files) >= 3 and all(file.suffix == ".png" for file in files)
    for file in files:
        with Image.open(file) as image:
            image.load()
            assert json.loads(image.text["mmaccel"])["tokens"] == N_TOKENS
    assert f"mmaccel: stopped; {len(files)} of 100000 images are" in said


def test_ctrl_c_before_the_first_image_is_reported(
    tiny_folder: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mmaccel.loading.open_pipeline", stop)
    options = ["--model", str(tiny_folder), "--out", str(tmp_path / "out")]
    assert main(["generate", CAPTIONS[0], *options]) == 130
    assert capsys.readouterr().err == "mmaccel: stopped\n"


def test_a_terminal_with_ascii_only(tiny_folder: Path, tmp_path: Path, monkeypatch) -> None:
    out, printed = tmp_path / "bilder-é-画", io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    arguments = ["--model", str(tiny_folder), "--out", str(out), "--count", "1", "--compare"]
    assert main(["generate", CAPTIONS[0], *arguments]) == 0
    sys.stdout.flush()
    assert b"\\xe9" in printed.getvalue() and len(list(out.iterdir())) == 2


def test_cycles_are_collected_again_once_a_model_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not while it loads. After a wrong command the collector is as before it."""
    seen = []
    load = loading.open_pipeline

    def watch_load(*args: Any, **kwargs: Any) -> Any:
        seen.append(gc.isenabled())
        return load(*args, **kwargs)

    def watch_job(job: object) -> None:
        seen.append(gc.isenabled())

    monkeypatch.setattr(loading, "open_pipeline", watch_load)
    monkeypatch.setattr(image_job.ImageJob, "run", watch_job)
    assert gc.isenabled()
    assert main(["generate", "a red circle", "--out", str(tmp_path)]) == 0
    assert seen == [False, True] and gc.isenabled()
    assert main(["generate", "a red circle", "--top-p", "5", "--out", str(tmp_path)]) == 2
    assert len(seen) == 2 and gc.isenabled()


def test_cycles_are_collected_again_while_a_batch_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, and in Ray's actors."""
    seen = []

    def open_executor(options: object) -> SimpleNamespace:
        seen.append(gc.isenabled())
        return SimpleNamespace(close=lambda: None)

    def generate_all(*args: object) -> tuple[dict[str, Any], int]:
        seen.append(gc.isenabled())
        return {}, 0

    monkeypatch.setattr(batch_job, "_open_executor", open_executor)
    monkeypatch.setattr(batch_job, "_generate", generate_all)
    rows = tmp_path / "rows.txt"
    rows.write_text("a red circle\n", encoding="utf-8")
    assert main(["generate", "--prompts", str(rows), "--out", str(tmp_path / "out")]) == 0
    assert seen == [False, True] and gc.isenabled()
