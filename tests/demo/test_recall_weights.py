"""The shipped weights of `recall` answer fresh questions as their card says."""

from __future__ import annotations

import json

import mmaccel
from mmaccel.demo.loading import WEIGHTS
from mmaccel.demo.recall.documents import list_questions
from mmaccel.demo.recall.words import TASKS, to_text
from scripts.training.recall_export import measure_answers

SEED = 39  # neither of training nor of the card
LENGTH = 1024


def test_answers_are_as_right_as_the_card_says() -> None:
    card = json.loads((WEIGHTS / "recall" / "card.json").read_text(encoding="utf-8"))
    model, tokenizer = mmaccel.load_demo("recall")
    assert card["parameters"] == sum(p.numel() for p in model.parameters())
    found = measure_answers(model, 8, LENGTH, SEED)
    said = card["right"][str(LENGTH)]
    for task in (*TASKS, "all"):
        assert found[task]["low"] <= said[task]["high"], task
        assert found[task]["high"] >= said[task]["low"], task
    document, question = next(iter(list_questions(1, 256, SEED)))
    text = to_text((*document.tokens[1:], *question.prompt))
    inputs = tokenizer(text, return_tensors="pt")
    made = model.generate(**inputs, max_new_tokens=10, do_sample=False)
    answer = tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == to_text(question.answer[:-1])


def test_the_weights_fit_the_package() -> None:
    files = list((WEIGHTS / "recall").iterdir())
    assert sum(file.stat().st_size for file in files) <= 6e6
    assert {"tokenizer.json", "config.json"} <= {file.name for file in files}
