"""Training of `scenes-vqa`: labels of patches, packed questions, three stages that go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel.demo.loading import load_demo
from mmaccel.demo.scenes_vqa.data import TRAIN_SEED, make_examples
from mmaccel.demo.scenes_vqa.processor import EOS, make_processor
from mmaccel.demo.scenes_vqa.questions import Question
from mmaccel.demo.scenes_vqa.views import split_views
from scripts.training import vqa, vqa_export, vqa_tower
from scripts.training.data import IGNORE
from scripts.training.generator import GeneratorTraining
from scripts.training.prefetch import Prefetcher
from scripts.training.vqa_tower import LABELS, UNSAID, label_patches, pairs_shown

EXAMPLES = make_examples(7, range(4), per_kind=2)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """One narrow layer everywhere."""
    for module in (vqa, vqa_tower):
        for name, size in (("WIDTH", 16), ("INNER", 16), ("DEPTH", 1), ("HEADS", 2)):
            monkeypatch.setattr(module, name, size)


def test_labels_say_what_patches_show() -> None:
    labels = dict(
        zip(LABELS, label_patches(EXAMPLES.scenes, EXAMPLES.maps).unbind(-1), strict=True)
    )
    for b, scene in enumerate(EXAMPLES.scenes):
        for k, thing in enumerate(scene.things):
            column, row = int(thing.x // 4), int(thing.y // 4)
            tile = 1 + 2 * (row // 10) + column // 10
            patch = 10 * (row % 10) + column % 10
            for view, at in ((tile, patch), (0, 10 * int(thing.y // 8) + int(thing.x // 8))):
                if thing.shape == "ring":  # its centre shows the ground
                    continue
                found = {name: int(values[b, view, at]) for name, values in labels.items()}
                assert found["colour"] == 1 + vqa_tower.COLOURS.index(thing.colour), k
                assert found["shape"] == 1 + vqa_tower.SHAPES.index(thing.shape)
                assert found["size"] == (thing.size == "large")
                dot = 0 if thing.dot is None else 1 + vqa_tower.COLOURS.index(thing.dot)
                assert found["dot"] == dot and found["tens"] == UNSAID and found["centre"] == 1
                side = 8 if view == 0 else 4
                x = (at % 10 + 0.5) * side + (0 if view == 0 else 40 * ((view - 1) % 2))
                assert x + found["right"] / 16 == pytest.approx(thing.x, abs=0.1)
        for sign in scene.signs:
            x, y = sign.x + 7, sign.y + 5
            view = 1 + 2 * (y // 40) + x // 40
            at = 10 * (y % 40 // 4) + x % 40 // 4
            digits = [int(labels[name][b, view, at]) for name in ("tens", "units")]
            assert digits == [*divmod(sign.number, 10)]
            assert int(labels["shape"][b, view, at]) == vqa_tower.SIGN_SHAPE
            assert int(labels["tens"][b, 0].max()) == UNSAID
    shown = pairs_shown(label_patches(EXAMPLES.scenes, EXAMPLES.maps)[:, 0])
    assert shown.sum(1).tolist() == [len(s.things) + len(s.signs) for s in EXAMPLES.scenes]


def test_patches_place_themselves_in_the_image_or_in_their_tile() -> None:
    reader = vqa_tower.TowerReader(vqa_tower.build_tower())
    with torch.no_grad():
        reader.places.weight.zero_(), reader.places.bias.zero_()
        wanted = -reader.place_error(torch.zeros(10, 101, vqa_tower.WIDTH))
    axis = [k - 4.5 for k in range(10)]
    grid = torch.tensor([[x, y] for y in axis for x in axis])
    none = torch.zeros_like(grid)
    for view, places in enumerate(wanted):
        own = [grid, none] if view % 5 == 0 else [none, grid]
        assert torch.equal(places, torch.cat(own, 1))
    torch.nn.init.constant_(reader.places.bias, 0.4)
    with torch.no_grad():
        error = reader.place_error(torch.zeros(5, 101, vqa_tower.WIDTH))
    assert torch.allclose(error, 0.4 * 5 - wanted[:5])


def test_packed_questions_are_answered_as_separate_prompts(tiny: None) -> None:
    torch.manual_seed(0)
    model = vqa.build_model().eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    packed = vqa.encode_questions(EXAMPLES.questions)
    with torch.no_grad():
        logits, labels = vqa.answer_logits(model, split_views(EXAMPLES.images), packed)
    processor: Any = make_processor()
    found, wanted = iter(logits), iter(labels.tolist())
    for image, questions in zip(EXAMPLES.images, EXAMPLES.questions, strict=True):
        for question in questions[:6]:
            text = f"<image> {question.text} {question.answer}"
            inputs = processor(images=[image], text=[text], return_tensors="pt")
            n_answer = len(processor.tokenizer(question.answer)["input_ids"]) - 1
            with torch.no_grad():
                alone = model(**inputs).logits[0, -n_answer - 1 :]
            ids = inputs["input_ids"][0, -n_answer:].tolist()
            assert [next(wanted) for _ in range(n_answer + 1)] == [*ids, EOS]
            assert torch.allclose(torch.stack([next(found) for _ in alone]), alone, atol=1e-4)
        for question in questions[6:]:
            for _ in range(len(processor.tokenizer(question.answer)["input_ids"])):
                next(found), next(wanted)
    assert next(found, None) is None


def test_packing_by_hand() -> None:
    questions = [[Question("sign", "what number?", "72"), Question("exists", "what?", "yes")]]
    ids, segments, labels = vqa.encode_questions(questions)[0].tolist()
    assert segments == [1] * 5 + [2] * 3
    assert labels == [IGNORE, IGNORE, ids[3], ids[4], EOS, IGNORE, ids[7], EOS]


def test_tokens_that_show_something_are_kept() -> None:
    kept = vqa.choose_tokens(EXAMPLES.maps, seed=0)
    assert torch.equal(kept, kept.sort(1).values) and kept.shape[1] < 300
    labels = label_patches(EXAMPLES.scenes, EXAMPLES.maps)[..., 1].flatten(1)
    labels = torch.cat([labels, labels.new_zeros(4, 1)], 1)[:, vqa.ORDER]
    for b in range(4):
        assert set((labels[b] > 0).nonzero()[:, 0].tolist()) <= set(kept[b].tolist())
    assert not torch.equal(vqa.choose_tokens(EXAMPLES.maps, seed=1), kept)
    everything = torch.arange(520).expand(4, -1)
    model = vqa.build_model().eval()
    packed = vqa.encode_questions(EXAMPLES.questions)
    views = split_views(EXAMPLES.images)
    with torch.no_grad():
        assert torch.equal(
            vqa.answer_logits(model, views, packed, everything)[0],
            vqa.answer_logits(model, views, packed)[0],
        )


def test_batches_of_other_processes_are_the_same() -> None:
    task = vqa.Answers(True, checks=2)
    source = Prefetcher(task, workers=1)
    for step in (3, 4, 9):
        for one, other in zip(source.batch(step, 2), task.batch(step, 2), strict=True):
            assert torch.equal(one, other)
    source.close()


def test_training_asks_where_each_object_lies_and_mostly_about_places() -> None:
    _, packed = vqa.Answers(False, checks=2).batch(0, 2)
    scenes = make_examples(TRAIN_SEED, range(2), 0).scenes
    asked = [int(packed[b, 1].max()) for b in range(2)]
    plain = make_examples(TRAIN_SEED, range(2), vqa.ASKED).questions
    assert asked == [len(p) + len(s.things) for p, s in zip(plain, scenes, strict=True)]
    places = vqa.ask_places(scenes[0])
    thing = scenes[0].things[0]
    column, row = int(places[0].answer[0]), int(places[0].answer[1])
    assert column * 8 <= thing.x < column * 8 + 8 and row * 8 <= thing.y < row * 8 + 8
    assert f"{thing.colour} {thing.shape}" in places[0].text
    kinds = [q.kind for q in plain[0]]
    assert kinds.count("relation") > kinds.count("colour")


def test_an_answer_is_right_up_to_its_end() -> None:
    right = [True, True, False, True, True, True]
    assert vqa.split_right(right, [5, EOS, 6, 7, EOS, EOS]) == [True, False, True]


def test_three_stages_go_on_and_are_exported(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vqa, "Tower", lambda: vqa_tower.Tower(checks=2))
    answers = vqa.Answers
    monkeypatch.setattr(vqa, "Answers", lambda full, **_: answers(full, checks=2))
    plan = GeneratorTraining(steps=2, fall=1, batch=2, warmup=1, snapshots=())
    plans = dict.fromkeys(vqa.STAGES, plan)
    vqa.train_vqa(tmp_path, plans)
    states = {s: torch.load(tmp_path / s / "generator.pt", weights_only=True) for s in vqa.STAGES}
    tower, language, full = (states[s]["average"] for s in vqa.STAGES)
    name = next(k for k in tower if k.endswith("patch_embedding.weight"))
    same = "model.vision_tower." + name.removeprefix("tower.")
    assert torch.equal(tower[name], language[same])  # frozen
    assert not torch.equal(full[same], language[same])
    plans["full"] = GeneratorTraining(steps=3, fall=1, batch=2, warmup=1, snapshots=())
    vqa.train_vqa(tmp_path, plans)
    log = (tmp_path / "full" / "generator.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log if "loss" in line] == [2, 3]
    target = tmp_path / "target"
    vqa_export.export_vqa(tmp_path, target)
    card = vqa_export.export_vqa_card(tmp_path, target, per_kind=1)
    assert card["right"]["all"]["questions"] == 10 and card["training"]["full"]["steps"] == 3
    assert "--full-steps 3" in card["command"]
    assert "| neighbour |" in (target / "README.md").read_text()
    model, _ = load_demo("scenes-vqa", target)
    state = torch.load(tmp_path / "full" / "generator.pt", weights_only=True)["average"]
    assert torch.allclose(model.state_dict()[same], state[same], atol=1e-3)
