"""Every model that ships is trained, goes on, and is written by the command, tiny."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.canvas import GrammarText
from mmaccel import MaskedParallel, TextToImage, TextToSpeech, TextToVideo, load_demo
from mmaccel.demo.voices.stacked import open_stacked
from scripts.training import (
    grammar,
    next_scale,
    recall,
    scenes,
    stdlib,
    verdicts,
    voices,
    voices_masked,
    vqa,
    vqa_tower,
)
from scripts.training.__main__ import main
from scripts.training.card import write_card
from scripts.training.models import MODELS
from scripts.training.stdlib import Module, open_stdlib
from scripts.training.voices_words import SPEAKERS, WORDS, make_sentence
from tests.fixtures.voices import TINY_CODEC

pytestmark = pytest.mark.slow

SMALL = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
TOKENIZER = {
    "size": 64, "levels": [5, 3], "encoder_width": 8, "encoder_depth": 0, "decoder_width": 8,
    "decoder_depth": 0, "fine_width": 8, "fine_depth": 0,
}  # fmt: skip
TEXTS = ["def f(x):\n    return x + 1\n" * 30, "class A:\n    value = 3\n" * 30]


def write_pool(folder: Path, name: str, seed: int, count: int = 24) -> None:
    """A pool of noise, as `open_pool` keeps it."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(6_000, 12_000, size=count)
    rng.normal(scale=2000, size=lengths.sum()).astype(np.int16).tofile(folder / f"{name}.sound")
    made = {
        "ends": lengths.cumsum().tolist(),
        "sentences": [make_sentence(seed, k) for k in range(count)],
        "speakers": rng.integers(len(SPEAKERS), size=count).tolist(),
        "lexicon": {word: ["'", *word[:3]] for word in WORDS},
    }
    (folder / f"{name}.json").write_text(json.dumps(made), encoding="utf-8")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """All models have one narrow layer, and little to validate on."""
    for module in (grammar, recall, stdlib, vqa, vqa_tower):
        monkeypatch.setattr(module, "SIZES", SMALL)
    for kind, patch in ((scenes.STILLS, {}), (scenes.CLIPS, {"patch": 8})):
        for sizes, small in ((kind.llama, SMALL), (kind.tokenizer, TOKENIZER | patch)):
            monkeypatch.setattr(scenes, "_CHECKED", 4)
            monkeypatch.setattr(scenes, "_CHECK_BATCH", 2)
            for name, value in small.items():
                monkeypatch.setitem(sizes, name, value)
    for name, value in {**TINY_CODEC, "books": 4}.items():
        monkeypatch.setitem(voices.CODEC, name, value)
    monkeypatch.setattr(voices, "FLAT", {**SMALL, "max_position_embeddings": 512})
    heads = {**SMALL, "num_key_value_heads": 2}
    monkeypatch.setattr(voices, "TEMPORAL", {**heads, "max_position_embeddings": 160})
    monkeypatch.setattr(voices, "DEPTH", heads)
    for name in ("encoder_width", "decoder_width", "fine_width"):
        monkeypatch.setitem(next_scale.TOKENIZER, name, 8)
    for name, value in {"width": 24, "depth": 1, "hidden": 16}.items():
        monkeypatch.setitem(next_scale.NETWORK, name, value)
    monkeypatch.setattr(recall, "LENGTHS", dict.fromkeys(recall.LENGTHS, (64, 80)))
    monkeypatch.setattr(recall, "CHECKED", dict.fromkeys(recall.LENGTHS, (64,)))
    modules = [Module(name, TEXTS[k % 2]) for k, name in enumerate(("a.py", "b.py", "c.py"))]
    monkeypatch.setattr(stdlib, "read_modules", lambda: modules)
    monkeypatch.setattr(Module, "is_held_out", property(lambda self: self.name == "b.py"))
    for method, checks in (("Tower", 2), ("Answers", 2)):
        kind = {"Tower": vqa_tower.Tower, "Answers": vqa.Answers}[method]
        defaults = kind.__init__.__defaults__
        monkeypatch.setattr(kind.__init__, "__defaults__", (*defaults[:-1], checks))
    monkeypatch.setattr(voices_masked, "LLM", {**heads, "head_dim": 8})
    for kind in (voices.Flat, voices.Depth, voices_masked.MaskedSpeech):
        monkeypatch.setattr(kind.__init__, "__defaults__", (20,))


def draw(folder: Path, n_tokens: int = 256) -> None:
    made = TextToImage.from_pretrained(folder)("a red circle", seed=0)
    assert made.tokens.shape == (1, n_tokens)


def draw_by_scale(folder: Path) -> None:
    """Also writes the checker's verdicts into the card."""
    draw(folder, 204)
    verdicts.main([str(folder), "--count", "2", "--held-out", "2", "--guidance", "2"])
    card = json.loads((folder / "card.json").read_text())
    (sample,) = card["samples"]
    assert (sample["passes"], sample["captions"], sample["policy"]) == (8, 2, "NextScale()")
    assert card["tokenizer"]["checker_on_pictures"]["background"] == 1
    assert "| `NextScale()`, 8 passes, guidance 2 | 2 |" in write_card(card)


def move(folder: Path) -> None:
    made = TextToVideo.from_pretrained(folder)("a red circle rests", seed=0)
    assert made[0].frames.shape == (10, 64, 64, 3)


def read_grammar(folder: Path) -> None:
    assert GrammarText(folder).model.vocab_size == grammar.MASK


def answer(folder: Path) -> None:
    model, processor = load_demo("scenes-vqa", folder)
    image = torch.zeros(3, 80, 80, dtype=torch.uint8)
    inputs = processor(images=[image], text=["<image> what?"], return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=2, eos_token_id=None).shape[1] == 525


def complete(name: str) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        open_model = {"recall": partial(load_demo, "recall"), "stdlib": open_stdlib}[name]
        model, tokenizer = open_model(folder)
        inputs = tokenizer("k17" if name == "recall" else TEXTS[0], return_tensors="pt")
        assert model(**inputs).logits.shape[-1] >= len(tokenizer) > max(inputs["input_ids"][0])

    return run


def speak(folder: Path) -> None:
    made = TextToSpeech.from_pretrained(folder)(
        ["red circle"] * 4, seed=[*range(4)], max_seconds=0.1
    )
    assert any(len(spoken.waveform) for spoken in made.utterances)
    frames = open_stacked(folder).generate("red circle", max_seconds=0.4)
    assert frames.shape[1] == 16


def fill(folder: Path) -> None:
    (made,) = TextToSpeech.from_pretrained(folder)("red circle", policy=MaskedParallel(2))
    assert made.passes == 2 and len(made.waveform) == 160 * len(made.tokens)


RUNS: dict[str, tuple[int, Callable[[Path], None]]] = {  # items a step, and what opens the folder
    "scenes": (2, draw),
    "scenes-var": (2, draw_by_scale),
    "moving-scenes": (2, move),
    "grammar-masked": (4, read_grammar),
    "scenes-vqa": (2, answer),
    "recall": (128, complete("recall")),
    "stdlib": (2, complete("stdlib")),
    "voices": (2, speak),
    "voices-masked": (2, fill),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_command_trains_and_writes_a_folder_that_opens(
    tiny: None, name: str, tmp_path: Path
) -> None:
    batch, opens = RUNS[name]
    if name.startswith("voices"):
        for k, pool in enumerate(voices.POOLS):
            write_pool(tmp_path, pool, k)
    command = [name, "--work", str(tmp_path), "--target", str(tmp_path / "out")]
    plan = ["--device", "cpu", "--set", f"batch={batch}", "--set", "fall=1", "--set", "warmup=1"]
    main([*command, *plan, "--set", "steps=1", "--stage", list(MODELS[name].plans)[0]])
    assert not (tmp_path / "out").exists()
    main([*command, *plan, "--set", "steps=2"])
    opens(tmp_path / "out")
    if name == "recall":
        main([*command, *plan, "--set", "steps=2"])  # nothing is left to train
    card = json.loads((tmp_path / "out" / "card.json").read_text())
    assert {stage["step"] for stage in card["stages"].values()} == {2}
    assert card["parameters"] > 500 and len(card["commits"]) == 1
    text = (tmp_path / "out" / "README.md").read_text()
    assert text == write_card(card) and f"\n{card['command']}\n" in text
    assert f"| {list(card['stages'])[-1]} | 2 |" in text


def test_the_masked_model_begins_from_every_weight_of_scenes(tmp_path: Path) -> None:
    task: Any = MODELS["scenes-masked"].open("masked", tmp_path, "cpu")
    model = task.build(None)
    words = task.words.vocab_size
    assert (model.config.mask_token_id, model.config.logit_shift) == (words, 1)
    assert model.config.vocab_size == words + 1
    from transformers import AutoModelForCausalLM

    from mmaccel.catalog import DEMO_WEIGHTS

    start = AutoModelForCausalLM.from_pretrained(DEMO_WEIGHTS / "scenes").state_dict()
    for name, weight in model.state_dict().items():
        before = start[name].float()
        assert torch.equal(weight[: len(before)], before)
        if len(weight) > len(before):
            assert torch.allclose(weight[-1], before.mean(0))
