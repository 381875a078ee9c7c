"""Training of the small feature networks, one cycle of AdamW that goes on where it was stopped, and
their cards."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.demo.features import Features
from scripts.training.cards import write_small_features_card
from scripts.training.export import this_machine, write_folder

_SAVED_EVERY = 20.0  # seconds of processor time
_LOGGED_EVERY = 50  # steps
_RISE = 0.1  # share of the steps in which the step size rises


@dataclass(frozen=True)
class FeatureFit:
    """How a network is trained.

    Attributes:
        steps: of the optimiser, in all.
        batch: items a step.
        rate: largest step size.
    """

    steps: int
    batch: int = 64
    rate: float = 3e-3

    def rate_at(self, step: int) -> float:
        """The step size of a step: it rises and falls to zero, both straight."""
        share = (step + 1) / self.steps
        return self.rate * min(share / _RISE, (1 - step / self.steps) / (1 - _RISE))


def fit(
    model: Features, fit: FeatureFit, measure_loss: Callable[[int], Tensor], work: Path, name: str
) -> None:
    """Trains, or goes on training.

    Args:
        model: changed in place.
        fit: how.
        measure_loss: the loss of a step's batch, a scalar; the same for the same step.
        work: receives `name.pt`, the state, and `name.jsonl`, the log.
        name: of the network.
    """
    work.mkdir(parents=True, exist_ok=True)
    state_file = work / f"{name}.pt"
    optimiser = torch.optim.AdamW(model.parameters(), fit.rate, weight_decay=0.01)
    step, seconds = 0, 0.0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        step, seconds = state["step"], state["seconds"]
    model.train()
    saved = began = time.process_time()
    total, counted = 0.0, 0
    while step < fit.steps:
        optimiser.param_groups[0]["lr"] = fit.rate_at(step)
        loss = measure_loss(step)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimiser.step()
        step += 1
        total += loss.item()
        counted += 1
        now = time.process_time()
        is_last = step == fit.steps
        if step % _LOGGED_EVERY == 0 or is_last:
            line = {"step": step, "loss": round(total / counted, 4), "items": step * fit.batch}
            line["seconds"] = round(seconds + now - began, 1)
            with (work / f"{name}.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")
            total, counted = 0.0, 0
        if is_last or now - saved > _SAVED_EVERY:
            saved = now
            state = {
                "model": model.state_dict(),
                "optimiser": optimiser.state_dict(),
                "step": step,
                "seconds": seconds + now - began,
            }
            torch.save(state, state_file.with_suffix(".partial"))
            state_file.with_suffix(".partial").replace(state_file)
    model.eval()


@dataclass(frozen=True)
class Measured:
    """Figures of a network.

    Attributes:
        name: of its folder.
        work: the folder of its training, in the commands of the card.
        count: unseen items of `right`.
        right: shares.
        compared: items on each side of `distances`.
        distances: by damage.
        notes: sentences of the card.
    """

    name: str
    work: str
    count: int
    right: dict[str, float]
    compared: int
    distances: dict[str, float]
    notes: tuple[str, ...] = ()


def export_card(
    measured: Measured, model: Features, log: Path, batch: int, target: Path
) -> dict[str, Any]:
    """Writes `card.json` and `README.md` next to the weights.

    Args:
        measured: the figures.
        model: the network.
        log: of `fit`.
        batch: items a step.
        target: holds the weights.

    Returns:
        The content of `card.json`.
    """
    last = json.loads(log.read_text(encoding="utf-8").splitlines()[-1])
    card: dict[str, Any] = {
        "name": measured.name,
        "command": "\n".join(
            f"python -m scripts.training {measured.name}{part} --work {measured.work}"
            for part in ("", "-card")
        ),
        "parameters": sum(p.numel() for p in model.parameters()),
        "count": measured.count,
        "right": measured.right,
        "compared": measured.compared,
        "distances": measured.distances,
        "training": {
            "steps": last["step"],
            "batch": batch,
            "minutes": round(last["seconds"] / 60, 1),
        },
        "notes": list(measured.notes),
        "measured_with": this_machine("cpu"),
    }
    write_folder(target, card, write_small_features_card(card))
    return card
