"""The shipped weights of `stdlib` predict held-out modules as their card says."""

from __future__ import annotations

import json

import pytest
import torch

import mmaccel
from mmaccel.demo.loading import WEIGHTS
from mmaccel.demo.stdlib.prompts import held_out_modules
from scripts.training.stdlib_export import measure_bits

CARD = json.loads((WEIGHTS / "stdlib" / "card.json").read_text(encoding="utf-8"))


def test_modules_take_the_bits_that_the_card_says() -> None:
    model, tokenizer = mmaccel.load_demo("stdlib")
    assert CARD["parameters"] == sum(p.numel() for p in model.parameters())
    modules = sorted(held_out_modules(shortest=4000), key=lambda module: len(module.text))
    for module in modules[:3]:
        found = measure_bits(model, tokenizer, [module])
        # another Python has other text in the same module
        assert found == pytest.approx(CARD["by_module"][module.name], rel=0.15), module.name


def test_the_card_beats_what_it_compares_with() -> None:
    bits = CARD["bits_a_byte"]
    assert bits["stdlib"] < 0.8 * min(bits["5-gram"], bits["gzip"], bits["xz"])


def test_pieces_of_a_long_module_count_every_token_once() -> None:
    model, tokenizer = mmaccel.load_demo("stdlib")
    module = min(held_out_modules(shortest=2000), key=lambda module: len(module.text))
    whole = measure_bits(model, tokenizer, [module])
    pieces = measure_bits(model, tokenizer, [module], longest=128)
    assert whole < pieces < 1.5 * whole
    with torch.no_grad():
        ids = torch.tensor([[*tokenizer(module.text)["input_ids"], tokenizer.eos_token_id]])
        nats = float(model(ids, labels=ids).loss) * (ids.shape[1] - 1)
    n_bytes = len(module.text.encode())
    assert whole == pytest.approx(nats / torch.tensor(2.0).log().item() / n_bytes, rel=1e-4)


def test_the_tokenizer_gives_back_the_text() -> None:
    _, tokenizer = mmaccel.load_demo("stdlib")
    text = "class A:\n    def f(self, x='ä'):\n\t\treturn x  # 日本\n"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:], clean_up_tokenization_spaces=False) == text
