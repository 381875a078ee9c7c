"""Caches measured: answers against `generate` under `attach`, bytes by hand; statistics, files."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.catalog import METHODS, make
from mmaccel.demo.recall.words import EOS, make_tokenizer
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.evaluation.cache import documents, measure, plots, summary
from mmaccel.evaluation.cache import prompts as prompts_of_sides
from mmaccel.evaluation.cache.documents import TextModel
from mmaccel.evaluation.cache.methods import (
    CHANCE,
    FULL,
    Method,
    Side,
    list_sides,
    parse_budgets,
    parse_methods,
)
from mmaccel.evaluation.cache.questions import TextQuestion, digest_questions
from mmaccel.evaluation.cache.suite import TASKS, draw_suite
from mmaccel.evaluation.shares import paired_difference
from mmaccel.pipelines.layers.methods import LayerMethods
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.tiny_recall import build_recall, save_recall
from tests.matrix.examples import Target
from tests.matrix.examples import make as matrix_example

SNAP = Method("kv_cache", "snapkv", {"window": 4})
RECENT = Method("kv_cache", "streaming-llm", {"sinks": 0})
QUEST = Method("attention", "quest", {"block": 4, "first_layer": 0})
SIDES = [Side(), Side(SNAP, 0.3), Side(RECENT, 0.3), Side(QUEST, 0.3)]
N_NEW = 5


@pytest.fixture(scope="module")
def text_model() -> TextModel:
    return TextModel(build_recall(), make_tokenizer(), True)


def generate(text_model: TextModel, prompt: str, side: Side, n_tokens: int) -> str:
    """An answer by the model's own `generate`."""
    methods = side.make(n_tokens)
    inputs = text_model.tokenizer(prompt, return_tensors="pt")
    options: dict[str, Any] = {"max_new_tokens": N_NEW, "do_sample": False}
    with mmaccel.attach(
        text_model.model,
        "autoregressive",
        strict=True,
        kv_cache=methods.kv_cache,
        attention=methods.attention,
    ):
        made = text_model.model.generate(**inputs, **options)
    (text,) = text_model.decode(made[:, inputs["input_ids"].shape[1] :])
    return text


@pytest.fixture(scope="module")
def asked(text_model: TextModel) -> list[TextQuestion]:
    """Seven, of which the full cache answers the first two and the fifth rightly."""
    found = []
    for k, question in enumerate(documents.draw_questions(2, 64)[:7]):
        own = generate(text_model, question.prompt, Side(), 1)
        answer = f" {own.upper()}. " if k in (0, 1, 4) else "something else"
        found.append(TextQuestion("ab"[k % 3 == 0], question.prompt, answer))
    return found


def run(text_model: TextModel, asked: Any, sides: Any, records: Any) -> Iterator[str]:
    return measure.measure_sides(
        text_model, asked, sides, records, batch=3, max_new_tokens=N_NEW, session=0
    )


def test_a_batch_answers_what_generate_answers_each_question(
    text_model: TextModel, asked: list[TextQuestion]
) -> None:
    prompts = text_model.encode(asked[:3])
    assert len({len(prompt) for prompt in prompts}) > 1  # rows of different lengths
    window = measure.CausalLMWindow(text_model.model)
    answers = set()
    for side in SIDES:
        tokens, _ = measure.answer(
            window, prompts, side.make(66), text_model.ends, max_new_tokens=N_NEW
        )
        alone = [generate(text_model, question.prompt, side, 66) for question in asked[:3]]
        assert text_model.decode(tokens) == alone
        answers.add(tuple(alone))
    assert len(answers) > 2  # methods matter


def test_records_of_a_run(text_model: TextModel, asked: list[TextQuestion]) -> None:
    records = {side.key: measure.new_record() for side in SIDES}
    keys = list(run(text_model, asked, SIDES, records))
    assert len(keys) == 4 * 3 and keys[:4] != keys[4:8]  # they change places
    assert records[FULL]["right"] == "1100100"
    assert all(len(records[key][name]) == 3 for key in records for name in measure.PER_ROUND)
    assert records[FULL]["kept"] == [1.0] * 3


def test_finished_rounds_are_not_answered_again(
    text_model: TextModel, asked: list[TextQuestion], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    answer = measure.answer

    def count(window: Any, prompts: Any, methods: Any, *args: Any, **options: Any) -> Any:
        calls.append(len(prompts))
        return answer(window, prompts, methods, *args, **options)

    monkeypatch.setattr(measure, "answer", count)
    sides = SIDES[:2]
    whole = {side.key: measure.new_record() for side in sides}
    list(run(text_model, asked, sides, whole))
    assert calls == [3] * 5 + [1] * 2  # the first warms up
    calls.clear()
    records = {side.key: measure.new_record() for side in sides}
    stopped = run(text_model, asked, sides, records)
    for _ in range(3):
        next(stopped)
    stopped.close()
    records = json.loads(json.dumps(records))
    list(run(text_model, asked, sides, records))
    assert len(calls) == 2 * 3 + 2
    assert [records[key]["right"] for key in records] == [whole[key]["right"] for key in whole]
    calls.clear()
    list(run(text_model, asked, sides, records))
    assert calls == []


def test_entries_and_bytes_by_hand(text_model: TextModel, asked: list[TextQuestion]) -> None:
    prompts = [prompt[:n] for prompt, n in zip(text_model.encode(asked), (31, 41), strict=False)]
    window = measure.CausalLMWindow(text_model.model)
    an_entry = 2 * 3 * 2 * 16 * 4  # keys and values of three layers, two heads of 16, float32
    # without an end all passes run: room for the prompt, what follows, and scratch
    for side, budget in ((Side(), None), (Side(RECENT, 0.25), 10), (Side(QUEST, 0.5), None)):
        _, cost = measure.answer(window, prompts, side.make(40), [], max_new_tokens=N_NEW)
        whole = 41 + N_NEW + 2
        assert len(cost.pass_seconds) == N_NEW - 1 and cost.prefill_seconds > 0
        if budget is None:
            assert cost.kept == 1.0 and cost.bytes == whole * an_entry
        else:
            assert cost.kept == pytest.approx(2 * budget / (31 + 41))
            assert cost.bytes == (whole - (31 - budget)) * an_entry


_WHOLE = ("raas", "quantized-cache")  # drop no entry of a prompt


@pytest.mark.parametrize("name", METHODS["kv_cache"])
def test_prompts_that_were_shared_answer_as_own_ones(
    name: str, text_model: TextModel, asked: list[TextQuestion]
) -> None:
    prompts = text_model.encode(asked[:3])
    window = measure.CausalLMWindow(text_model.model)
    target = Target(text_model.model)
    method = matrix_example("kv_cache", name, target)
    methods = LayerMethods(kv_cache=method)
    if prompts_of_sides.find_pass(methods) is None:
        assert methods.repeated  # its prompts are processed by itself
        return
    others = [side.make(66) for side in SIDES]
    adding = LayerMethods(kv_cache=mmaccel.H2O(budget=9))
    options: dict[str, Any] = {"max_new_tokens": N_NEW}
    own, cost = measure.answer(window, prompts, methods, [], **options)
    shared = prompts_of_sides.process_prompts(window, prompts, [methods, *others, adding])
    for _ in range(2):  # nobody changes what others begin with
        made, other = measure.answer(window, prompts, methods, [], shared=shared, **options)
        assert torch.equal(made, own) and other.kept == cost.kept
        assert (cost.kept == 1) == (name in _WHOLE)
        assert other.bytes == cost.bytes and other.shared_seconds == shared.seconds > 0


def test_a_round_processes_its_prompts_once(
    text_model: TextModel, asked: list[TextQuestion]
) -> None:
    widths = list[int]()
    hook = text_model.model.get_input_embeddings().register_forward_hook(
        lambda _m, args, _made: widths.append(args[0].shape[1])
    )
    chooser = Method("attention", "x-attention", {"block": 4, "first_layer": 0, "stride": 2})
    adding = [
        Side(Method("kv_cache", "h2o", {"budget": 9})),
        Side(Method("kv_cache", "vatp", {"budget": 9, "sinks": 2})),
    ]
    sides = [*SIDES, Side(chooser), *adding]
    records = {side.key: measure.new_record() for side in sides}
    list(run(text_model, asked, sides, records))
    hook.remove()
    n_rounds = 3
    # a round: one for most sides, one for those that add up attention, one of the selector for
    # prompts; and one that warms up
    assert sum(width > 1 for width in widths) == 3 * n_rounds + 1


def test_blocks_that_were_read_by_hand(text_model: TextModel, asked: list[TextQuestion]) -> None:
    prompts = [prompt[:n] for prompt, n in zip(text_model.encode(asked), (31, 41), strict=False)]
    window = measure.CausalLMWindow(text_model.model)

    def share(**fields: Any) -> float | None:
        methods = LayerMethods(attention=mmaccel.LocalWindow(block=4, first_layer=1, **fields))
        return measure.answer(window, prompts, methods, [], max_new_tokens=N_NEW)[1].blocks

    n_read = n_blocks = 0
    for length in (31, 41):
        for k in range(N_NEW - 1):  # the first token comes from the prompt
            last = length + k  # the query's cache index
            blocks = range(last // 4 + 1)
            near = [b for b in blocks if b == 0 or b >= max(last - 8 + 1, 0) // 4]
            n_blocks += 3 * len(blocks)
            n_read += len(blocks) + 2 * len(near)  # the first layer reads everything
    assert share(window=8, sinks=4) == pytest.approx(n_read / n_blocks)
    assert share(window=99) == 1.0
    whole = measure.answer(window, prompts, LayerMethods(), [], max_new_tokens=N_NEW)[1]
    assert whole.blocks is None
    every = LayerMethods(
        attention=mmaccel.XAttention(threshold=1, stride=2, block=4, first_layer=0)
    )
    assert measure.answer(window, prompts, every, [], max_new_tokens=N_NEW)[1].blocks == 1.0
    some = LayerMethods(
        attention=mmaccel.XAttention(threshold=0.3, stride=2, block=4, first_layer=0)
    )
    found = measure.answer(window, prompts, some, [], max_new_tokens=N_NEW)[1].blocks
    assert found is not None and 0 < found < 1


def test_answers_end_with_the_last_row(text_model: TextModel, asked: list[TextQuestion]) -> None:
    window = measure.CausalLMWindow(text_model.model)
    prompts = text_model.encode(asked[:1])
    every = list(range(400))
    tokens, cost = measure.answer(window, prompts, SIDES[0].make(1), every, max_new_tokens=N_NEW)
    assert tokens.shape == (1, 1) and len(cost.pass_seconds) == 1
    row = torch.tensor([[7, EOS, 9], [EOS, 8, 9], [9, 8, 7]])
    assert [len(text.split()) for text in text_model.decode(row)] == [1, 0, 3]


def test_rows_against_a_slow_reference() -> None:
    rng = random.Random(3)
    chance = Method("kv_cache", CHANCE)
    sides = [Side(), *(Side(m, b) for m in (chance, SNAP) for b in (0.5, 0.25)), Side(QUEST)]
    tasks = rng.choices("xyz", k=8)
    records = {
        side.key: {
            "right": "".join(rng.choices("01", k=8)),
            **{name: [rng.random() for _ in range(3)] for name in measure.PER_ROUND},
            "sessions": [0, 0, 1],
        }
        for side in sides
    }
    rows = {row["side"]: row for row in summary.summarise(sides, records, tasks, batch=3)}
    assert list(rows) == [side.key for side in sides]
    for side in sides:
        record = records[side.key]
        row = rows[side.key]
        for task in "xyz":
            own = [record["right"][k] == "1" for k in range(8) if tasks[k] == task]
            assert row["accuracy"][task]["right"] == pytest.approx(sum(own) / len(own), abs=1e-5)
        assert row["accuracy"]["all"]["questions"] == 8 and row["sessions"] == [0, 1]
        for name in ("kept", "bytes", "blocks"):
            a, b, c = record[name]
            assert row[name] == pytest.approx((3 * a + 3 * b + 2 * c) / 8)
        assert row["prefill_seconds"] == pytest.approx(median(record["prefill_seconds"][:2]) / 3)
        assert row["pass_seconds"] == pytest.approx(median(record["pass_seconds"][:2]))
        if side.key == FULL:
            assert row["to_full"] is row["to_random"] is None
            continue
        assert row["to_full"] == paired_difference(record["right"], records[FULL]["right"])
        by_chance = records.get(f"{CHANCE} at {side.budget}")
        if side.method == SNAP and by_chance is not None:
            assert row["to_random"] == paired_difference(record["right"], by_chance["right"])
        else:
            assert row["to_random"] is None


def test_which_methods_a_model_takes(text_model: TextModel) -> None:
    sides, left_out = list_sides(text_model.model, parse_methods([]), [0.5, 0.25], 64)
    names = {side.method.name for side in sides}
    assert names | {key.split(" at ")[0] for key in left_out} >= {
        FULL, *METHODS["kv_cache"], *METHODS["attention"],
    }  # fmt: skip
    assert sides[0] == Side() and "streaming-llm:sinks=0 at 0.25" in {side.key for side in sides}
    # at an eighth of 64 tokens no observation window of 32 is left
    sides, left_out = list_sides(text_model.model, [Method("kv_cache", "snapkv")], [0.9, 0.125], 64)
    assert [side.key for side in sides] == [FULL, "snapkv at 0.9"]
    assert "observation window" in left_out["snapkv at 0.125"]
    with pytest.raises(UnsupportedModelError, match="takes a method"):
        list_sides(text_model.model, [Method("kv_cache", "snapkv")], [0.125], 64)
    with pytest.raises((UnsupportedModelError, OptionError)):
        list_sides(build_lm("lfm2"), parse_methods([]), [0.5], 64)


def test_names_and_budgets() -> None:
    every = parse_methods([])
    assert {method.name for method in every} == {*METHODS["kv_cache"], *METHODS["attention"]}
    assert RECENT in every
    quest = parse_methods([("quest", {"block": 8})])
    assert quest[-1] == Method("attention", "quest", {"block": 8})
    assert len(quest) == len(every) - len(METHODS["kv_cache"] | METHODS["attention"]) + 1 + (
        CHANCE in METHODS["kv_cache"]
    )
    assert quest[-1].label == "quest:block=8" and quest[-1].takes_budget
    fixed = Method("kv_cache", "snapkv", {"budget": 64})
    assert not fixed.takes_budget and Side(fixed).make(999).kv_cache == mmaccel.SnapKV(budget=64)
    assert Side(QUEST, 0.3).make(999).attention == make(
        "attention", "quest", budget=0.3, **QUEST.options
    )
    with pytest.raises(OptionError, match="--methods: .*received 'quest2'.*quest"):
        parse_methods([("quest2", {})])
    assert parse_budgets(["0.5", ".1", "0.50"]) == [0.5, 0.1]
    for wrong in (["1"], ["0"], ["x"], [], ["nan"]):
        with pytest.raises(OptionError, match="--budgets: expected a number in"):
            parse_budgets(wrong)


def test_questions_of_a_file(tmp_path: Path) -> None:
    line = {"prompt": "a b", "answer": "x", "task": "k"}
    file = tmp_path / "q.jsonl"
    lines = [line, line | {"task": "l"}, line | {"answer": "y"}, line]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    found = documents.read_questions(file, 2)
    assert [(q.task, q.answer) for q in found] == [("k", "x"), ("l", "x"), ("k", "y")]
    digest = digest_questions(found)
    assert digest != digest_questions(found[::-1])
    assert found[0].is_right(" X ") and not found[0].is_right("xx")


def test_other_weights_and_other_models(tmp_path: Path) -> None:
    opened = documents.open_model(str(save_recall(tmp_path / "own")), "cpu", torch.float32)
    assert opened.is_demo and opened.ends == [EOS]
    prompts = opened.encode([TextQuestion("a", "f0 f1", "f2"), TextQuestion("a", "f0", "f2")])
    assert [len(prompt) for prompt in prompts] == [3, 2]
    documents.check_lengths(opened, prompts, 253)
    with pytest.raises(UnsupportedModelError, match="at most 256 tokens with 254"):
        documents.check_lengths(opened, prompts, 254)
    with pytest.raises(OptionError, match="scenes-vqa, which answers .* give recall, or run"):
        documents.open_model("scenes-vqa", "cpu", torch.float32)


def test_a_plot_of_a_report(
    text_model: TextModel, asked: list[TextQuestion], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    records = {side.key: measure.new_record() for side in SIDES}
    list(run(text_model, asked, SIDES, records))
    rows = summary.summarise(SIDES, records, [q.task for q in asked], 3)
    plots.draw_plots(tmp_path / "a.png", {"cache_sides": rows, "model": "m", "questions": 7})
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_suite_asks_what_its_texts_say() -> None:
    asked = draw_suite(12)
    assert draw_suite(12) == asked and len(asked) == 12 * len(TASKS)
    facts = sorted((q for q in asked if q.task == "fact"), key=lambda q: q.prompt.find(q.answer))
    places = [q.prompt.find(q.answer) / len(q.prompt) for q in facts]
    assert places[0] < 0.15 and places[-1] > 0.8  # at all depths
    for question in asked:
        assert 4_000 < len(question.prompt) < 24_000
        text = question.prompt.rpartition("\n\n")[0]
        assert question.answer in " ".join(text.split())
        assert question.is_right(f" {question.answer}.\nAnd so on")
        assert not question.is_right(f"{question.answer}x") and not question.is_right("")


def test_a_primer_stands_in_the_assistants_turn() -> None:
    tokenizer = make_tokenizer()
    question = TextQuestion("a", "f0 f1", "f2", "f3")
    assert question.render(tokenizer) == {"text": "f0 f1\nf3"}
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }} . {% endfor %}"
    assert question.render(tokenizer) == {
        "text": "user: f0 f1 . assistant: f3", "add_special_tokens": False,
    }  # fmt: skip


def test_only_questions_count_that_the_full_cache_answers(
    text_model: TextModel, asked: list[TextQuestion]
) -> None:
    records = {side.key: measure.new_record() for side in SIDES}
    list(run(text_model, asked, SIDES, records))
    tasks = [question.task for question in asked]
    rows = summary.summarise(SIDES, records, tasks, 3, informative=True)
    assert rows[0]["accuracy"]["all"]["right"] == 1 and rows[0]["accuracy"]["all"]["questions"] == 3
    right = [records[SIDES[1].key]["right"][k] for k in (0, 1, 4)]
    assert rows[1]["accuracy"]["all"]["right"] == pytest.approx(right.count("1") / 3, abs=1e-4)
    assert [len(batch) for batch in records[FULL]["answers"]] == [3, 3, 1]
