"""The command line: images and their metadata, comparisons, every bad input, Ctrl-C."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

import mmaccel
from mmaccel import TextToImage
from mmaccel.cli import main
from mmaccel.commands import doctor, generate_batch, measure
from mmaccel.commands import image_job as image_job
from mmaccel.pipelines.loading.sources import content_hash
from mmaccel.pipelines.text_to_image.outputs import ImageOutput
from mmaccel.results import Stats
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.tiny_model import CAPTIONS, N_TOKENS, break_weights, build_tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture
def generate(tiny_folder: Path, tmp_path: Path):
    """Run `mmaccel generate` on the tiny model into `tmp_path / "out"`; returns code and folder."""

    def run(*arguments: str) -> tuple[int, Path]:
        out = tmp_path / "out"
        fixed = ["--model", str(tiny_folder), "--out", str(out)]
        return main(["generate", *arguments, *fixed]), out

    return run


def test_generate_writes_images_that_say_what_they_are(generate, tiny_folder: Path) -> None:
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
        assert facts["policy_options"] == {"window": 5, "drafts": "neighbour"}
        assert facts["weights"] == content_hash(tiny_folder)
        assert facts["tokens"] == N_TOKENS and facts["exactness"] == "bitwise"
        assert facts["guidance_scale"] == 2.0 and facts["top_k"] is None
        steps = f"Steps: {N_TOKENS}, Sampler: jacobi, CFG scale: 2.0, Seed: {seed}, Size: "
        assert line.startswith(f"{CAPTIONS[0]}\n{steps}")
        assert ', Policy: "jacobi(window=5, drafts=neighbour)", ' in line
        assert f", Forward passes: {facts['passes']}, " in line


def test_an_image_of_a_batch_carries_its_own_figures(generate) -> None:
    own = []
    for size in ("1", "3"):
        _, out = generate(CAPTIONS[1], "--count", "3", "--batch-size", size, "--window", "6")
        texts = [Image.open(file).text["mmaccel"] for file in sorted(out.glob("0*.png"))]
        facts = [json.loads(text) for text in texts]
        own.append([(f["tokens"], f["passes"], f["tokens_per_pass"]) for f in facts])
    assert own[0] == own[1] and len({passes for _, passes, _ in own[0]}) > 1
    assert facts[0]["batch"]["pictures"] == 3
    assert facts[0]["batch"]["stats"]["tokens"] == 3 * N_TOKENS


def test_only_the_same_image_is_overwritten(generate) -> None:
    runs = ([], [], ["--temperature", "0.5"], ["--window", "3"], ["--top-k", "5"])
    found = [{f.name for f in generate(CAPTIONS[1], "--count", "1", *r)[1].iterdir()} for r in runs]
    assert [len(names) for names in found] == [2, 2, 4, 6, 8]
    _, out = generate(CAPTIONS[2], "--count", "1")
    assert len(list(out.iterdir())) == 10


def test_sheets_show_the_first_images_of_many(generate, monkeypatch) -> None:
    monkeypatch.setattr("mmaccel.commands.image_job._SHOWN", 4)
    drawn = []
    draw = image_job.draw_sheet
    monkeypatch.setattr(image_job, "draw_sheet", lambda p, **o: drawn.append(p) or draw(p, **o))
    code, out = generate(CAPTIONS[1], "--count", "6", "--batch-size", "3")
    ((panel,),) = drawn
    assert code == 0 and len(list(out.glob("0*.png"))) == 6
    assert len(panel.images) == len(panel.captions) == 4
    assert panel.note.endswith("(the first 4 of 6)")


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
    assert len(list(out.glob("compare-jacobi-*.png"))) == 1
    code, out = generate(CAPTIONS[1], "--count", "3", "--compare", "--policy", "mc-sjd")
    said = capsys.readouterr().out
    assert code == 0 and "no, " in said and "of 3 images identical" in said


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


def test_ctrl_c_keeps_what_bench_has_measured(
    tiny_folder: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    file, made = tmp_path / "bench.json", []
    stream = TextToImage.stream

    def stop_in_the_third(pipe: TextToImage, captions: Any, *args: Any, **options: Any) -> Any:
        for batch in stream(pipe, captions, *args, **options):
            made.append(batch.first)
            if made.count(2) == 2 and len(captions) > 1:
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(TextToImage, "stream", stop_in_the_third)
    options = ["--windows", "4", "--guidance", "1.0", "--count", "5", "--json", str(file)]
    options += ["--policies", "jacobi", "--model", str(tiny_folder)]
    assert main(["bench", *options, CAPTIONS[0]]) == 130
    report, captured = json.loads(file.read_text()), capsys.readouterr()
    assert len(report["captions"]) == 2 and [r["images"] for r in report["rows"]] == [2, 2]
    assert "stopped; measured 2 of 5 captions" in captured.err and "2 captions" in captured.out


def test_interval_of_the_tokens_a_pass() -> None:
    passes = torch.tensor([50, 70] * 8)
    tokens = torch.zeros(16, 240, dtype=torch.long)
    stats = Stats(tokens=16 * 240, row_passes=int(passes.sum()))
    made = ImageOutput([], tokens, passes, stats, ["a"] * 16)
    spread = 10 * (16 / 15) ** 0.5  # standard deviation of the passes
    assert measure._half_width(made) == pytest.approx(4 * 1.96 * spread / 60 / 4)
    few = ImageOutput([], tokens[:9], passes[:9], stats, ["a"] * 9)
    assert measure._half_width(few) is None


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The generator's dtype at every run of a policy."""
    dtypes: list[torch.dtype] = []
    decode = TextToImage._decode

    def spy(pipe: TextToImage, *args: Any, **options: Any) -> Any:
        dtypes.append(pipe.model.model.dtype)  # type: ignore[attr-defined]
        return decode(pipe, *args, **options)

    monkeypatch.setattr(TextToImage, "_decode", spy)
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
    assert set(used) == {torch.float32, torch.bfloat16}
    assert used.count(torch.float32) == used.count(torch.bfloat16) >= 2  # two setups each


def test_dtype_reaches_the_generator_and_the_image(
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
    assert torch.__version__ in said and f"{N_TOKENS} tokens an image" in said and "Ready" in said
    assert main(["doctor", "--model", "nothing-there"]) == 1
    said = capsys.readouterr().out
    assert "missing" in said and "'nothing-there'" in said and "Ready" not in said
    assert main(["models"]) == 0
    said = capsys.readouterr().out
    assert "scenes" in said and "gsd" in said and "relaxed" in said


def test_doctor_says_whether_policies_can_be_attached(tmp_path: Path, capsys) -> None:
    for name in ("gpt2", "lfm2"):
        build_lm(name).save_pretrained(tmp_path / name)
    capsys.readouterr()
    assert main(["doctor", "--model", str(tmp_path / "gpt2"), "--out", str(tmp_path)]) == 0
    assert "family causal_lm; attach takes autoregressive, jacobi" in _flat(capsys)
    assert main(["doctor", "--model", str(tmp_path / "lfm2"), "--out", str(tmp_path)]) == 0
    assert "layers of other kinds" in _flat(capsys)
    config = json.loads((tmp_path / "gpt2" / "config.json").read_text())
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(config | {"architectures": ["GPT9"]}))
    assert main(["doctor", "--model", str(tmp_path / "gpt2")]) == 1
    assert "has no GPT9" in _flat(capsys)


def _flat(capsys: Any) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_doctor_finds_old_packages_and_broken_weights(tmp_path: Path, monkeypatch) -> None:
    break_weights(build_tiny(tmp_path))
    finding = doctor.check_model(str(tmp_path))
    assert finding.state == "needed" and "expected finite logits" in finding.detail
    monkeypatch.setattr("mmaccel.outputs.machine.package_version", lambda name: "5.9.2+cpu")
    states = {f.what: (f.state, f.detail) for f in doctor.check_packages()}
    assert states["torch"] == ("yes", "5.9.2+cpu")
    assert states["transformers"] == (
        "needed",
        "5.9.2+cpu is too old; pip install 'transformers>=5.17'",
    )


def test_doctor_asks_for_what_the_package_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = dict(line.split(">=") for line in project["dependencies"])
    assert {name: wanted[name] for name in doctor._NEEDED} == doctor._NEEDED


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
        (["--json", "-"], "--json: expected a file name, received '-'"),
        (["--family", "canvas", "--json", "-"], "--json: expected a file name, received '-'"),
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
    (["--window", "0"], 2, "window: expected an integer in 1..4096"),
    (["--window", "wide"], 2, "window: expected an integer in 1..4096"),
    (["--policy", "autoregressive", "--window", "3"], 2, "received 'window'"),
    (["--dtype", "int8"], 2, "--dtype: expected one of float32, bfloat16, float16"),
    (["--drafts", "tarot"], 2, "drafts: expected one of"),
    (["--count", "0"], 2, "--count: expected at least 1, received 0"),
    (["--batch-size", "-1"], 2, "--batch-size: expected at least 1"),
    (["--temperature", "-0.1"], 2, "temperature: expected a finite number >= 0"),
    (["--top-p", "0"], 2, "top_p: expected a number in (0, 1]"),
    (["--top-p", "1.5"], 2, "top_p: expected a number in (0, 1]"),
    (["--top-k", "-1"], 2, "top_k: expected an integer >= 1"),
    (["--min-p", "2"], 2, "min_p: expected a number in 0..1"),
    (["--seed", str(2**64)], 2, "seed: expected a 64-bit integer"),
    (["--count", "three"], 2, "--count"),
    (["--no-such-option"], 2, "--no-such-option"),
    (["--device", "cuda:99"], 2, "device: expected a device of this machine"),
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


@pytest.mark.parametrize("command", ["generate", "speak", "animate"])
def test_a_folder_that_cannot_be_made_is_refused_before_a_model_is_loaded(
    command: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lost").symlink_to("nowhere")
    for out in ("a.png", "a.png/out/more", "lost"):
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


def test_ctrl_c_keeps_finished_images_and_removes_the_unfinished(
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
            assert json.loads(image.text["mmaccel"])["tokens"] == N_TOKENS
    assert f"mmaccel: stopped; kept {len(files)} of 100000 images" in said


def test_an_image_stopped_while_it_is_written_leaves_nothing(tmp_path: Path) -> None:
    from mmaccel.outputs.image_files import write_whole

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


def test_cycles_are_collected_again_once_a_model_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not while it is imported and loaded; and after a wrong command as before it."""
    seen = []
    load = TextToImage.from_pretrained

    def watch_load(*args: Any, **kwargs: Any) -> Any:
        seen.append(gc.isenabled())
        return load(*args, **kwargs)

    def watch_job(*args: Any, **kwargs: Any) -> Any:
        seen.append(gc.isenabled())
        return 0, True

    monkeypatch.setattr(TextToImage, "from_pretrained", watch_load)
    monkeypatch.setattr(image_job, "run_job", watch_job)
    assert gc.isenabled()
    assert main(["generate", "a red circle", "--out", str(tmp_path)]) == 0
    assert seen == [False, True] and gc.isenabled()
    assert main(["generate", "a red circle", "--size", "wide", "--out", str(tmp_path)]) == 2
    assert len(seen) == 2 and gc.isenabled()


def test_cycles_are_collected_again_while_a_batch_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever makes it: this process, or actors."""
    seen = []

    def open_maker(wish: object) -> SimpleNamespace:
        seen.append(gc.isenabled())
        return SimpleNamespace(close=lambda: None)

    def make(*args: object) -> tuple[dict[str, Any], int]:
        seen.append(gc.isenabled())
        return {}, 0

    monkeypatch.setattr(generate_batch, "_open", open_maker)
    monkeypatch.setattr(generate_batch, "_make", make)
    rows = tmp_path / "rows.txt"
    rows.write_text("a red circle\n", encoding="utf-8")
    assert main(["generate", "--prompts", str(rows), "--out", str(tmp_path / "out")]) == 0
    assert seen == [False, True] and gc.isenabled()
