"""The masked models in training: the warm start, fixed masks, resuming, the shipped folders."""

import json
import math
from pathlib import Path

import pytest
import torch

from mmaccel.demo.grammar.tasks import MASK
from mmaccel.demo.scenes.data import CaptionWords
from mmaccel.errors import OptionError
from scripts.training import export, scenes, scenes_masked
from scripts.training.cards import write_masked_card
from scripts.training.export import (
    export_grammar,
    export_grammar_card,
    export_masked,
    export_masked_card,
    masked_commands,
)
from scripts.training.generator import GeneratorTraining, save_half, train_generator
from scripts.training.grammar_masked import Grammar
from scripts.training.scenes_masked import MaskedScenes, build_masked, grow


def test_the_warm_start_keeps_every_weight_and_adds_the_mask(work: Path) -> None:
    words = CaptionWords(15)
    torch.manual_seed(7)
    trained = scenes.build_generator(words)
    save_half(trained, work / "trained")
    model = MaskedScenes(work, shift=1).build(str(work / "trained"))
    assert model.config.vocab_size == words.vocab_size + 1
    assert (model.config.mask_token_id, model.config.logit_shift) == (words.vocab_size, 1)
    new = model.state_dict()
    for name, value in trained.state_dict().items():
        value = value.half().float()
        assert torch.equal(new[name][: len(value)], value)
        if len(new[name]) > len(value):
            assert torch.allclose(new[name][-1], value.mean(0))
    masked = build_masked(words, 1).state_dict()
    again = grow(masked, words.vocab_size)
    assert all(torch.equal(again[name], value) for name, value in masked.items())


def test_validation_masks_are_fixed_and_a_share_is_what_it_says(work: Path) -> None:
    task = MaskedScenes(work, shift=0)
    model = task.build(None)
    shown: list[int] = []
    forward = model.model.forward

    def count(input_ids: torch.Tensor, **options: object) -> object:
        shown.append(int((input_ids == task.mask_id).sum()) // len(input_ids))
        return forward(input_ids=input_ids, **options)

    model.model.forward = count
    first = task.at_share(model, "cpu", 0.3)
    assert shown == [77] * 10 and task.at_share(model, "cpu", 0.3) == first
    shown.clear()
    assert task.validate(model, "cpu") == task.validate(model, "cpu")
    assert shown == [*shown[:10]] * 2 and 123 < sum(shown[:10]) / 10 < 134


def test_the_loss_falls_on_a_batch_that_can_be_learnt(work: Path) -> None:
    task = Grammar(checks=100)
    model = task.build(None)
    ids, labels = task.batch(0, 8)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        loss = task.loss(model, ids, labels, 0)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert losses[0] > 3.5 and losses[-1] < 1.5


def test_a_stopped_masked_run_goes_on_as_if_it_had_not_stopped(work: Path) -> None:
    plan = dict(fall=1, batch=4, warmup=1, snapshots=())
    whole, parts = work / "whole", work / "parts"
    for folder, stops in ((whole, (4,)), (parts, (2, 4))):
        folder.mkdir()
        for last in stops:
            # the step size must not depend on where a run was stopped
            fixed = GeneratorTraining(steps=last, **(plan | {"fall": 0}))  # type: ignore[arg-type]
            train_generator(folder, Grammar(checks=100), fixed)
    states = [torch.load(f / "generator.pt", weights_only=True) for f in (whole, parts)]
    assert states[0]["step"] == states[1]["step"] == 4
    for kind in ("model", "average"):
        for name, value in states[0][kind].items():
            assert torch.equal(value, states[1][kind][name])
    assert masked_commands(parts, "grammar").splitlines() == [
        "python scripts/train_demo.py grammar --steps 2 --fall 0 --batch 4 --power 1",
        "python scripts/train_demo.py grammar --steps 4 --fall 0 --batch 4 --power 1"
        "  # from step 2",
        "python scripts/train_demo.py grammar-export",
        "python scripts/train_demo.py grammar-card",
    ]


def test_the_shipped_folder_of_scenes_masked_says_what_is_masked(work: Path) -> None:
    with pytest.raises(OptionError, match="Train it first"):
        export_masked(work, work / "out", work / "scenes")
    (work / "scenes").mkdir()
    (work / "scenes" / "words.json").write_text(json.dumps({"words": ["a"], "pad": 17}))
    save_half(build_masked(CaptionWords(15), 1), work / "generator")
    export_masked(work, work / "out", work / "scenes")
    words = json.loads((work / "out" / "words.json").read_text())
    assert words == {
        "words": ["a"], "pad": 17, "mask": CaptionWords(15).vocab_size, "logit_shift": 1,
        "picture_tokenizer": "scenes",
    }  # fmt: skip
    assert {f.name for f in (work / "out").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "words.json",
    }  # fmt: skip


def test_the_masked_card_holds_measured_figures(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "MASKED_ORDERS", (("random", 64),))
    monkeypatch.setattr(scenes_masked, "SHARES", (1.0,))
    plan = GeneratorTraining(steps=1, fall=1, batch=4, snapshots=(), rate=0, rate_rest=0)
    train_generator(work, MaskedScenes(work, shift=0, power=0.0), plan)
    (work / "words.json").write_text("{}")
    export_masked(work, work / "out", work)
    card = export_masked_card(work, work / "out", count=2)
    assert (card["logit_shift"], card["power"]) == (0, 0.0)
    # weights of scale 0.02 know next to nothing of which id it is
    flat = math.log(card["mask_token_id"] + 1)
    assert card["generator"]["validation_nats_per_token"] == pytest.approx(flat, abs=0.05)
    assert card["generator"]["bits_per_hidden_token"]["1.0"] == pytest.approx(
        flat / math.log(2), abs=0.07
    )
    assert card["samples"][0]["passes"] == 4
    text = (work / "out" / "README.md").read_text()
    assert text == write_masked_card(json.loads((work / "out" / "card.json").read_text()))
    assert "i - 0" in text and "Hidden tokens weigh the same" in text


def test_the_grammar_card_holds_measured_figures(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "DECODED", (("confidence", 8),))
    monkeypatch.setattr(export, "_DISTRIBUTION_PROMPTS", 1)
    plan = GeneratorTraining(steps=1, fall=1, batch=4, snapshots=())
    train_generator(work, Grammar(checks=100), plan)
    export_grammar(work, work / "out")
    card = export_grammar_card(work, work / "out", count=2)
    assert json.loads((work / "out" / "card.json").read_text()) == card
    assert card["answers"][0]["copy"] == 0 and card["laws"][0]["replace"] > 0.9
    text = (work / "out" / "README.md").read_text()
    assert str(card["generator"]["validation_nats_per_slot"]) in text
    assert json.loads((work / "out" / "words.json").read_text())["mask"] == MASK
