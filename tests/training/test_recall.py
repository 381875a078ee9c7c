"""Training of `recall`: packed questions, positions that skip, three stages that go on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mmaccel.demo.loading import load_demo
from mmaccel.demo.recall.documents import TRAIN_SEED, make_document
from mmaccel.demo.recall.words import EOS, LETTER, PAD, TASKS, VALUE, WORDS
from scripts.training import recall, recall_export
from scripts.training.data import IGNORE
from scripts.training.generator import GeneratorTraining

DOCUMENTS = [make_document(7, k, 64 + 32 * (k % 2)) for k in range(4)]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """One narrow layer, short documents."""
    for name, size in (("WIDTH", 16), ("INNER", 16), ("DEPTH", 1), ("HEADS", 2), ("HEAD_WIDTH", 8)):
        monkeypatch.setattr(recall, name, size)
    monkeypatch.setattr(recall, "LENGTHS", dict.fromkeys(recall.STAGES, (64, 80)))
    monkeypatch.setattr(recall, "CHECKED", dict.fromkeys(recall.STAGES, (64,)))
    monkeypatch.setattr(recall_export, "LENGTHS_MEASURED", (64,))


def test_labels_are_the_answers() -> None:
    packed = recall.pack(DOCUMENTS)
    for b, document in enumerate(DOCUMENTS):
        ids = packed.ids[b][packed.ids[b] != PAD].tolist()
        n = len(document.tokens)
        assert tuple(ids[:n]) == document.tokens and packed.lengths[b] == n
        assert (packed.labels[b, :n] == IGNORE).all()
        answers = [token for question in document.questions for token in question.answer]
        assert packed.labels[b][packed.labels[b] != IGNORE].tolist() == answers
        first = packed.tasks[b] >= 0
        assert packed.tasks[b][first].tolist() == [TASKS.index(q.task) for q in document.questions]
        assert packed.ids[b][first].tolist() == [q.answer[0] for q in document.questions]


def test_positions_skip_between_statements_alone() -> None:
    packed = recall.pack(DOCUMENTS)
    positions = recall.skip_positions(packed, np.random.default_rng(3))
    assert positions.shape == packed.ids.shape and (positions[:, 0] == 0).all()
    assert int(positions.max()) < recall.LONGEST
    steps = positions.diff(dim=1)
    assert (steps >= 1).all()
    for b, document in enumerate(DOCUMENTS):
        jumps = (torch.nonzero(steps[b] > 1)[:, 0] + 1).tolist()
        assert 2 < len(jumps) <= 8 and max(jumps) <= len(document.tokens)
        after = packed.ids[b, jumps]
        assert not ((after >= VALUE) & (after < LETTER + 64)).any()  # values, then letters


def test_batches_are_the_same_whenever_asked() -> None:
    task = recall.Recall("short", checks=1)
    ids, labels = task.batch(3, 512)
    again, _ = task.batch(3, 512)
    assert torch.equal(ids, again) and ids.shape[1] == 2 and ids.shape[::2] == labels.shape
    other, _ = task.batch(4, 512)
    assert other.shape != ids.shape or not torch.equal(other, ids)
    first = recall.pack([make_document(TRAIN_SEED, 3000, 64)]).ids
    lengths = {task.batch(step, 256)[0].shape for step in range(6)}
    assert len(lengths) > 1 and first.shape[0] == 1


def test_an_answer_is_right_in_every_token(tiny: None) -> None:
    packed = recall.pack(DOCUMENTS[:2])
    model = recall.build_model().eval()
    with torch.no_grad():
        _, right = recall.measure(model, packed)
        positions = torch.arange(packed.ids.shape[1]).expand(packed.ids.shape)
        wrong = {task: [] for task in TASKS}
        logits = model(packed.ids, attention_mask=torch.ones_like(packed.ids)).logits.argmax(-1)
    assert positions.shape == packed.ids.shape
    for b, document in enumerate(DOCUMENTS[:2]):
        at = len(document.tokens)
        for question in document.questions:
            at += len(question.prompt)
            given = logits[b, at - 1 : at - 1 + len(question.answer)].tolist()
            wrong[question.task].append(given == list(question.answer))
            at += len(question.answer)
    assert right == {task: found for task, found in wrong.items()}


def test_three_stages_go_on_where_they_were_stopped(tiny: None, tmp_path: Path) -> None:
    plan = GeneratorTraining(steps=3, fall=1, batch=128, warmup=1, snapshots=(), mixed=False)
    plans = dict.fromkeys(recall.STAGES, plan)
    recall.train_recall(tmp_path / "run", plans)
    state = {
        stage: torch.load(tmp_path / "run" / stage / "generator.pt", weights_only=True)
        for stage in recall.STAGES
    }
    assert all(found["step"] == 3 for found in state.values())
    log = (tmp_path / "run" / "long" / "generator.jsonl").read_text().splitlines()
    assert json.loads(log[0])["plan"]["start"] == str(tmp_path / "run" / "middle")
    last = json.loads(log[-1])
    assert {"validation", "64", *(f"64 {task}" for task in TASKS)} <= last.keys()
    recall.train_recall(tmp_path / "run", plans)  # nothing is left
    recall_export.export_recall(tmp_path / "run", tmp_path / "out")
    model, tokenizer = load_demo("recall", tmp_path / "out")
    average = state["long"]["average"]
    assert len(tokenizer) == len(WORDS) and model.generation_config.eos_token_id == EOS
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, average[name].half().float()), name
    card = recall_export.export_recall_card(tmp_path / "run", tmp_path / "out", 1, ["A note."])
    assert card["right"]["64"]["all"]["questions"] == 4
    assert "A note." in (tmp_path / "out" / "README.md").read_text()
