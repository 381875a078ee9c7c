"""The loop: steps, Muon, resuming, batches of other processes, masks; cards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.training import card, grammar, loop
from scripts.training.grammar_tasks import MASK
from scripts.training.loop import IGNORE, Muon, Plan, pack, read_log, train
from scripts.training.masking import draw_counts, hide

pytestmark = pytest.mark.slow

PLAN = Plan(4, 0, 4, warmup=1)  # the step size does not depend on where a run was stopped


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> grammar.Grammar:
    """A tiny masked model."""
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    monkeypatch.setattr(grammar, "SIZES", sizes)
    return grammar.Grammar(checks=100)


def test_steps_of_muon_are_those_of_torch_but_for_its_precision() -> None:
    """Five steps move by 0.2 sqrt(6) 0.1 each; bfloat16 keeps eight bits of an update."""
    ends = []
    for kind in (torch.optim.Muon, Muon):
        rng = torch.manual_seed(0)
        shapes = ((6, 4), (4, 6), (6, 4))
        matrices = [torch.nn.Parameter(torch.randn(s, generator=rng)) for s in shapes]
        optimiser = kind(matrices, lr=0.1, weight_decay=0.5, adjust_lr_fn="match_rms_adamw")
        for _ in range(5):
            for matrix in matrices:
                matrix.grad = torch.randn(matrix.shape, generator=rng)
            optimiser.step()
        ends.append([matrix.detach() for matrix in matrices])
    for theirs, ours in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.03, rtol=0)


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(
    task: grammar.Grammar, tmp_path: Path
) -> None:
    for name, stops in (("whole", (4,)), ("parts", (2, 4))):
        for last in stops:
            train(tmp_path / name, task, replace(PLAN, steps=last))
    whole, parts = (
        torch.load(tmp_path / name / "state.pt", weights_only=True) for name in ("whole", "parts")
    )
    assert whole["step"] == parts["step"] == 4
    for kind in ("model", "average"):
        for name, value in whole[kind].items():
            assert torch.equal(value, parts[kind][name])
    train(tmp_path / "one", task, replace(PLAN, steps=1))
    one = torch.load(tmp_path / "one" / "state.pt", weights_only=True)
    torch.manual_seed(0)
    start = task.build(None).state_dict()
    for name, value in one["average"].items():
        torch.testing.assert_close(value, start[name].lerp(one["model"][name], 10 / 11))
    steps = [line["step"] for line in read_log(tmp_path / "parts") if "validation" in line]
    assert steps == [2, 4]


def test_worse_weights_are_not_kept_where_a_plan_keeps_the_best(
    task: grammar.Grammar, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "weights" / "model.safetensors"
    found, kept = iter((3.0, 4.0, 2.0)), []
    monkeypatch.setattr(task, "validate", lambda *_: {"validation": next(found)})
    for steps in (1, 2, 3):
        train(tmp_path, task, replace(PLAN, steps=steps, keeps_best=True))
        kept.append(file.read_bytes())
    assert kept[0] == kept[1] != kept[2]


def test_the_loss_falls_on_a_batch_that_can_be_learnt(
    task: grammar.Grammar, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = task.batch(0, 8)
    monkeypatch.setattr(task, "batch", lambda step, size: one)
    train(tmp_path, task, Plan(100, 50, 8, rate=0.02, rate_rest=0.02, warmup=5, average=0))
    losses = [line["loss"] for line in read_log(tmp_path) if "loss" in line]
    assert losses[0] > 1.5 * losses[1]


def test_batches_of_other_processes_are_the_same(task: grammar.Grammar) -> None:
    apart = loop._batches(task, replace(PLAN, workers=2), 1)
    for step, batch in enumerate(apart, 1):
        for one, other in zip(batch, task.batch(step, 4), strict=True):
            assert torch.equal(one, other)
    assert step == 3


def test_parts_are_packed_side_by_side() -> None:
    ids, labels = pack([[([5, 6], False), ([1], True)], [([7], False), ([2, 3, 4], True)]], 9)
    assert ids.tolist() == [[5, 6, 1, 9], [7, 2, 3, 4]]
    assert labels.tolist() == [[IGNORE, IGNORE, 1, IGNORE], [IGNORE, 2, 3, 4]]


def test_numbers_of_hidden_slots_are_even_and_their_choice_is_fair() -> None:
    rng = np.random.default_rng(0)
    assert sorted(draw_counts(rng, 7, 7)) == [1, 2, 3, 4, 5, 6, 7]
    for _ in range(20):  # four rows over 8 slots: one row for each pair of numbers
        assert sorted((draw_counts(rng, 4, 8) - 1) // 2) == [0, 1, 2, 3]
    slots = torch.tensor([[False, True, True, True, False], [False, False, True, True, True]])
    seen = torch.zeros(2, 5)
    for k in range(200):
        hidden = hide(slots, np.array([2, 1]), np.random.default_rng(k))
        assert hidden.sum(1).tolist() == [2, 1] and not bool((hidden & ~slots).any())
        seen += hidden
    assert bool((seen[0, 1:4] > 100).all()) and bool((seen[1, 2:] > 40).all())


def test_hidden_slots_alone_are_learnt_and_not_seen(task: grammar.Grammar) -> None:
    """By one pass over what is shown, without a mask over what stands behind a position."""
    model = task.build(None).eval()
    ids, labels = task.batch(0, 3)
    shown: list[dict[str, torch.Tensor]] = []
    hook = model.model.register_forward_pre_hook(
        lambda _, args, kwargs: shown.append(kwargs), with_kwargs=True
    )
    bound = task.bound(model, ids, labels, np.random.default_rng(1))
    hook.remove()
    hidden = shown[0]["input_ids"] == MASK
    assert torch.equal(shown[0]["input_ids"][~hidden], ids[~hidden])
    assert hidden.any(1).all() and not (hidden & (labels == IGNORE)).any()
    assert bool((shown[0]["attention_mask"][:, 0] == 0).any(1).equal(ids != 0))
    losses = []
    for row, own in zip(ids, hidden, strict=True):
        length = int((row != 0).sum())
        mask = torch.zeros(1, 1, length, length)
        given = row[:length].masked_fill(own[:length], MASK)[None]
        logs = model(given, attention_mask=mask).logits[0].log_softmax(-1)
        losses.append(-logs[own[:length], row[own]].mean())
    assert torch.allclose(bound, torch.stack(losses).mean(), atol=1e-5)


def test_a_page_of_a_card_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = "| a | b |\n| --- | --- |\n"
    page = f"# {{name}}\n\n## Right\n\n{table}each rows.x: | {{key}} | {{value:.1%}} |\n"
    page += f"| none | {{missing}} |\n\n## Empty\n\n{table}each other: | {{key}} |\n"
    (tmp_path / "m.md").write_text(page)
    (tmp_path / "every.md").write_text("\n## Last\n\nend\n")
    monkeypatch.setattr(card, "CARDS", tmp_path)
    made = card.write_card({"name": "m", "rows": {"x": {"p": 0.25, "q": 1}}})
    rows = "| p | 25.0% |\n| q | 100.0% |\n"
    assert made == f"# m\n\n## Right\n\n{table}{rows}\n## Last\n\nend\n"
