"""`mmaccel generate --prompts`: the same files after failures, stops, shards and full disks."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import mmaccel
from mmaccel.batch import worker
from mmaccel.batch.manifest import Manifest
from mmaccel.batch.prompts import seed_of
from mmaccel.batch.worker import Worker
from mmaccel.cli import main
from mmaccel.outputs import image_files
from mmaccel.pipelines.models.scenes import WordImages
from tests.batch.jobs import N_ITEMS, ROWS, Jobs, Rows, content, lines, records
from tests.fixtures.tiny_model import CAPTIONS, N_TOKENS

Said = pytest.CaptureFixture[str]


def answer(capsys: Said) -> dict[str, Any]:
    """The one object that --json prints."""
    (line,) = capsys.readouterr().out.splitlines()
    said: dict[str, Any] = json.loads(line)
    return said


def test_images_are_those_of_their_seeds_and_say_so(whole: Path, tiny_folder: Path) -> None:
    pipe = mmaccel.TextToImage.from_pretrained(tiny_folder)
    seeds = {("one", k): seed_of(3, "one", k) for k in range(3)}
    seeds |= {("two", k): seed_of(3, "two", k) for k in range(2)} | {("three", 0): 9}
    noted = records(whole)
    assert {(r["id"], r["k"]): r["seed"] for r in noted} == seeds
    assert set(content(whole)) == {f"{i}_{k}_{s}.png" for (i, k), s in seeds.items()}
    for record in noted:
        temperature = 0.5 if record["id"] == "two" else None
        again = pipe(
            record["prompt"],
            seed=[record["seed"]],
            temperature=temperature,
            policy=mmaccel.Autoregressive(),
        )
        with Image.open(whole / record["file"]) as image:
            assert image.tobytes() == again.images[0].tobytes()
            facts, text = json.loads(image.text["mmaccel"]), image.text["parameters"]
        assert facts["id"] == record["id"] and facts["seed"] == record["seed"]
        assert facts["policy"] == ("autoregressive" if record["id"] == "three" else "jacobi")
        assert facts["temperature"] == (1.0 if temperature is None else 0.5)
        assert text.startswith(f"{record['prompt']}\nSteps: {N_TOKENS}, Sampler: {facts['policy']}")
        assert record["tokens"] == N_TOKENS and 0 < record["passes"] <= N_TOKENS
    assert [r["passes"] for r in noted if r["id"] == "three"] == [N_TOKENS]


@pytest.mark.parametrize(
    ("rows", "size", "more"),
    [(ROWS[::-1], "2", ()), (ROWS[1:2], "1", ()), (ROWS, "6", ("--temperature", "1"))],
    ids=["backwards", "alone", "all at once"],
)
def test_an_image_depends_on_its_row_only(
    whole: Path, jobs: Jobs, rows: Rows, size: str, more: tuple[str, ...]
) -> None:
    """A row's own temperature goes before that of the command line."""
    assert jobs.run("--batch-size", size, *more, rows=rows) == 0
    made, expected = content(jobs.out), content(whole)
    assert made == {name: expected[name] for name in made} and made
    assert set(lines(jobs.out)) <= set(lines(whole))


def test_a_drawn_seed_is_noted_and_taken_up(
    jobs: Jobs, tiny_folder: Path, tmp_path: Path, capsys: Said
) -> None:
    assert jobs.run("--json", seed=None) == 0
    said = capsys.readouterr()
    seed = json.loads(said.out)["data"]["seed"]
    assert f"seed: {seed}, drawn and noted in the manifest; the same command with" in said.err
    assert {record["job_seed"] for record in records(jobs.out)} == {seed}
    assert {r["seed"] for r in records(jobs.out) if r["id"] == "one"} == {
        seed_of(seed, "one", k) for k in range(3)
    }
    made = content(jobs.out)
    for name in list(made)[:2]:
        (jobs.out / name).unlink()
    assert jobs.run("--resume", "--json", seed=None) == 0
    data = answer(capsys)["data"]
    assert (data["seed"], data["made"]) == (seed, 2) and content(jobs.out) == made
    for own, is_same in ((None, False), (str(seed), True)):
        other = Jobs(tmp_path / str(is_same), tiny_folder)
        assert other.run(seed=own) == 0
        assert (content(other.out) == made) == is_same


def test_shards_and_manifests_without_a_seed_have_0(jobs: Jobs, capsys: Said) -> None:
    assert jobs.run("--shard", "1/1", rows=ROWS[:1], seed=None) == 0
    notes = records(jobs.out)
    assert {note.pop("job_seed") for note in notes} == {0}
    manifest = jobs.out / "manifest.1-of-1.jsonl"
    manifest.write_text("".join(json.dumps(note) + "\n" for note in notes))
    capsys.readouterr()
    assert jobs.run("--resume", "--json", rows=ROWS[:1], seed=None) == 0
    facts = answer(capsys)["data"]
    assert (facts["seed"], facts["made"], facts["made_before"]) == (0, 0, 3)


def test_shards_merge_to_the_whole(whole: Path, jobs: Jobs, capsys: Said) -> None:
    assert jobs.run("--shard", "1/2") == 0
    before = content(jobs.out)
    for more in (["--shard", "1/3", "--temperature", "0.7"], []):
        assert jobs.run(*more) == 2
        assert "whose manifests have none of these items" in capsys.readouterr().err
    assert content(jobs.out) == before
    assert jobs.run("--shard", "2/2") == 0
    assert content(jobs.out) == content(whole) and lines(jobs.out) == lines(whole)
    assert all(file.stat().st_size for file in jobs.out.glob("manifest.*-of-2.jsonl"))
    assert jobs.run("--resume") == 0  # the whole sees what the parts made
    assert lines(jobs.out) == lines(whole)


def test_resume_generates_incomplete_images(whole: Path, jobs: Jobs, capsys: Said) -> None:
    assert jobs.run() == 0
    files = sorted(jobs.out.glob("*.png"))
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-1])
    data = jobs.manifest.read_bytes()
    gone = json.loads(data.splitlines()[-1])
    jobs.manifest.write_bytes(data[:-5])
    (jobs.out / f".{files[0].name}.77.tmp").write_bytes(b"left by a kill")
    capsys.readouterr()
    assert jobs.run("--resume", "--json") == 0
    said, again = answer(capsys)["data"], {files[0].name, files[1].name, gone["file"]}
    assert (said["made"], said["made_before"]) == (len(again), N_ITEMS - len(again))
    assert content(jobs.out) == content(whole)
    assert set(jobs.manifest.read_bytes().splitlines()) == set(lines(whole))


def test_a_failed_item_is_recorded(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    render = WordImages.render

    def broken_render(self: Any, tokens: Any, captions: Any, seeds: Any) -> Any:
        if seeds == [9]:
            raise RuntimeError("the decoder \x1b[31mbroke")
        return render(self, tokens, captions, seeds)

    with monkeypatch.context() as patch:
        patch.setattr(WordImages, "render", broken_render)
        assert jobs.run("--json-stream") == 3
        said = capsys.readouterr()
        *events, end = map(json.loads, said.out.splitlines())
        assert [e["event"] for e in events].count("item") == N_ITEMS - 1
        assert (end["ok"], end["error"]["code"], end["data"]["failed"]) == (False, "failures", 1)
        assert "\x1b[31m" not in said.err and "the decoder" in said.err
        assert len(content(jobs.out)) == N_ITEMS - 1
        assert jobs.run("--resume", "--max-failures", "0", "--json") == 1
        end = answer(capsys)
        assert end["error"]["code"] == "fatal" and end["data"]["is_cut"]
    assert jobs.run("--resume", "--max-failures", "0") == 0
    assert len(content(jobs.out)) == N_ITEMS


def fill_disk(patch: pytest.MonkeyPatch) -> None:
    """The fourth image does not fit."""
    write, made = image_files.write_whole, []

    def full(file: Path, save: Any) -> None:
        def save_in_part(path: Path) -> None:
            save(path)
            made.append(path)
            if len(made) == 4:
                raise OSError(28, "No space left on device")

        write(file, save_in_part)

    patch.setattr(image_files, "write_whole", full)


def interrupt(patch: pytest.MonkeyPatch) -> None:
    """A signal after each image."""
    append = Manifest.append

    def interrupted(self: Manifest, record: dict[str, Any]) -> None:
        append(self, record)
        os.kill(os.getpid(), signal.SIGTERM if record["k"] == 0 else signal.SIGINT)

    patch.setattr(Manifest, "append", interrupted)


def interrupt_before_the_record(patch: pytest.MonkeyPatch) -> None:
    """A signal when an image is written and its record is not."""
    write = worker.write_png

    def interrupted(*given: Any) -> None:
        write(*given)
        os.kill(os.getpid(), signal.SIGINT)

    patch.setattr(worker, "write_png", interrupted)


@pytest.mark.parametrize(
    ("disturb", "code", "error", "says"),
    [
        (fill_disk, 1, "fatal", "No space left on device; the images in the manifest are complete"),
        (interrupt, 130, "interrupted", "continue with --resume"),
        (interrupt_before_the_record, 130, "interrupted", "continue with --resume"),
    ],
)
def test_a_job_that_ends_early_keeps_finished_images_and_nothing_half(
    whole: Path, jobs: Jobs, capsys: Said, disturb: Any, code: int, error: str, says: str
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        disturb(patch)
        assert jobs.run("--json") == code
    said = capsys.readouterr()
    assert json.loads(said.out)["error"]["code"] == error and says in said.err + said.out
    assert signal.getsignal(signal.SIGTERM) is before
    assert 1 <= len(content(jobs.out)) == len(lines(jobs.out)) < N_ITEMS
    assert jobs.run("--resume") == 0
    assert content(jobs.out) == content(whole)


def test_a_dry_run_checks_and_writes_nothing(jobs: Jobs, capsys: Said) -> None:
    assert jobs.run("--dry-run", "--json") == 0
    plan = answer(capsys)["data"]["plan"]
    wanted = [(row["id"], k) for row in ROWS for k in range(row.get("n", 1))]
    assert [(item["id"], item["k"]) for item in plan] == wanted
    assert not jobs.out.exists()


RED = {"prompt": CAPTIONS[0]}
NEGATIVE = "line 1: negative prompt: expected "
BAD_ROWS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"prompt": "a purple whale"}, "line 1: "),
    ({"negative": "whale"}, f"{NEGATIVE}w"),
    ({"negative": "red", "guidance_scale": 1}, f"{NEGATIVE}a guidance_scale other than 1"),
    ({"size": "99x99"}, "line 1: size"),
    ({"params": {"windows": 3}}, "line 1: policy jacobi"),
    ({"params": {"name": "x"}}, "line 1: policy jacobi"),
    ({"params": {"top_p": 2}}, "line 1: top_p"),
    ({"policy": "stepwise"}, "line 1: policy"),
)
BAD_OPTIONS = (
    ("--negative whale", f"{NEGATIVE}w"),
    ("--shard 0/2", "--shard: expected i/n"),
    ("--shard 3/2", "--shard: expected i/n"),
    ("--retries -1", "--retries: expected 0 or more"),
    ("--compare", "--prompts: expected no --compare"),
    ("caption", "--prompts: expected no prompt with it"),
    ("--batch-size 0", "--batch-size"),
    ("--count 2", "--prompts: expected no --num-images"),
    (f"--seed {2**64}", "seed: expected a 64-bit integer"),
    ("--seed abc", "--seed"),
    ("--policy nope", "policy"),
    ("--temperature -1", "temperature"),
    ("--nonsense", "--nonsense"),
    ("--actors 2", "--actors: expected --executor ray"),
    ("--executor slurm", "--executor: expected local or ray, received 'slurm'"),
    ("--executor ray --actors 0", "--actors: expected at least 1"),
)


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [(row, "", message) for row, message in BAD_ROWS]
    + [({}, options, message) for options, message in BAD_OPTIONS],
    ids=range(len(BAD_ROWS) + len(BAD_OPTIONS)),
)
def test_bad_input_is_refused_before_any_work(
    jobs: Jobs, capsys: Said, row: dict[str, Any], options: str, message: str
) -> None:
    assert jobs.run(*options.split(), "--json", rows=[{**RED, **row}, RED]) == 2
    said = capsys.readouterr()
    assert message in said.err
    (end,) = map(json.loads, said.out.splitlines())
    assert not end["ok"] and end["error"]["code"] == "usage" and message in end["error"]["message"]
    assert not jobs.out.exists() or not list(jobs.out.iterdir())


def test_other_settings_do_not_go_on_with_a_manifest(whole: Path, jobs: Jobs, capsys: Said) -> None:
    assert jobs.run() == 0
    for more, seed, said in (
        ([], "3", "expected a folder without a manifest.jsonl"),
        (["--resume", "--temperature", "0.7"], "3", "received others for 4 items (the first is on"),
        (["--resume"], "4", "received others for 5 items"),
    ):
        assert jobs.run(*more, seed=seed) == 2
        assert said in capsys.readouterr().err
    assert content(jobs.out) == content(whole)


def test_options_of_a_file_need_a_file(capsys: Said) -> None:
    for option in (["--resume"], ["--shard", "1/2"], ["--retries", "0"], ["--dry-run"], ["--json"]):
        assert main(["generate", *option]) == 2
        assert f"{option[0]}: expected --prompts FILE" in capsys.readouterr().err


def test_a_stop_before_any_work_is_reported(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "check", stop)
    assert jobs.run("--json") == 130
    assert answer(capsys)["error"] == {"code": "interrupted", "message": "stopped"}


@pytest.mark.parametrize(("more", "code"), [(["--resume"], 0), ([], 2)])
def test_images_of_another_process_are_not_generated_again(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, more: list[str], code: int
) -> None:
    check, codes = Worker.check, []

    def slowly(worker: Worker, items: Any) -> Any:
        if not codes:
            codes.append(None)
            codes.append(jobs.run())  # runs while the other process loads its model
        return check(worker, items)

    monkeypatch.setattr(Worker, "check", slowly)
    assert jobs.run(*more) == code and codes == [None, 0]
    assert len(lines(jobs.out)) == N_ITEMS


def test_a_row_that_names_the_usual_policy_keeps_its_options(jobs: Jobs) -> None:
    policies = {"a": {}, "b": {"policy": "jacobi"}, "c": {"policy": "mc-sjd"}}
    assert jobs.run(rows=[{"id": id, **RED, **own} for id, own in policies.items()]) == 0
    windows = {}
    for file in jobs.out.glob("*.png"):
        with Image.open(file) as image:
            facts = json.loads(image.text["mmaccel"])
        windows[facts["id"]] = facts["policy_options"]["window"]
    assert windows == {"a": 5, "b": 5, "c": mmaccel.SpeculativeJacobi().window}
