"""Training of `stdlib`: byte pairs, pieces, export, the n-gram of the card."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from mmaccel.demo.loading import load_demo
from mmaccel.demo.stdlib.modules import Module
from scripts.training import stdlib, stdlib_command, stdlib_export

TEXTS = ["def f(x):\n    return x + 1\n" * 8, "class A:\n    value = 3\n" * 8]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """One narrow layer over two modules, of which one is held out."""
    for name, size in (("WIDTH", 16), ("INNER", 16), ("DEPTH", 1), ("HEADS", 2), ("HEAD_WIDTH", 8)):
        monkeypatch.setattr(stdlib, name, size)
    names = ("a.py", "b.py", "c.py")
    monkeypatch.setattr(Module, "is_held_out", property(lambda self: self.name == "b.py"))
    modules = [Module(name, TEXTS[k % 2]) for k, name in enumerate(names)]
    for module in (stdlib, stdlib_export):
        monkeypatch.setattr(module, "read_modules", lambda: modules)


def test_the_commands_train_export_and_measure(tiny: None, tmp_path: Path) -> None:
    work = tmp_path / "work"
    target = tmp_path / "target"
    options = ["--work", str(work), "--target", str(target)]
    steps = ["--steps", "4", "--fall", "2", "--batch", "2", "--length", "16", "--device", "cpu"]
    stdlib_command.main("stdlib", [*options, *steps])
    stdlib_command.main("stdlib-export", options)
    stdlib_command.main("stdlib-card", options)
    card = json.loads((target / "card.json").read_text(encoding="utf-8"))
    assert card["modules"]["training"] == 2 and card["modules"]["held_out"] == 1
    assert card["training"]["steps"] == 4 and set(card["by_module"]) == {"b.py"}
    assert card["bits_a_byte"]["stdlib"] == pytest.approx(card["by_module"]["b.py"], abs=1e-4)
    model, tokenizer = load_demo("stdlib", target)
    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    assert model(ids).logits.shape == (1, ids.shape[1], stdlib.WORDS)


def test_pieces_are_the_same_whenever_asked(tiny: None, tmp_path: Path) -> None:
    stdlib.prepare(tmp_path)
    task = stdlib.Stdlib(tmp_path, 16, checks=2)
    ids, labels = task.batch(3, 5)
    again, _ = task.batch(3, 5)
    assert torch.equal(ids, again) and torch.equal(ids, labels) and ids.shape == (5, 16)
    assert not torch.equal(ids, task.batch(4, 5)[0])
    text = task.training.tolist()
    pieces = {tuple(text[k : k + 16]) for k in range(len(text) - 15)}
    assert {tuple(row) for row in ids.tolist()} <= pieces
    whole = stdlib_export.encode(_tokenizer(tmp_path), Module("b.py", TEXTS[1]))
    assert task.checks[0].tolist() == whole[:16] and len(task.checks) == 2


def test_an_n_gram_is_a_distribution_by_the_rule_of_witten_and_bell() -> None:
    ids = [5, 6, 5, 6, 5, 7]
    gram = stdlib_export.NGram([ids], 2)
    below = {word: (ids.count(word) + 3 / stdlib.WORDS) / (6 + 3) for word in range(8)}
    after_5 = {6: 2, 7: 1}
    for word in range(8):
        found = gram.probability([9, 5], word)
        assert found == pytest.approx((after_5.get(word, 0) + 2 * below[word]) / (3 + 2))
    total = sum(gram.probability([6, 5], word) for word in range(stdlib.WORDS))
    assert total == pytest.approx(1)
    one = -math.log2(gram.probability([5], 6)) - math.log2(gram.probability([5, 6], 5))
    assert gram.bits([5, 6, 5]) == pytest.approx(one)


def _tokenizer(work: Path):  # noqa: ANN202 - transformers' own type
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(work / "tokenizer")
