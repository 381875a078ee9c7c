"""Answers of sides: rows against a slow reference, rounds that are done, questions, intervals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from mmaccel.demo.recall.words import make_tokenizer
from mmaccel.errors import OptionError
from mmaccel.evaluation.answers import (
    Side,
    measure_answers,
    parse_levels,
    summarise,
)
from mmaccel.evaluation.cache import TextModel
from mmaccel.evaluation.questions import (
    IMAGE_FIELDS,
    TEXT_FIELDS,
    Question,
    digest_questions,
    read_questions,
)
from mmaccel.evaluation.shares import paired_difference
from mmaccel.evaluation.visual_tokens import VisionModel

ASKED = [Question("ab"[k % 3 == 0], f"q{k}", f"a{k}") for k in range(7)]


def side_of(name: str, level: float | None = None) -> Side:
    facts = {"method": name, "slot": "s"}
    return Side(f"{name} {level}", name, level, lambda n_tokens: None, facts)


class Known(TextModel):
    """Answers every second question rightly as a whole, else the first of a batch."""

    def prepare(self, asked: Any, seeds: Any, sides: Any) -> Any:
        return list(zip(asked, seeds, strict=True))

    def answer(self, side: Side, inputs: Any, max_new_tokens: int) -> dict[str, Any]:
        part = [one for one, _ in inputs]
        self.tokenizer.append((side.key, [(one.text, seed) for one, seed in inputs]))
        is_whole = side.name == "whole"
        rights = [int(one.text[1:]) % 2 == 0 if is_whole else one is part[0] for one in part]
        texts = [f" {one.answer.upper()}. " if r else "x" for one, r in zip(part, rights)]
        return {**dict.fromkeys(self.figures(), 1.0), "texts": texts, "answers": texts}


def run(sides: list[Side], records: dict[str, Any], asked: list[Any]) -> Iterator[str]:
    model = Known(SimpleNamespace(device="cpu"), asked, False)
    options: dict[str, Any] = {"batch": 3, "session": 2, "seed": 10, "max_new_tokens": 1}
    return measure_answers(model, ASKED, sides, records, **options)


def test_finished_rounds_are_not_answered_again() -> None:
    sides = [side_of("whole"), side_of("other", 0.5)]
    asked: list[Any] = []
    whole = {side.key: TextModel.new_record() for side in sides}
    keys = list(run(sides, whole, asked))
    assert keys == [sides[k].key for k in (0, 1, 1, 0, 0, 1)]  # they change places
    assert len(asked) == 1 + 6 and asked[-1][1] == [("q6", 16)]  # the first warms up
    assert [record["right"] for record in whole.values()] == ["1010101", "1001001"]
    assert [len(part) for part in whole[sides[0].key]["answers"]] == [3, 3, 1]
    assert whole[sides[0].key]["sessions"] == [2] * 3
    records = {side.key: TextModel.new_record() for side in sides}
    stopped = run(sides, records, asked)
    for _ in range(3):
        next(stopped)
    stopped.close()
    records = json.loads(json.dumps(records))
    asked.clear()
    assert len(list(run(sides, records, asked))) == 3 and len(asked) == 1 + 3
    assert records == json.loads(json.dumps(whole))
    asked.clear()
    assert list(run(sides, records, asked)) == asked == []


def test_rows_by_hand() -> None:
    """Five questions in rounds of two, two and one, which counts in means alone."""
    topic = VisionModel
    rights = {"whole": "11101", topic.easy[0]: "10010", topic.chance: "01000", "DART": "11010"}
    sides = [side_of(name, 1.0 if name == "whole" else 0.5) for name in rights]
    figures = dict.fromkeys(topic.figures(), [1.0, 3.0, 9.0])
    records = {
        side.key: {**figures, "right": right, "sessions": [0, 0, 1]}
        for side, right in zip(sides, rights.values(), strict=True)
    }
    whole, _, chance, row = summarise(topic, sides, records, "xyxyx", batch=2)
    assert whole["to_all"] is whole["to_random"] is whole["informative"] is None
    assert chance["to_random"] is None and chance["to_all"] is not None
    assert (row["keep"], row["questions"], row["sessions"]) == (0.5, 5, [0, 1])
    shares = {kind: share["right"] for kind, share in row["accuracy"].items()}
    assert shares == {"x": pytest.approx(1 / 3, abs=1e-5), "y": 1.0, "all": 0.6}
    assert row["to_all"] == paired_difference("11010", "11101")
    assert row["to_random"] == paired_difference("11010", "01000")
    # of the second, third and fifth question, which all tokens answer and downsampling does not
    assert (row["informative"]["questions"], row["informative"]["right"]) == (3, 0.33333)
    for name in topic.counted:
        assert row[name] == pytest.approx((2 * 1 + 2 * 3 + 9) / 5)
    for name in topic.timed:
        assert row[name] == pytest.approx(2 / 2)  # full rounds alone, a question
    records = {
        side.key: {**records[side.key], **dict.fromkeys(TextModel.figures(), [1.0, 3.0, 9.0])}
        for side in sides
    }
    assert summarise(TextModel, sides, records, "xyxyx", batch=2)[0]["pass_seconds"] == 2


def test_unfinished_sides_unknown_figures_and_questions_that_count() -> None:
    topic = TextModel
    sides = [side_of("whole"), side_of("late", 0.5), side_of("never", 0.5)]
    records = {side.key: topic.new_record() for side in sides}
    for side, right, rounds in zip(sides, ("1101", "10"), (2, 1)):
        records[side.key] |= {name: [1.0] * rounds for name in topic.figures()} | {"right": right}
        records[side.key] |= {"blocks": [None] * rounds}
    rows = summarise(topic, sides, records, "aabb", batch=2)
    assert len(rows) == 2 and rows[1]["accuracy"]["b"] is None and rows[0]["blocks"] is None
    assert (rows[1]["to_full"]["only_first"], rows[1]["to_full"]["only_second"]) == (0, 1)
    some = summarise(topic, sides, records, "aabb", batch=2, only_answered=True)
    assert some[0]["accuracy"]["all"]["right"] == 1 and some[0]["questions"] == 3


def test_the_published_example_of_the_paired_interval() -> None:
    """`ci.prop.ps(.05, 12, 26, 4, 6)` of statpsych, by the same authors."""
    first = "0" * 12 + "1" * 26 + "0" * 4 + "1" * 6
    second = "0" * 12 + "0" * 26 + "1" * 4 + "1" * 6
    found = paired_difference(first, second)
    assert found is not None
    assert (found["low"], found["high"]) == pytest.approx((0.2548067, 0.6251933), abs=1e-5)
    assert (found["only_first"], found["only_second"]) == (26, 4)
    back = paired_difference(second, first)
    assert back is not None and back["high"] == pytest.approx(-found["low"])
    assert paired_difference("", second) is None


def test_levels() -> None:
    assert parse_levels("--keep", ["0.5", ".1", "0.50"]) == [0.5, 0.1]
    for wrong in (["1"], ["0"], ["x"], [], ["nan"]):
        with pytest.raises(OptionError, match="--keep: expected a number in"):
            parse_levels("--keep", wrong)


def test_right_answers() -> None:
    question = Question("a", "?", "Red  Star.")
    for text in ("red star", " RED star ", "red\nstar!?", "Red star ."):
        assert question.is_right(text)
    for text in ("red stars", "redstar", "", "a red star", ".red star"):
        assert not question.is_right(text)
    begun = Question("a", "?", "12", "The code is")
    assert begun.is_right(" 12.\nAnd so on") and not begun.is_right("123")


def test_questions_of_a_file(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    file = tmp_path / "q.jsonl"
    text = {"prompt": "a b", "answer": "x", "task": "k"}
    image = {"image": "a.png", "question": "what?", "answer": "x", "kind": "k"}
    for line, fields in ((text, TEXT_FIELDS), (image, IMAGE_FIELDS)):
        kind = fields["kind"]
        lines = [line, line | {kind: "l"}, line | {"answer": "y"}, line]
        file.write_text("\n\n".join(map(json.dumps, lines)))
        found = read_questions(file, 2, fields)
        assert [(q.kind, q.answer) for q in found] == [("k", "x"), ("l", "x"), ("k", "y")]
        digest = digest_questions(found)
        assert digest != digest_questions(found[::-1])
        for wrong in ({kind: "all"}, {"answer": 3}):
            file.write_text("\n".join(map(json.dumps, (line, line | wrong))))
            with pytest.raises(OptionError, match="on line 2"):
                read_questions(file, 2, fields)
    assert found[0].image == tmp_path / "a.png"
    file.write_text(json.dumps(image | {"image": "b.png"}))
    with pytest.raises(OptionError, match="images being files"):
        read_questions(file, 2, IMAGE_FIELDS)
    file.write_text("\n")
    with pytest.raises(OptionError, match="received none"):
        read_questions(file, 2, TEXT_FIELDS)


def test_digests_are_those_of_earlier_reports() -> None:
    """Which files go on from them."""
    texts = [Question("a", "p", "x"), Question("a", "p", "x", "primer")]
    images = [Question("a", "p", "x", image=Path("b/c.png")), Question("a", "p", "x", image=1)]
    assert digest_questions(texts) == "b5927f4453dd3437"
    assert digest_questions(images) == "d47b21679bd9a147"


def test_a_primer_stands_in_the_assistants_turn() -> None:
    tokenizer = make_tokenizer()
    question = Question("a", "f0 f1", "f2", "f3")
    assert question.render(tokenizer) == {"text": "f0 f1\nf3"}
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }} . {% endfor %}"
    assert question.render(tokenizer) == {
        "text": "user: f0 f1 . assistant: f3", "add_special_tokens": False,
    }  # fmt: skip
