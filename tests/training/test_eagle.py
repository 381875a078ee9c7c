"""Training of EAGLE heads: rounds against entries one by one, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.cli import main
from mmaccel.samplers.drafting.heads import eagle_training as eagle
from mmaccel.samplers.drafting.heads.eagle_model import FOLDER, EagleModel
from tests.fixtures.heads import LAYERS, make_head, open_head
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.tiny_recall import build_recall, save_recall

pytestmark = pytest.mark.slow

AHEAD = 3


@torch.no_grad()
def by_hand(model: Any, head: EagleModel, ids: Tensor) -> tuple[list[float], list[float]]:
    """As `measure_rounds`: every entry behind true states, and then its own, in a cache."""
    output = model(ids, output_hidden_states=True)
    features = torch.cat([output.hidden_states[layer] for layer in LAYERS], -1)
    entered = head.enter(features)
    losses: list[list[Tensor]] = [[] for _ in range(1 + AHEAD)]
    right: list[list[Tensor]] = [[] for _ in range(1 + AHEAD)]
    length = ids.shape[1] - 2
    for n_true in range(1, length + 1):  # entries behind true states
        cache = head.empty_cache(len(ids), length)
        cache = cache._replace(first=torch.zeros(len(ids), dtype=torch.long))
        columns = torch.arange(n_true).expand(len(ids), -1)
        states = head(ids[:, 1 : 1 + n_true], entered[:, :n_true], columns, cache)[:, -1:]
        for j in range(1 + AHEAD):
            t = n_true - 1 + j
            if t >= length:
                break
            if j:
                states = head(ids[:, 1 + t : 2 + t], states, torch.full((len(ids), 1), t), cache)
            wanted = output.logits[:, t + 1]
            found = head.logits(states)[:, 0].log_softmax(-1)
            target = wanted.softmax(-1)[:, head.targets]
            losses[j].append(-(target * found[:, head.targets]).sum(-1))
            right[j].append(found.argmax(-1) == wanted.argmax(-1))
    means = [float(torch.stack(each).mean()) for each in losses]
    return means, [float(torch.stack(each).float().mean()) for each in right]


def test_rounds_are_what_entries_one_by_one_are(tmp_path: Path) -> None:
    model = build_lm("llama")
    head = open_head(make_head(model, tmp_path, third=True, n_ids=17), model)
    ids = torch.randint(4, 40, (2, 11), generator=torch.Generator().manual_seed(0))
    losses, right = eagle.measure_rounds(model, head, ids, AHEAD)
    wanted_losses, wanted_right = by_hand(model, head, ids)
    assert losses.tolist() == pytest.approx(wanted_losses, rel=1e-4)
    assert right.tolist() == pytest.approx(wanted_right)


def test_a_mask_that_is_off_by_one_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = eagle._move
    monkeypatch.setattr(eagle, "_move", lambda x, n: own(x, n + 1))
    with pytest.raises(AssertionError):
        test_rounds_are_what_entries_one_by_one_are(tmp_path)


def _arguments(folder: Path, *more: str) -> list[str]:
    model = save_recall(folder / "model")
    words = mmaccel.load_demo("recall")[1].get_vocab()
    names = [word for word in words if not word.startswith("<")][:30]
    (folder / "texts.txt").write_text("\n".join(" ".join(names[k:]) for k in range(29)) + "\n")
    sizes = ["--length", "6", "--batch", "2", "--ahead", "2", "--layers", "0", "1", "2"]
    texts = ["--texts", str(folder / "texts.txt")]
    return ["train-head", str(model), str(folder / "head"), *texts, *sizes, *more]


def test_the_command_makes_a_head_that_drafts(tmp_path: Path) -> None:
    arguments = _arguments(tmp_path, "--draft-vocab", "20")
    for steps in ("2", "3"):  # the second goes on
        assert main([*arguments, "--steps", steps]) == 0
    card = json.loads((tmp_path / "head" / FOLDER.config).read_text(encoding="utf-8"))
    assert [line["step"] for line in card["curve"]] == [2, 3] and card["draft_vocab_size"] == 20
    model = build_recall()
    ids = torch.randint(4, 40, (2, 9))
    made = []
    for policy in (
        mmaccel.Autoregressive(),
        mmaccel.Jacobi(window=4, drafts=mmaccel.Eagle(str(tmp_path / "head"))),
    ):
        with mmaccel.attach(model, policy, strict=True):
            made.append(model.generate(ids, max_new_tokens=10, do_sample=False))
    assert torch.equal(*made)
