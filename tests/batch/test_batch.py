"""`mmaccel generate --prompts`: the same files after kills, failures, shards and full disks."""

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
from PIL import Image

import mmaccel
from mmaccel.batch.prompts import seed_of
from mmaccel.batch.worker import Worker
from mmaccel.cli import main
from mmaccel.outputs import whole_files
from tests.fixtures.tiny_model import CAPTIONS, N_TOKENS

ROOT = Path(__file__).parents[2]
ROWS = [
    {"id": "one", "prompt": CAPTIONS[0], "n": 3},
    {"id": "two", "prompt": CAPTIONS[1], "n": 2, "params": {"temperature": 0.5}},
    {"id": "three", "prompt": CAPTIONS[2], "policy": "autoregressive", "seed": 9},
]
N_ITEMS = 6


def command(folder: Path, rows: list[dict[str, Any]], model: Path, *more: str) -> list[str]:
    """Arguments of a batch into `folder / "out"`."""
    folder.mkdir(exist_ok=True)
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return ["generate", "--prompts", str(file), "--model", str(model), "--out",
            str(folder / "out"), "--seed", "3", "--window", "5", *more]  # fmt: skip


def content(out: Path) -> dict[str, bytes]:
    """Name and bytes of every image; nothing but images and manifests is there."""
    files = sorted(out.iterdir())
    assert {f.suffix for f in files} <= {".png", ".jsonl"} and all(f.name[0] != "." for f in files)
    return {f.name: f.read_bytes() for f in files if f.suffix == ".png"}


def lines(out: Path) -> list[bytes]:
    """All lines of all manifests, sorted; each item once."""
    found = [line for f in out.glob("manifest*.jsonl") for line in f.read_bytes().splitlines()]
    keys = [(r["id"], r["k"]) for r in map(json.loads, found)]
    assert len(set(keys)) == len(keys)
    return sorted(found)


@pytest.fixture(scope="module")
def whole(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(command(folder, ROWS, tiny_folder)) == 0
    return folder / "out"


def test_images_are_those_of_their_seeds_and_say_so(whole: Path, tiny_folder: Path) -> None:
    pipe = mmaccel.TextToImage.from_pretrained(tiny_folder)
    seeds = {("one", k): seed_of(3, "one", k) for k in range(3)}
    seeds |= {("two", k): seed_of(3, "two", k) for k in range(2)} | {("three", 0): 9}
    records = list(map(json.loads, lines(whole)))
    assert {(r["id"], r["k"]): r["seed"] for r in records} == seeds
    assert set(content(whole)) == {f"{i}_{k}_{s}.png" for (i, k), s in seeds.items()}
    for record in records:
        temperature = 0.5 if record["id"] == "two" else None
        again = pipe(record["prompt"], seed=[record["seed"]], temperature=temperature,
                     policy=mmaccel.Autoregressive())  # fmt: skip
        with Image.open(whole / record["file"]) as image:
            assert image.tobytes() == again.images[0].tobytes()
            facts, text = json.loads(image.text["mmaccel"]), image.text["parameters"]
        assert facts["id"] == record["id"] and facts["seed"] == record["seed"]
        assert facts["policy"] == ("autoregressive" if record["id"] == "three" else "jacobi")
        assert facts["temperature"] == (1.0 if temperature is None else 0.5)
        assert text.startswith(f"{record['prompt']}\nSteps: {N_TOKENS}, Sampler: {facts['policy']}")
        assert record["tokens"] == N_TOKENS and 0 < record["passes"] <= N_TOKENS
    assert [r["passes"] for r in records if r["id"] == "three"] == [N_TOKENS]


@pytest.mark.parametrize("order", ["backwards", "alone", "all at once"])
def test_an_image_depends_on_its_row_only(
    whole: Path, tiny_folder: Path, tmp_path: Path, order: str
) -> None:
    rows = {"backwards": ROWS[::-1], "alone": ROWS[1:2], "all at once": ROWS}[order]
    size = {"backwards": "2", "alone": "1", "all at once": "6"}[order]
    assert main(command(tmp_path, rows, tiny_folder, "--batch-size", size)) == 0
    made, expected = content(tmp_path / "out"), content(whole)
    assert made == {name: expected[name] for name in made} and made
    assert set(lines(tmp_path / "out")) <= set(lines(whole))


def test_a_drawn_seed_is_noted_and_taken_up(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free = command(tmp_path, ROWS, tiny_folder)
    del free[free.index("--seed") : free.index("--seed") + 2]
    assert main([*free, "--json"]) == 0
    said, out = capsys.readouterr(), tmp_path / "out"
    seed = json.loads(said.out)["data"]["seed"]
    assert f"seed: {seed}, drawn and noted in the manifest; the same command with" in said.err
    records = [json.loads(line) for line in lines(out)]
    assert {record["job_seed"] for record in records} == {seed}
    assert {r["seed"] for r in records if r["id"] == "one"} == {
        seed_of(seed, "one", k) for k in range(3)
    }
    made = content(out)
    for name in list(made)[:2]:
        (out / name).unlink()
    assert main([*free, "--resume", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["data"] | {"seed": seed, "made": 2} == json.loads(said.out)["data"]
    assert content(out) == made and "drawn and noted" not in said.err
    assert main([*free[:-4], "--out", str(tmp_path / "b"), "--window", "5", "--json"]) == 0
    other = json.loads(capsys.readouterr().out)["data"]["seed"]
    assert main(command(tmp_path / "c", ROWS, tiny_folder, "--seed", str(seed))) == 0
    assert other != seed and content(tmp_path / "c" / "out") == made


def test_shards_and_manifests_without_a_seed_have_0(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free = command(tmp_path, ROWS[:1], tiny_folder)
    del free[free.index("--seed") : free.index("--seed") + 2]
    assert main([*free, "--shard", "1/1"]) == 0
    assert {json.loads(line)["job_seed"] for line in lines(tmp_path / "out")} == {0}
    manifest = tmp_path / "out" / "manifest.1-of-1.jsonl"
    notes = [json.loads(line) for line in manifest.read_bytes().splitlines()]
    for note in notes:
        del note["job_seed"]
    manifest.write_text("".join(json.dumps(note) + "\n" for note in notes))
    capsys.readouterr()
    assert main([*free, "--resume", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["data"]
    assert (facts["seed"], facts["made"], facts["made_before"]) == (0, 0, 3)


def test_shards_merge_to_the_whole(whole: Path, tiny_folder: Path, tmp_path: Path) -> None:
    for part in ("1/2", "2/2"):
        assert main(command(tmp_path, ROWS, tiny_folder, "--shard", part)) == 0
    out = tmp_path / "out"
    assert content(out) == content(whole) and lines(out) == lines(whole)
    parts = [f.read_bytes() for f in sorted(out.glob("manifest.*-of-2.jsonl"))]
    assert len(parts) == 2 and all(parts)
    again = command(tmp_path, ROWS, tiny_folder, "--resume", "--json")
    assert main(again) == 0 and lines(out) == lines(whole)  # the whole sees what the parts made


def test_resume_generates_incomplete_images(
    whole: Path, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(tmp_path, ROWS, tiny_folder)
    assert main(arguments) == 0
    out = tmp_path / "out"
    files = sorted(out.glob("*.png"))
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-1])
    manifest = out / "manifest.jsonl"
    gone = json.loads(manifest.read_bytes().splitlines()[-1])
    manifest.write_bytes(manifest.read_bytes()[:-5])
    (out / f".{files[0].name}.77.tmp").write_bytes(b"left by a kill")
    capsys.readouterr()
    assert main([*arguments, "--resume", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    again = {files[0].name, files[1].name, gone["file"]}
    assert said["ok"] and said["data"]["made"] == len(again)
    assert said["data"]["made_before"] == N_ITEMS - len(again)
    assert content(out) == content(whole)
    last = {json.dumps(r, sort_keys=True).encode() for r in _last(manifest).values()}
    assert last == set(lines(whole))


def _last(manifest: Path) -> dict[tuple[str, int], dict[str, Any]]:
    records = map(json.loads, manifest.read_bytes().splitlines())
    return {(r["id"], r["k"]): r for r in records}


@pytest.mark.slow
def test_a_kill_loses_nothing_and_repeats_nothing_noted(tiny_folder: Path, tmp_path: Path) -> None:
    rows = [{"id": f"r{k}", "prompt": CAPTIONS[k % 3], "n": 10} for k in range(20)]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(command(whole, rows, tiny_folder)) == 0
    arguments = command(cut, rows, tiny_folder)
    out, manifest = cut / "out", cut / "out" / "manifest.jsonl"
    noted: list[bytes] = []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for enough in (20, 70, 130):
        process = subprocess.Popen(
            [sys.executable, "-m", "mmaccel.cli", *arguments],
            env=environment, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while not manifest.exists() or manifest.read_bytes().count(b"\n") < enough:
            assert process.poll() is None
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        now = manifest.read_bytes().splitlines(keepends=True)
        assert now[: len(noted)] == noted and len(now) < 200
        noted = [line for line in now if line.endswith(b"\n")]
        arguments = [*command(cut, rows, tiny_folder), "--resume"]
    assert main(arguments) == 0
    assert content(out) == content(whole / "out") and len(content(out)) == 200
    assert lines(out) == lines(whole / "out")


def test_a_failed_item_is_recorded(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from mmaccel.pipelines.models.scenes import WordImages

    render = WordImages.render

    def broken_render(self: Any, tokens: Any, captions: Any, seeds: Any) -> Any:
        if seeds == [9]:
            raise RuntimeError("the decoder \x1b[31mbroke")
        return render(self, tokens, captions, seeds)

    monkeypatch.setattr(WordImages, "render", broken_render)
    arguments = command(tmp_path, ROWS, tiny_folder)
    assert main([*arguments, "--json-stream"]) == 3
    said = capsys.readouterr()
    *events, end = map(json.loads, said.out.splitlines())
    assert [e["event"] for e in events].count("item") == N_ITEMS - 1
    assert (end["ok"], end["error"]["code"], end["data"]["failed"]) == (False, "failures", 1)
    assert "\x1b[31m" not in said.err and "the decoder" in said.err
    assert len(content(tmp_path / "out")) == N_ITEMS - 1
    assert main([*arguments, "--resume", "--max-failures", "0", "--json"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["error"]["code"] == "fatal" and json.loads(line)["data"]["is_cut"]
    monkeypatch.undo()
    assert main([*arguments, "--resume", "--max-failures", "0"]) == 0
    assert len(content(tmp_path / "out")) == N_ITEMS


def test_a_full_disk_ends_the_job_and_leaves_nothing_half(
    whole: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    arguments, made = command(tmp_path, ROWS, tiny_folder), []
    sync = whole_files._sync

    def full(path: Path) -> None:
        if path.suffix == ".tmp":
            made.append(path)
            if len(made) == 4:
                raise OSError(28, "No space left on device")
        sync(path)

    monkeypatch.setattr(whole_files, "_sync", full)
    assert main([*arguments, "--json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["error"]["code"] == "fatal"
    assert "No space left on device; the images in the manifest are complete" in said.err
    assert len(content(tmp_path / "out")) == 3 == len(lines(tmp_path / "out"))
    monkeypatch.undo()
    assert main([*arguments, "--resume"]) == 0
    assert content(tmp_path / "out") == content(whole)


def test_a_stopped_job_keeps_finished_images(
    whole: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from mmaccel.batch.manifest import Manifest

    append, arguments = Manifest.append, command(tmp_path, ROWS, tiny_folder)

    def interrupted(self: Manifest, record: dict[str, Any]) -> None:
        append(self, record)
        os.kill(os.getpid(), signal.SIGTERM if record["k"] == 0 else signal.SIGINT)

    monkeypatch.setattr(Manifest, "append", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    assert main([*arguments, "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "interrupted"
    assert signal.getsignal(signal.SIGTERM) is before
    assert 1 <= len(content(tmp_path / "out")) < N_ITEMS
    monkeypatch.undo()
    assert main([*arguments, "--resume"]) == 0
    assert content(tmp_path / "out") == content(whole)


def test_a_dry_run_checks_and_writes_nothing(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command(tmp_path, ROWS, tiny_folder), "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["data"]["plan"]
    assert [(p["id"], p["k"]) for p in plan] == [
        (r["id"], k) for r in ROWS for k in range(r.get("n", 1))
    ]
    assert not (tmp_path / "out").exists()


BAD = [
    ([{"prompt": "a purple whale"}], [], 2, "line 1: "),
    ([{"prompt": CAPTIONS[0], "negative": "whale"}], [], 2, "line 1: negative prompt: expected w"),
    ([{"prompt": CAPTIONS[0]}], ["--negative", "whale"], 2, "line 1: negative prompt: expected w"),
    (
        [{"prompt": CAPTIONS[0], "negative": "red", "params": {"guidance_scale": 1}}],
        [],
        2,
        "line 1: negative prompt: expected a guidance_scale other than 1",
    ),
    ([{"prompt": CAPTIONS[0], "size": "99x99"}], [], 2, "line 1: size"),
    ([{"prompt": CAPTIONS[0], "params": {"windows": 3}}], [], 2, "line 1: policy jacobi"),
    ([{"prompt": CAPTIONS[0], "params": {"top_p": 2}}], [], 2, "line 1: top_p"),
    ([{"prompt": CAPTIONS[0], "policy": "stepwise"}], [], 2, "line 1: policy"),
    (ROWS, ["--shard", "0/2"], 2, "--shard: expected i/n"),
    (ROWS, ["--shard", "3/2"], 2, "--shard: expected i/n"),
    (ROWS, ["--retries", "-1"], 2, "--retries: expected 0 or more"),
    (ROWS, ["--compare"], 2, "--prompts: expected no --compare"),
    (ROWS, ["a caption"], 2, "--prompts: expected no prompt with it"),
    (ROWS, ["--batch-size", "0"], 2, "--batch-size"),
    (ROWS, ["--seed", str(2**64)], 2, "--seed: expected a 64-bit integer"),
    (ROWS, ["--actors", "2"], 2, "--actors: expected --executor ray"),
    (ROWS, ["--executor", "slurm"], 2, "--executor: expected local or ray, received 'slurm'"),
    (ROWS, ["--executor", "ray", "--actors", "0"], 2, "--actors: expected at least 1"),
    ([{"prompt": CAPTIONS[0], "params": {"name": "x"}}], [], 2, "line 1: policy jacobi"),
    ([{"prompt": CAPTIONS[0], "size": 99}, {"prompt": CAPTIONS[0]}], [], 2, "line 1: size"),
]


@pytest.mark.parametrize(("rows", "more", "code", "message"), BAD, ids=range(len(BAD)))
def test_bad_input_is_refused_before_any_work(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    rows: list[dict[str, Any]], more: list[str], code: int, message: str,
) -> None:  # fmt: skip
    assert main(command(tmp_path, rows, tiny_folder, *more)) == code
    assert message in capsys.readouterr().err
    assert list(tmp_path.rglob("*.png")) == [] and list(tmp_path.rglob("manifest*")) == []


def test_other_settings_do_not_go_on_with_a_manifest(
    whole: Path, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(tmp_path, ROWS, tiny_folder)
    assert main(arguments) == 0
    for more, said in (
        ([], "expected a folder without a manifest.jsonl"),
        (["--resume", "--temperature", "0.7"], "received others for 4 items (the first is one"),
        (["--resume", "--seed", "4"], "received others for 5 items"),
    ):
        assert main([*arguments, *more]) == 2
        assert said in capsys.readouterr().err
    assert content(tmp_path / "out") == content(whole)


def test_options_of_a_file_need_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    for option in (["--resume"], ["--shard", "1/2"], ["--retries", "0"], ["--dry-run"], ["--json"]):
        assert main(["generate", *option]) == 2
        assert f"{option[0]}: expected --prompts FILE" in capsys.readouterr().err


def test_items_of_another_number_of_shards_are_refused(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(tmp_path, ROWS, tiny_folder)
    assert main([*arguments, "--shard", "1/2"]) == 0
    before = content(tmp_path / "out")
    for more in (["--shard", "1/3", "--temperature", "0.7"], []):
        assert main([*arguments, *more]) == 2
        assert "whose manifests have none of these items" in capsys.readouterr().err
    assert content(tmp_path / "out") == before
    assert main([*arguments, "--shard", "2/2"]) == 0


def test_a_stop_before_any_work_is_reported(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "check", stop)
    assert main([*command(tmp_path, ROWS, tiny_folder), "--json"]) == 130
    said = json.loads(capsys.readouterr().out)
    assert said["error"] == {"code": "interrupted", "message": "stopped"}


@pytest.mark.parametrize(("more", "code"), [(["--resume"], 0), ([], 2)])
def test_images_of_another_process_are_not_generated_again(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], code: int
) -> None:
    arguments, check, codes = command(tmp_path, ROWS, tiny_folder), Worker.check, []

    def slowly(worker: Worker, items: Any) -> Any:
        if not codes:
            codes.append(None)
            codes.append(main(arguments))  # runs while the other process loads its model
        return check(worker, items)

    monkeypatch.setattr(Worker, "check", slowly)
    assert main([*arguments, *more]) == code and codes == [None, 0]
    assert len(lines(tmp_path / "out")) == N_ITEMS


@pytest.mark.parametrize(
    "wrong",
    [["--shard", "3/2"], ["--policy", "nope"], ["--temperature", "-1"], ["--count", "2"],
     ["--seed", "abc"], ["--nonsense"]],
)  # fmt: skip
def test_wrong_use_is_reported_as_json(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: list[str]
) -> None:
    assert main([*command(tmp_path, ROWS, tiny_folder, *wrong), "--json"]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    said = json.loads(line)
    assert not said["ok"] and said["error"]["code"] == "usage" and said["error"]["message"]


def test_a_row_that_names_the_usual_policy_keeps_its_options(
    tiny_folder: Path, tmp_path: Path
) -> None:
    rows = [{"id": "a", "prompt": CAPTIONS[0]},
            {"id": "b", "prompt": CAPTIONS[0], "policy": "jacobi"},
            {"id": "c", "prompt": CAPTIONS[0], "policy": "mc-sjd"}]  # fmt: skip
    assert main(command(tmp_path, rows, tiny_folder)) == 0
    windows = {}
    for file in (tmp_path / "out").glob("*.png"):
        with Image.open(file) as image:
            facts = json.loads(image.text["mmaccel"])
        windows[facts["id"]] = facts["policy_options"]["window"]
    assert windows["a"] == windows["b"] == 5 and windows["c"] == mmaccel.SpeculativeJacobi().window
