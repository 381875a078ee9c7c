"""Jobs over prompt files: the same files after failures, stops, shards and full disks."""

from __future__ import annotations

import json
import os
import shutil
import signal
from typing import Any

import pytest

from mmaccel.batch.prompts import seed_of
from mmaccel.batch.worker import Worker
from tests.fixtures.jobs import (
    KINDS,
    N_ITEMS,
    OWN,
    PROMPTED,
    Command,
    at_render,
    at_write,
    lines,
    raise_full,
    records,
    rows_of,
    whole_of,
)

Said = pytest.CaptureFixture[str]


def answer(capsys: Said) -> dict[str, Any]:
    """The one object that --json prints."""
    (line,) = capsys.readouterr().out.splitlines()
    said: dict[str, Any] = json.loads(line)
    return said


def is_whole(command: Command) -> bool:
    """Whether files and records are those of a job that nothing disturbed."""
    whole = whole_of(command.kind)
    made_again = set(command.manifest.read_bytes().splitlines())
    return command.content == whole.content and made_again == set(lines(whole.out))


@pytest.mark.parametrize("command", PROMPTED, indirect=True)
def test_items_are_those_of_their_seeds_and_say_so(command: Command) -> None:
    whole = whole_of(command.kind)
    seeds = {("one", k): seed_of(3, "one", k) for k in range(3)}
    seeds |= {("two", k): seed_of(3, "two", k) for k in range(2)} | {("three", 0): 9}
    noted = records(whole.out)
    assert {(r["id"], r["k"]): r["seed"] for r in noted} == seeds
    assert set(whole.content) == {f"{i}_{k}_{s}{whole.suffix}" for (i, k), s in seeds.items()}
    for record in noted:
        options: dict[str, Any] = {"temperature": 0.5 if record["id"] == "two" else None}
        own = OWN[command.kind] if record["id"] == "three" else {}
        options |= {{"negative": "negative_prompt"}.get(name, name): own[name] for name in own}
        ((_, pixels),) = whole.expect([record["prompt"]], [record["seed"]], **options)
        facts = whole.facts(whole.out / record["file"])
        assert whole.read(whole.out / record["file"]) == pixels
        policy = "autoregressive" if record["id"] == "three" else "jacobi"
        assert (facts["policy"], record["policy"], record["exactness"]) == (
            policy,
            policy,
            "bitwise",
        )
        names = {"id", "seed", "prompt", "tokens", *own}
        assert {name: record[name] for name in names} == {name: facts[name] for name in names}
        assert (facts["temperature"] == 0.5) == (record["id"] == "two")
        assert record["passes"] > 0 and "passes" not in facts


def test_an_item_depends_on_its_row_alone(command: Command) -> None:
    """A row's own temperature goes before that of the command line."""
    whole, rows, home = whole_of(command.kind), rows_of(command.kind), command.out
    for name, part, n, more in (
        ("backwards", rows[::-1], N_ITEMS, ("--batch-size", 2)),
        ("alone", rows[1:2], 2, ("--batch-size", 1)),
        ("at once", rows, N_ITEMS, ("--batch-size", 6, "--temperature", 1)),
        ("shards", rows, 3, ("--shard", "1/2")),
        ("shards", rows, N_ITEMS, ("--shard", "2/2", "--batch-size", 1)),
    ):
        command.out = home / name
        assert command.job(*more, rows=part) == 0
        assert command.content.items() <= whole.content.items(), name
        assert len(command.content) == n and set(lines(command.out)) <= set(lines(whole.out))


def test_a_drawn_seed_is_noted_and_taken_up(images: Command, capsys: Said) -> None:
    assert images.job("--json", seed=None) == 0
    said = capsys.readouterr()
    seed = json.loads(said.out)["data"]["seed"]
    assert f"seed: {seed}, drawn and noted in the manifest; the same command with" in said.err
    assert {record["job_seed"] for record in records(images.out)} == {seed}
    made = images.content
    images.files[0].unlink()
    assert images.job("--resume", "--json", seed=None) == 0
    data = answer(capsys)["data"]
    assert (data["seed"], data["made"]) == (seed, 1) and images.content == made
    images.out = images.folder / "again"
    assert images.job(seed=seed) == 0 and images.content == made


def test_shards_have_one_seed_and_one_number(images: Command, capsys: Said) -> None:
    half = ("--shard", "1/2", "--json")
    assert images.job(*half, "--dry-run", seed=None) == 0 and not images.out.exists()
    plan = answer(capsys)["data"]["plan"]
    assert images.job(*half, seed=None) == 0
    noted = records(images.out)
    assert {record["job_seed"] for record in noted} == {0}
    assert [item["file"] for item in plan] == [record["file"] for record in noted]
    capsys.readouterr()
    before = images.content
    for more in (["--shard", "1/3", "--temperature", "0.7"], []):
        assert images.job(*more, seed=0) == 2
        assert "whose manifests have none of these items" in capsys.readouterr().err
    assert images.content == before
    assert images.job("--shard", "2/2", seed=None) == 0
    assert images.job("--resume", "--json", seed=0) == 0  # the whole sees what the parts made
    assert answer(capsys)["data"]["made_before"] == N_ITEMS


def test_resume_makes_what_is_incomplete(command: Command, capsys: Said) -> None:
    shutil.copytree(whole_of(command.kind).out, command.out)
    first, second, *_ = command.files
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    data = command.manifest.read_bytes()
    command.manifest.write_bytes(data[:-5])
    again = {first.name, second.name, json.loads(data.splitlines()[-1])["file"]}
    if command.suffix != ".png":
        beside = command.out / sorted(set(whole_of(command.kind).content) - again)[0]
        beside.with_suffix(".json").unlink()
        again.add(beside.name)
    (command.out / f".{first.name}.77.tmp").write_bytes(b"left by a kill")
    assert command.job("--resume", "--json") == 0
    said = capsys.readouterr()
    data = json.loads(said.out)["data"]
    assert (data["made"], data["made_before"]) == (len(again), N_ITEMS - len(again))
    assert "not the files in" in said.err
    assert is_whole(command)
    if command.kind == "clips":
        assert command.job("--resume", "--format", "gif") == 2
        assert "--resume: expected the format of the manifest" in capsys.readouterr().err


def test_a_failed_item_is_recorded_and_made_again(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    owner: Any = KINDS[command.kind][4]
    render = owner.render

    def broken(self: Any, *given: Any) -> Any:
        if given[-1] in (9, [9]):
            raise RuntimeError("the decoder \x1b[31mbroke")
        return render(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(owner, "render", broken)
        assert command.job("--json-stream") == 3
        said = capsys.readouterr()
        *events, end = map(json.loads, said.out.splitlines())
        names = [event["event"] for event in events]
        assert (names.count("item"), names.count("failed")) == (N_ITEMS - 1, 1)
        assert (end["ok"], end["error"]["code"], end["data"]["failed"]) == (False, "failures", 1)
        assert "\x1b[31m" not in said.err and "failed: three, " in said.err
        assert len(command.content) == N_ITEMS - 1
        assert command.job("--resume", "--max-failures", 0, "--json") == 1
        end = answer(capsys)
        assert end["error"]["code"] == "fatal" and end["data"]["is_cut"]
    assert command.job("--resume", "--max-failures", 0) == 0
    assert command.content == whole_of(command.kind).content


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("disturb", "code", "error", "says"),
    [
        ("a full disk", 1, "fatal", "received: No space left on device; finished"),
        ("a signal between a file and its record", 130, "interrupted", "continue with --resume"),
        ("a signal in the model", 130, "interrupted", "continue with --resume"),
    ],
)
def test_a_job_that_ends_early_keeps_finished_items_and_nothing_half(
    command: Command, capsys: Said, disturb: str, code: int, error: str, says: str
) -> None:
    changes = {
        "a full disk": at_write(4, command.suffix, raise_full),
        "a signal between a file and its record": at_write(
            4, command.suffix, interrupt, is_named=True
        ),
        "a signal in the model": at_render(4, command.kind, KeyboardInterrupt()),
    }
    before = signal.getsignal(signal.SIGTERM)
    with changes[disturb]:
        assert command.job("--json", "--batch-size", 2) == code
    said = capsys.readouterr()
    assert json.loads(said.out)["error"]["code"] == error and says in said.err
    assert signal.getsignal(signal.SIGTERM) is before
    assert 1 <= len(command.content) == len(lines(command.out)) < N_ITEMS
    assert command.job("--resume", "--batch-size", 2) == 0 and is_whole(command)


BAD_ROWS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"prompt": "a purple whale"}, ""),
    ({"size": "99x99"}, "size"),
    ({"params": {"windows": 3}}, "policy jacobi"),
    ({"policy": "stepwise"}, "policy"),
    ({"voice": "zoe"}, "voice: expected "),
)


def test_rows_that_the_model_refuses_are_named_before_any_work(
    command: Command, capsys: Said
) -> None:
    fine = {"prompt": command.inputs[0]}
    for row, says in BAD_ROWS:
        assert command.job("--json", rows=[fine, fine | row, fine | row]) == 2
        end = answer(capsys)
        assert end["error"]["code"] == "usage" and "line 1" not in end["error"]["message"]
        assert (
            f"line 2: {says}" in end["error"]["message"] and "line 3: " in end["error"]["message"]
        )
        assert not command.out.exists()


def test_other_settings_do_not_go_on_with_a_manifest(command: Command, capsys: Said) -> None:
    shutil.copytree(whole_of(command.kind).out, command.out)
    for more, seed, said in (
        ([], 3, "expected a folder without a manifest.jsonl"),
        (["--resume", "--temperature", "0.7"], 3, "received others for 4 items (the first is one"),
        (["--resume"], 4, "received others for 5 items"),
    ):
        assert command.job(*more, seed=seed) == 2
        assert said in capsys.readouterr().err
    assert is_whole(command)


@pytest.mark.parametrize(("more", "code"), [(["--resume"], 0), ([], 2)])
def test_items_of_another_process_are_not_made_again(
    images: Command, monkeypatch: pytest.MonkeyPatch, more: list[str], code: int
) -> None:
    check, codes = Worker.check, []

    def slowly(worker: Worker, items: Any) -> Any:
        if not codes:
            codes.append(None)
            codes.append(images.job())  # runs while the other process loads its model
        return check(worker, items)

    monkeypatch.setattr(Worker, "check", slowly)
    assert images.job(*more) == code and codes == [None, 0]
    assert len(lines(images.out)) == N_ITEMS
