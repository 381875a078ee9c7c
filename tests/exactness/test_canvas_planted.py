"""Bugs planted into canvas decoding; the proofs of this folder must reject each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel.contracts import CanvasPass, Prompt
from mmaccel.evaluation.exactness.reference_models import ReferenceDenoiser
from mmaccel.samplers.canvas import predictions
from mmaccel.samplers.canvas.entropy_bounded import EntropyBounded
from mmaccel.samplers.canvas.layout import Columns
from mmaccel.samplers.canvas.model_pass import ModelPass
from mmaccel.samplers.canvas.orders import Order
from mmaccel.samplers.canvas.predictions import SlotPredictions
from mmaccel.samplers.canvas.revised_parallel import RevisedParallel
from mmaccel.samplers.canvas.selector import SelectorState
from mmaccel.samplers.canvas.state import Canvas
from mmaccel.samplers.canvas.stepwise import Stepwise
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from tests.fixtures.canvas_paths import enumerate_paths
from tests.fixtures.joints import families

LENGTH, TOKENS, ROWS = 4, 3, 8
JOINTS = families(LENGTH, TOKENS)
Patch = pytest.MonkeyPatch
STEPWISE = Stepwise()


def distribution_is_the_models(policy: Any = STEPWISE) -> bool:
    for joint in JOINTS.values():
        found = enumerate_paths(policy, ReferenceDenoiser(joint), LENGTH, TOKENS)
        distance = float((found.joint - joint / joint.sum()).abs().sum())
        if found.sees_draws or not distance < 1e-9:
            return False
    return True


def budget_is_kept() -> bool:
    for joint in JOINTS.values():
        found = enumerate_paths(
            EntropyBounded(budget_nats=0.5), ReferenceDenoiser(joint), LENGTH, TOKENS
        )
        true = joint / joint.sum()
        terms = torch.where(true > 0, true * (true / found.joint).log(), 0.0)
        if not (float(found.nats.max()) <= 0.5 + 1e-9 and float(terms.sum()) <= 0.5 + 1e-6):
            return False
    return True


class Given:
    """A layout that forces slot 1."""

    columns = frame = 0

    def forced(self, slots: Tensor) -> Tensor:
        return torch.where(slots == 1, 2, -1)

    def allowed(self, slots: Tensor) -> None:
        return None


class Watching(ReferenceDenoiser):
    """Records whether every pass had the prompt and the given slot unchanged."""

    is_left_alone = True

    def forward(self, entries: CanvasPass) -> Tensor:
        prompt, given = entries.tokens[:, 0], entries.tokens[:, 2]
        self.is_left_alone &= bool((prompt == 1).all() and (given == 2).all())
        return super().forward(entries)


def canvas_is_left_alone() -> bool:
    """Prompt and given slots stay, mask tokens are never emitted, every pass commits."""
    ones = torch.ones(ROWS, dtype=torch.int64)
    joint = 0.1 / TOKENS**LENGTH + 0.9 * JOINTS["markov"]
    for policy in (Stepwise(), EntropyBounded(1.0), RevisedParallel(0.2, "edit", least=0.1)):
        counts = [0]

        def note(progress: Any, counts: list[int] = counts) -> None:
            counts.append(int(progress.is_committed.sum()))

        prompt = Prompt(ones[:, None], ones, layout=Given())
        noise = Noise.from_seed(4, ROWS)
        model = Watching(joint)
        run = policy.sample(
            model, prompt, LENGTH, params=SamplingParams(), noise=noise, on_step=note
        )
        are_tokens = bool((run.tokens[:, 1] == 2).all() and (run.tokens < TOKENS).all())
        grown = [b - a for a, b in zip(counts, counts[1:], strict=False)]
        commits = min(grown) >= 1 or isinstance(policy, RevisedParallel)
        if not (model.is_left_alone and are_tokens and commits):
            return False
    return True


PROOFS = (distribution_is_the_models, budget_is_kept, canvas_is_left_alone)


def choose_by_what_was_drawn(patch: Patch) -> None:
    """Choose the slot of the most probable draw, as most releases do at a temperature."""
    rank = Order.rank

    def leaking(self: Order, seen: SlotPredictions) -> Tensor:
        if seen.chance is None:
            return rank(self, seen)
        return torch.where(seen.is_open, seen.chance, float("-inf"))

    patch.setattr(Order, "rank", leaking)


def leak_into_selectors(patch: Patch) -> None:
    """Selectors receive predictions with the draws, and one ranks by them."""
    patch.setattr(SlotPredictions, "sealed", lambda self: replace(self, entropy=-self.chance))


def commit_stale_logits(patch: Patch) -> None:
    """What is committed was drawn from the logits of the pass before."""
    forward, last = ModelPass.forward, {}

    def late(self: ModelPass, canvas: Canvas, copies: int) -> Any:
        seen, n = forward(self, canvas, copies)
        before = last.get(self, seen)
        last[self] = seen
        return replace(before, is_open=seen.is_open, slots=seen.slots), n

    patch.setattr(ModelPass, "forward", late)


def edit_the_prompt(patch: Patch) -> None:
    """Tokens of the canvas are written one column too far left."""
    tokens = Columns.tokens

    def shifted(self: Columns, canvases: Tensor) -> Tensor:
        rows = tokens(self, canvases)
        done = (canvases != TOKENS).all()
        return torch.cat([rows[..., 1:], rows[..., :1]], -1) if not done else rows

    patch.setattr(Columns, "tokens", shifted)


def edit_given_slots(patch: Patch) -> None:
    """Editing replaces given tokens too."""

    def replace_all(self: Canvas, chosen: Tensor, tokens: Tensor) -> None:
        self.tokens = torch.where(self.is_committed, (self.tokens + 1) % TOKENS, self.tokens)

    patch.setattr(Canvas, "replace", replace_all)


def emit_masks(patch: Patch) -> None:
    """The mask token can be drawn."""
    read = predictions.read_logits

    def unmasked(logits: Tensor, *args: Any, **options: Any) -> SlotPredictions:
        logits = logits.clone()
        logits[..., TOKENS] = logits[..., :TOKENS].amax(-1) + 1
        return read(logits, *args, **{**options, "mask_token": -1})

    patch.setattr("mmaccel.samplers.canvas.model_pass.read_logits", unmasked)


def overspend(patch: Patch) -> None:
    """A budget that forgets what earlier passes spent."""

    def forgotten(self: SelectorState) -> Tensor:
        return torch.zeros_like(self.run.bound.nats) - 1

    patch.setattr(SelectorState, "spent", property(forgotten))


@pytest.mark.parametrize("proof", PROOFS)
def test_proofs_accept_the_code_as_it_is(proof: Callable[[], bool]) -> None:
    assert proof()


@pytest.mark.parametrize(
    ("plant", "proof"),
    [
        (choose_by_what_was_drawn, distribution_is_the_models),
        (leak_into_selectors, lambda: distribution_is_the_models(EntropyBounded(0.0))),
        (commit_stale_logits, distribution_is_the_models),
        (edit_the_prompt, canvas_is_left_alone),
        (edit_given_slots, canvas_is_left_alone),
        (emit_masks, canvas_is_left_alone),
        (overspend, budget_is_kept),
    ],
    ids=lambda value: value.__name__,
)
def test_planted_bug_is_rejected(
    plant: Callable[[Patch], None], proof: Callable[[], bool], monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    assert not proof()
