"""`mmaccel evaluate visual-tokens`: its report, a run that is stopped and goes on, wrong input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmaccel.cli import main
from mmaccel.demo.scenes_vqa.data import KINDS
from mmaccel.demo.scenes_vqa.processor import make_processor
from mmaccel.evaluation import visual_tokens
from mmaccel.evaluation.visual_tokens import CONTROLS
from tests.fixtures.tiny_vlms import build_vqa, encodes_first

pytestmark = [  # tests/evaluation has the functions
    pytest.mark.slow,
    pytest.mark.skipif(
        not encodes_first(), reason="this transformers encodes images in its first pass"
    ),
]
EACH = len(CONTROLS) + 1  # controls, and FastV
SIDES = 1 + 2 * EACH  # at two fractions, and all tokens
ROUNDS = 2  # nine kinds in batches of five


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of the demo's kind."""
    path = tmp_path_factory.mktemp("vqa")
    build_vqa().save_pretrained(path)
    return path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The method of every batch that is answered; `stop` after some."""
    found, answer = Calls(), visual_tokens.answer

    def count(vlm: Any, inputs: Any, method: Any, **options: Any) -> Any:
        if len(found) == found.stop:
            raise KeyboardInterrupt
        found.append(repr(method))
        return answer(vlm, inputs, method, **options)

    monkeypatch.setattr(visual_tokens, "answer", count)
    return found


class Calls(list[str]):
    stop = -1


def evaluate(folder: Path, *more: object, keep: str = "0.5,0.25") -> int:
    options = ["--keep", keep, "--questions", "1", "--batch", "5", *map(str, more)]
    return main(["evaluate", "visual-tokens", str(folder), *options])


def test_a_stopped_run_goes_on(folder: Path, tmp_path: Path, calls: Calls, capsys: Any) -> None:
    file, whole = tmp_path / "r.json", tmp_path / "whole.json"
    options = ("--methods", "fastv", "--json")
    calls.stop = 13
    assert evaluate(folder, *options, file) == 130
    assert f"12 of {SIDES * ROUNDS} batches answered" in capsys.readouterr().err
    records = json.loads(file.read_text())["records"].values()
    assert sum(len(record["seconds"]) for record in records) == 12
    calls.stop = -1
    assert evaluate(folder, *options, file) == 0
    assert len(calls) == 13 + 1 + SIDES * ROUNDS - 12
    said = capsys.readouterr().out
    report = json.loads(file.read_text())
    rows = report["sides"]
    assert len(rows) == SIDES and len(report["sessions"]) == 2 and "several runs" in said
    assert "Downsample" in said and "PyramidDrop" not in said and "informative" in said
    assert rows[0]["visual_tokens"] == 520 and rows[0]["questions"] == len(KINDS)
    fastv = {row["keep"]: row for row in rows if row["method"] == "FastV"}
    assert fastv[0.25]["visual_tokens"] == 130 and fastv[0.25]["layer_tokens"] == (520 + 130) / 2
    assert 0 < fastv[0.25]["flops"] < fastv[0.5]["flops"] < rows[0]["flops"]
    assert set(rows[0]["accuracy"]) == {*KINDS, "all"} and report["machine"]["versions"]
    calls.clear()
    assert evaluate(folder, *options, whole) == 0
    assert len(calls) == 1 + SIDES * ROUNDS
    again = json.loads(whole.read_text())
    for key, record in again["records"].items():
        for name in ("right", "visual_tokens", "layer_tokens", "flops"):
            assert record[name] == report["records"][key][name]
    calls.clear()
    assert evaluate(folder, *options, whole, keep="0.5,0.25,0.1") == 0  # only what is new
    assert len(calls) == 1 + EACH * ROUNDS and all("keep=0.1" in call for call in calls)


def test_a_report_of_something_else_is_left_alone(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    options = ("--methods", "fastv", "--json", file)
    assert evaluate(folder, *options, keep="0.5") == 0
    before = file.read_text()
    assert evaluate(folder, *options, "--batch", "4", keep="0.5") == 2
    assert evaluate(folder, *options, "--seed", "4", keep="0.5") == 2
    assert evaluate(folder, *options, "--questions", "2", keep="0.5") == 2
    other = tmp_path / "other"
    build_vqa(1).save_pretrained(other)
    assert evaluate(other, *options, keep="0.5") == 2
    assert file.read_text() == before
    for text in ("{}", "no json", '{"records": {"a": {}}, "sessions": []}'):
        file.write_text(text)
        assert evaluate(folder, *options, keep="0.5") == 2
        assert file.read_text() == text


def test_questions_of_ones_own(folder: Path, tmp_path: Path, capsys: Any) -> None:
    Image.new("RGB", (80, 80), "red").save(tmp_path / "a.png")
    line = {"image": "a.png", "question": "what colour is the sign?", "answer": "x", "kind": "1"}
    data = tmp_path / "q.jsonl"
    data.write_text("\n".join([json.dumps(line)] * 2))
    file = tmp_path / "r.json"
    given = ("--data", data, "--json", file, "--methods", "random-tokens")
    assert evaluate(folder, *given, keep="0.5") == 0
    report = json.loads(file.read_text())
    assert report["kind_names"] == ["1"] and report["questions"] == 1  # --questions 1
    assert "of 1 kinds" in capsys.readouterr().out
    full, other = tmp_path / "full", tmp_path / "other.json"
    build_vqa().save_pretrained(full)
    make_processor().save_pretrained(full)
    assert evaluate(full, *given[:2], "--json", other, *given[4:], keep="0.5") == 0
    again = json.loads(other.read_text())
    assert again["weights"] == report["weights"] and again["max_new_tokens"] == 16
    columns = [{r["method"]: r["visual_tokens"] for r in x["sides"]} for x in (report, again)]
    assert columns[0] == columns[1] and set(columns[0]) == {"all tokens", *CONTROLS}
    assert (columns[0]["all tokens"], columns[0]["RandomTokens"]) == (520, 250)
    assert evaluate(full) == 2
    assert "--data: expected questions" in capsys.readouterr().err
