"""The command line: pictures and their metadata, comparisons, every bad input, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import mmaccel
from mmaccel import TextToImage
from mmaccel.cli import main
from tests.tiny_model import CAPTIONS, N_TOKENS, break_weights, build_tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture
def generate(tiny_folder: Path, tmp_path: Path):
    """Run `mmaccel generate` on the tiny model into `tmp_path / "out"`; returns code and folder."""

    def run(*arguments: str) -> tuple[int, Path]:
        out = tmp_path / "out"
        fixed = ["--model", str(tiny_folder), "--out", str(out)]
        return main(["generate", *arguments, *fixed]), out

    return run


def test_generate_writes_pictures_that_say_what_they_are(generate, tiny_folder: Path) -> None:
    code, out = generate(CAPTIONS[0], "--count", "2", "--seed", "7", "--window", "5")
    names = [f"{seed:04d}-a-red-circle-jacobi.png" for seed in (7, 8)]
    assert code == 0 and sorted(f.name for f in out.iterdir()) == [*names, "contact.png"]
    pipe = mmaccel.TextToImage.from_pretrained(tiny_folder)
    for seed, name in zip((7, 8), names):
        again = pipe(CAPTIONS[0], seed=[seed], policy=mmaccel.Autoregressive())
        with Image.open(out / name) as image:
            assert list(image.get_flattened_data()) == list(again.images[0].get_flattened_data())
            facts, line = json.loads(image.text["mmaccel"]), image.text["parameters"]
        assert (facts["prompt"], facts["seed"], facts["policy"]) == (CAPTIONS[0], seed, "jacobi")
        assert facts["versions"]["torch"] == torch.__version__
        assert facts["versions"]["mmaccel"] == mmaccel.__version__
        assert facts["stats"]["policy"].startswith("Jacobi(window=5")
        assert facts["stats"]["tokens"] == N_TOKENS and facts["stats"]["exactness"] == "bitwise"
        assert facts["guidance_scale"] == 2.0 and facts["top_k"] is None
        assert line.startswith(f"{CAPTIONS[0]}\nSeed: {seed}, ")
        assert f"{N_TOKENS} tokens in {facts['stats']['passes']} forward passes" in line


def test_batch_size_does_not_change_the_files(generate) -> None:
    pixels = []
    for size in ("1", "3"):
        _, out = generate(CAPTIONS[1], "--count", "3", "--batch-size", size)
        files = sorted(out.glob("0*.png"))
        pixels.append([Image.open(file).tobytes() for file in files])
    assert len(pixels[0]) == 3 and pixels[0] == pixels[1]


def test_compare_says_yes_only_when_it_is_so(generate, capsys) -> None:
    code, out = generate(CAPTIONS[1], "--count", "3", "--compare", "--window", "6")
    said = capsys.readouterr().out
    assert code == 0 and "yes" in said and "The same images, token for token" in said
    assert (out / "compare.png").is_file()
    code, out = generate(CAPTIONS[1], "--count", "3", "--compare", "--policy", "mc-sjd")
    said = capsys.readouterr().out
    assert code == 0 and "no, " in said and "of 3 images identical" in said


def test_compared_sheet_shows_the_same_pictures_on_both_sides(generate) -> None:
    _, out = generate(CAPTIONS[1], "--count", "4", "--compare")
    with Image.open(out / "compare.png") as sheet:
        sheet.load()
        width, height = sheet.size
        left = sheet.crop((40, 112, 40 + 496, 112 + 240))
        right = sheet.crop((40 + 496 + 56, 112, 40 + 496 + 56 + 496, 112 + 240))
    assert (width, left.size) == (2 * 40 + 2 * 496 + 56, right.size)
    assert len(set(left.get_flattened_data())) > 100
    difference = [a != b for a, b in zip(left.get_flattened_data(), right.get_flattened_data())]
    assert sum(difference) == 0


def test_bench_measures_everything_in_one_table(tiny_folder: Path, tmp_path: Path, capsys) -> None:
    file = tmp_path / "bench.json"
    options = ["--windows", "1,4", "--guidance", "1.0,2.0", "--count", "2", "--json", str(file)]
    assert main(["bench", CAPTIONS[0], "--model", str(tiny_folder), *options]) == 0
    report = json.loads(file.read_text())
    rows = report["rows"]
    names = ["jacobi", "sjd", "mc-sjd", "gumbel-sjd", "prompt-lookup", "gsd"]
    wanted = [("autoregressive", None), *((name, w) for name in names for w in (1, 4))]
    assert [(r["policy"], r["window"]) for r in rows] == wanted * 2
    assert [r["guidance"] for r in rows] == [1.0] * 13 + [2.0] * 13
    for row in rows:
        if row["policy"] in ("autoregressive", "jacobi"):
            assert row["identical"] == row["images"] == 2
        if row["window"] in (None, 1):
            assert row["passes"] == N_TOKENS and row["tokens_per_pass"] == 1.0
        assert row["passes"] * row["tokens_per_pass"] == pytest.approx(N_TOKENS)
        assert 0 < row["sampler_share"] < 1 and row["seconds"] > 0
        assert (row["total_variation"] > 0) <= (row["exactness"] == "relaxed")
    assert rows[0]["speed_up"] == 1.0
    assert report["machine"]["versions"]["torch"] == torch.__version__
    assert "gumbel-sjd" in capsys.readouterr().out


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The generator's dtype at every call of `TextToImage.stream`."""
    dtypes: list[torch.dtype] = []
    stream = TextToImage.stream

    def spy(pipe: TextToImage, *args: Any, **options: Any) -> Any:
        dtypes.append(pipe.model.model.dtype)  # type: ignore[attr-defined]
        return stream(pipe, *args, **options)

    monkeypatch.setattr(TextToImage, "stream", spy)
    return dtypes


def test_bench_compares_dtypes_with_the_first(
    tiny_folder: Path, tmp_path: Path, used: list[torch.dtype]
) -> None:
    file = tmp_path / "bench.json"
    options = ["--windows", "4", "--guidance", "1.0", "--count", "2", "--json", str(file)]
    options += ["--policies", "jacobi", "--dtypes", "float32,bfloat16"]
    assert main(["bench", CAPTIONS[0], "--model", str(tiny_folder), *options]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(r["dtype"], r["policy"]) for r in rows] == [
        ("float32", "autoregressive"),
        ("float32", "jacobi"),
        ("bfloat16", "autoregressive"),
        ("bfloat16", "jacobi"),
    ]
    assert [r["identical"] for r in rows[:2]] == [2, 2]
    assert rows[0]["speed_up"] == 1.0 != rows[2]["speed_up"]
    wanted = [torch.float32] * 4 + [torch.bfloat16] * 4  # warming up and measuring, two setups
    assert used == wanted


def test_dtype_reaches_the_generator_and_the_picture(
    tiny_folder: Path, tmp_path: Path, used: list[torch.dtype]
) -> None:
    options = ["--count", "1", "--out", str(tmp_path), "--dtype", "bfloat16", "--compare"]
    assert main(["generate", CAPTIONS[0], "--model", str(tiny_folder), *options]) == 0
    assert set(used) == {torch.bfloat16}
    (file,) = tmp_path.glob("0000-*.png")
    with Image.open(file) as image:
        assert json.loads(image.text["mmaccel"])["dtype"] == "bfloat16"
        assert "dtype: bfloat16" in image.text["parameters"]


def test_doctor_and_models(tiny_folder: Path, tmp_path: Path, capsys) -> None:
    assert main(["doctor", "--model", str(tiny_folder), "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert torch.__version__ in said and f"{N_TOKENS} tokens a picture" in said and "Ready" in said
    assert main(["doctor", "--model", "nothing-there"]) == 1
    said = capsys.readouterr().out
    assert "missing" in said and "'nothing-there'" in said and "Ready" not in said
    assert main(["models"]) == 0
    said = capsys.readouterr().out
    assert "scenes" in said and "gsd" in said and "relaxed" in said


def test_version(capsys) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mmaccel {mmaccel.__version__}\n"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--guidance", ""], "--guidance: expected at least one"),
        (["--policies", ","], "--policies: expected at least one"),
        (["--windows", ""], "--windows: expected at least one"),
        (["--dtypes", ""], "--dtypes: expected at least one"),
        (["--json", "."], "--json: expected a file name"),
        ([""], "prompt"),
    ],
)
def test_bench_is_checked_before_it_measures(
    arguments: list[str], said: str, tiny_folder: Path, used: list[torch.dtype], capsys
) -> None:
    assert main(["bench", *arguments, "--model", str(tiny_folder), "--count", "1"]) == 2
    assert said in capsys.readouterr().err and not used


BAD = [
    (["--policy", "jacoby"], 2, "policy: expected one of autoregressive"),
    (["--window", "0"], 2, "window: expected an integer >= 1"),
    (["--window", "wide"], 2, "window: expected an integer >= 1"),
    (["--policy", "autoregressive", "--window", "3"], 2, "received 'window'"),
    (["--dtype", "int8"], 2, "--dtype: expected one of float32, bfloat16, float16"),
    (["--drafts", "tarot"], 2, "drafts: expected one of"),
    (["--count", "0"], 2, "--count: expected at least 1, received 0"),
    (["--batch-size", "-1"], 2, "--batch-size: expected at least 1"),
    (["--temperature", "-0.1"], 2, "temperature: expected a number >= 0"),
    (["--top-p", "0"], 2, "top_p: expected a number in (0, 1]"),
    (["--top-p", "1.5"], 2, "top_p: expected a number in (0, 1]"),
    (["--top-k", "0"], 2, "top_k: expected an integer >= 1"),
    (["--min-p", "2"], 2, "min_p: expected a number in [0, 1]"),
    (["--seed", str(2**64)], 2, "seed: expected a 64-bit integer"),
    (["--count", "three"], 2, "--count"),
    (["--no-such-option"], 2, "--no-such-option"),
    (["--device", "cuda:99"], 2, "--device: expected a device of this machine"),
    (["--model", "no-such-model"], 2, "model: expected a folder"),
]


@pytest.mark.parametrize(("arguments", "code", "said"), BAD, ids=[" ".join(b[0]) for b in BAD])
def test_bad_options_are_one_line_and_nothing_is_made(
    arguments: list[str], code: int, said: str, tiny_folder: Path, tmp_path: Path, capsys
) -> None:
    out = tmp_path / "out"
    fixed = ["--out", str(out), *([] if "--model" in arguments else ["--model", str(tiny_folder)])]
    assert main(["generate", CAPTIONS[0], *fixed, *arguments]) == code
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("mmaccel: ") and said in lines[0]
    assert captured.out == "" and not out.exists()


@pytest.mark.parametrize(
    ("prompt", "said"),
    [("a green dog", "received 'green', 'dog'; it knows: a red"), (" ".join(["a"] * 13), "12")],
)
def test_bad_captions_name_the_words(generate, prompt: str, said: str, capsys) -> None:
    code, out = generate(prompt)
    captured = capsys.readouterr()
    assert code == 2 and said in captured.err and captured.err.count("\n") == 1
    assert not out.exists()


def test_a_folder_that_cannot_be_written_fails_before_anything_is_made(
    tiny_folder: Path, tmp_path: Path, capsys
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    arguments = ["--model", str(tiny_folder), "--out", str(blocked / "out")]
    assert main(["generate", CAPTIONS[0], *arguments]) == 1
    captured = capsys.readouterr()
    assert "--out: expected a folder that can be written" in captured.err
    assert captured.err.count("\n") == 1 and "tokens" not in captured.err


def test_nan_logits_fail_with_one_line(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    break_weights(build_tiny(folder))
    arguments = ["--model", str(folder), "--out", str(tmp_path / "out")]
    assert main(["generate", CAPTIONS[0], *arguments]) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("mmaccel: scores: expected finite logits")
    assert list((tmp_path / "out").iterdir()) == []


def _start(arguments: list[str]) -> subprocess.Popen:
    """Start the command as a terminal would: a job in the background inherits a deaf SIGINT."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "mmaccel.cli", *arguments],
        cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def test_ctrl_c_keeps_finished_pictures_and_removes_the_unfinished(
    tiny_folder: Path, tmp_path: Path
) -> None:
    fixed = ["--model", str(tiny_folder), "--out", str(tmp_path), "--count", "100000"]
    process = _start(["generate", CAPTIONS[0], *fixed])
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
            assert json.loads(image.text["mmaccel"])["stats"]["tokens"] == N_TOKENS
    assert f"mmaccel: stopped; kept {len(files)} of 100000 pictures" in said


def test_a_picture_stopped_while_it_is_written_leaves_nothing(tmp_path: Path) -> None:
    from mmaccel.commands.picture_files import write_whole

    def stop(path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "a.png", stop)
    assert list(tmp_path.iterdir()) == []


def test_help_answers_without_torch() -> None:
    program = (
        "import sys\nfrom mmaccel.cli import main\ncode = main(['generate', '--help'])\n"
        "heavy = {'torch', 'transformers', 'PIL', 'numpy'} & set(sys.modules)\n"
        "assert code == 0 and not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--guidance" in done.stdout


def test_wrong_command_in_a_real_process() -> None:
    process = _start(["paint"])
    out, said = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "") and said.count("\n") == 1 and "paint" in said
