"""Caches measured: answers against `generate` under `attach`, entries, bytes and blocks by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.catalog import METHODS, make
from mmaccel.cli import main
from mmaccel.demo.recall.words import EOS, make_tokenizer
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.evaluation.answers import try_sides
from mmaccel.evaluation.cache import (
    CHANCE,
    CausalLMWindow,
    TextModel,
    answer,
    draw_questions,
    make_side,
    open_model,
    parse_methods,
    takes_budget,
)
from mmaccel.evaluation.questions import Question
from mmaccel.evaluation.suite import TASKS, draw_suite
from mmaccel.pipelines.hosts.layers.methods import LayerMethods
from tests.fixtures.tiny_recall import build_recall, save_recall

SNAP = ("kv_cache", "snapkv", {"window": 4})
RECENT = ("kv_cache", "streaming-llm", {"sinks": 0})
QUEST = ("attention", "quest", {"block": 4, "first_layer": 0})
SIDES = [TextModel.first, *(make_side(method, 0.3) for method in (SNAP, RECENT, QUEST))]
N_NEW = 5


@pytest.fixture(scope="module")
def text_model() -> TextModel:
    return TextModel(build_recall(), make_tokenizer(), True)


@pytest.fixture(scope="module")
def prompts(text_model: TextModel) -> list[torch.Tensor]:
    return text_model.encode(draw_questions(2, 64)[:3])


@pytest.fixture(scope="module")
def window(text_model: TextModel) -> CausalLMWindow:
    return CausalLMWindow(text_model.model)


def test_a_batch_answers_what_generate_answers_each_question(
    text_model: TextModel, prompts: list[torch.Tensor], window: CausalLMWindow
) -> None:
    assert len({len(prompt) for prompt in prompts}) > 1  # rows of different lengths
    answers = set()
    for side in SIDES:
        methods = side.make(66)
        tokens, _ = answer(window, prompts, methods, text_model.ends, max_new_tokens=N_NEW)
        alone = []
        slots = {"kv_cache": methods.kv_cache, "attention": methods.attention}
        with mmaccel.attach(text_model.model, "autoregressive", strict=True, **slots):
            for prompt in prompts:
                made = text_model.model.generate(
                    prompt[None], max_new_tokens=N_NEW, do_sample=False
                )
                alone += text_model.decode(made[:, len(prompt) :])
        assert text_model.decode(tokens) == alone
        answers.add(tuple(alone))
    assert len(answers) > 2  # methods matter


def test_entries_and_bytes_by_hand(prompts: list[torch.Tensor], window: CausalLMWindow) -> None:
    cut = [prompt[:n] for prompt, n in zip(prompts, (31, 41), strict=False)]
    an_entry = 2 * 3 * 2 * 16 * 4  # keys and values of three layers, two heads of 16, float32
    # without an end all passes run: room for the prompt, what follows, and scratch
    whole = 41 + N_NEW + 2
    for side, budget in ((SIDES[0], None), (make_side(RECENT, 0.25), 10), (SIDES[3], None)):
        _, cost = answer(window, cut, side.make(40), [], max_new_tokens=N_NEW)
        assert cost["pass_seconds"] > 0 and cost["prefill_seconds"] > 0
        if budget is None:
            assert cost["kept"] == 1.0 and cost["bytes"] == whole * an_entry
        else:
            assert cost["kept"] == pytest.approx(2 * budget / (31 + 41))
            assert cost["bytes"] == (whole - (31 - budget)) * an_entry


def test_blocks_that_were_read_by_hand(prompts: list[torch.Tensor], window: CausalLMWindow) -> None:
    cut = [prompt[:n] for prompt, n in zip(prompts, (31, 41), strict=False)]

    def share(attention: Any) -> float | None:
        methods = LayerMethods(attention=attention)
        return answer(window, cut, methods, [], max_new_tokens=N_NEW)[1]["blocks"]

    n_read = n_blocks = 0
    for length in (31, 41):
        for k in range(N_NEW - 1):  # the first token comes from the prompt
            last = length + k  # the query's cache index
            blocks = range(last // 4 + 1)
            near = [b for b in blocks if b == 0 or b >= max(last - 8 + 1, 0) // 4]
            n_blocks += 3 * len(blocks)
            n_read += len(blocks) + 2 * len(near)  # the first layer reads everything
    local = {"block": 4, "first_layer": 1}
    found = share(mmaccel.LocalWindow(window=8, sinks=4, **local))
    assert found == pytest.approx(n_read / n_blocks)
    assert share(mmaccel.LocalWindow(window=99, **local)) == 1.0 and share(None) is None
    choosing = {"stride": 2, "block": 4, "first_layer": 0}
    assert share(mmaccel.XAttention(threshold=1, **choosing)) == 1.0
    some = share(mmaccel.XAttention(threshold=0.3, **choosing))
    assert some is not None and 0 < some < 1


def test_answers_end_with_the_last_row(
    text_model: TextModel, prompts: list[torch.Tensor], window: CausalLMWindow
) -> None:
    every = list(range(400))
    tokens, _ = answer(window, prompts[:1], SIDES[0].make(1), every, max_new_tokens=N_NEW)
    assert tokens.shape == (1, 1)
    row = torch.tensor([[7, EOS, 9], [EOS, 8, 9], [9, 8, 7]])
    assert [len(text.split()) for text in text_model.decode(row)] == [1, 0, 3]


def test_methods_and_the_sides_that_a_model_takes(text_model: TextModel) -> None:
    every = parse_methods([])
    assert {name for _, name, _ in every} == {*METHODS["kv_cache"], *METHODS["attention"]}
    assert RECENT in every
    *controls, quest = parse_methods(["quest:block=8"])
    assert quest == ("attention", "quest", {"block": "8"}) and takes_budget(quest)
    assert [name for _, name, _ in controls] == [CHANCE, "streaming-llm"]
    fixed = ("kv_cache", "snapkv", {"budget": 64})
    assert not takes_budget(fixed)
    assert make_side(fixed).make(999).kv_cache == mmaccel.SnapKV(budget=64)
    assert make_side(QUEST, 0.3).make(999).attention == make(
        "attention", "quest", budget=0.3, **QUEST[2]
    )
    with pytest.raises(OptionError, match="--methods: .*received 'quest2'.*quest"):
        parse_methods(["quest2"])

    # at an eighth of 64 tokens no observation window of 32 is left
    wanted = text_model.list_sides(["snapkv"], [0.9, 0.125])
    own = [side for side in wanted if side.name == "snapkv"]
    sides, left_out = try_sides(text_model, own, 64)
    assert [side.key for side in sides] == ["full cache", "snapkv at 0.9"]
    assert "budget: expected" in left_out["snapkv at 0.125"]
    with pytest.raises(UnsupportedModelError, match="takes a method"):
        try_sides(text_model, own[1:], 64)


def test_other_weights_and_other_models(tmp_path: Path) -> None:
    opened = open_model(str(save_recall(tmp_path / "own")), "cpu", torch.float32)
    assert opened.is_demo and opened.ends == [EOS]
    asked = [Question("a", "f0 f1", "f2"), Question("a", "f0", "f2")]
    assert opened.look_at(asked, 253)["prompt_tokens"] == [2, 3]
    with pytest.raises(UnsupportedModelError, match="expected 2 to 2 tokens"):
        opened.look_at(asked, 254)
    with pytest.raises(OptionError, match="scenes-vqa, which answers .* give recall, or run"):
        open_model("scenes-vqa", "cpu", torch.float32)


@pytest.mark.slow
def test_a_whole_run(tmp_path: Path, capsys: Any) -> None:
    folder, file = save_recall(tmp_path / "own"), tmp_path / "r.json"
    methods = "snapkv:window=4,h2o,x-attention:block=4:stride=2:first_layer=0"
    more = f"--methods {methods} --budgets 0.5 --questions 2 --length 64 --batch 2".split()
    command = ["evaluate", "cache", str(folder), *more, "--json", str(file)]
    assert main(command) == 0
    report = json.loads(file.read_text())
    keys = [row["side"] for row in report["cache_sides"]]
    assert keys[0] == "full cache" and "h2o at 0.5" in keys and report["left_out"] == {}
    assert set(report["cache_sides"][1]) >= {"slot", "method", "budget", "kept", "bytes", "blocks"}
    assert f"{report['questions']} questions of" in capsys.readouterr().out


@pytest.mark.slow
def test_the_suite_asks_what_its_texts_say() -> None:
    asked = draw_suite(12)
    assert draw_suite(12) == asked and len(asked) == 12 * len(TASKS)
    facts = sorted((q for q in asked if q.kind == "fact"), key=lambda q: q.text.find(q.answer))
    places = [q.text.find(q.answer) / len(q.text) for q in facts]
    assert places[0] < 0.15 and places[-1] > 0.8  # at all depths
    for question in asked:
        assert 4_000 < len(question.text) < 24_000
        text = question.text.rpartition("\n\n")[0]
        assert question.answer in " ".join(text.split())
        assert question.is_right(f" {question.answer}.\nAnd so on")
