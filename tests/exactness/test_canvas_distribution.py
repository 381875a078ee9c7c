"""The distribution of canvas policies, enumerated on joints small enough for a table, and bugs
planted into canvas decoding, each of which these proofs must reject.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel.contracts import CanvasPass
from mmaccel.evaluation.exactness.reference_models import ReferenceDenoiser
from mmaccel.samplers.canvas import predictions
from mmaccel.samplers.canvas.confident_parallel import ConfidentParallel
from mmaccel.samplers.canvas.entropy_bounded import EntropyBounded
from mmaccel.samplers.canvas.layout import Columns
from mmaccel.samplers.canvas.masked_parallel import MaskedParallel
from mmaccel.samplers.canvas.model_pass import ModelPass
from mmaccel.samplers.canvas.orders import Order
from mmaccel.samplers.canvas.predictions import SlotPredictions
from mmaccel.samplers.canvas.revised_parallel import RevisedParallel
from mmaccel.samplers.canvas.selector import SelectorState
from mmaccel.samplers.canvas.state import Canvas
from mmaccel.samplers.canvas.stepwise import Stepwise
from tests.fixtures.canvas import decode
from tests.fixtures.canvas_paths import PolicyPaths, enumerate_paths
from tests.fixtures.joints import families

LENGTH, TOKENS = 4, 3
JOINTS = families(LENGTH, TOKENS)
ORDERS = ("confidence", "entropy", "margin", "left", "random", "halton")
Patch = pytest.MonkeyPatch


def enumerated(policy: object, joint: Tensor) -> PolicyPaths:
    paths = enumerate_paths(policy, ReferenceDenoiser(joint), LENGTH, TOKENS)
    assert float(paths.joint.sum()) == pytest.approx(1, abs=1e-9)
    return paths


def variation(one: Tensor, other: Tensor) -> float:
    return float((one - other / other.sum()).abs().sum() / 2)


def divergence(true: Tensor, other: Tensor) -> float:
    true = true / true.sum()
    return float(torch.where(true > 0, true * (true / other).log(), 0.0).sum())


def total_correlation(joint: Tensor, canvas: Tensor, chosen: Tensor) -> float:
    """Nats between the joint of chosen slots and the product of their marginals, at a canvas."""
    model = ReferenceDenoiser(joint)
    agrees = ((model.table == canvas) | (canvas < 0)).all(1)
    weight = agrees * model.joint.flatten()
    if not weight.sum():
        return 0.0  # an impossible canvas
    conditional = (weight / weight.sum()).view(joint.shape)
    together = conditional
    for slot in (~chosen).nonzero()[:, 0].tolist():
        together = together.sum(slot, keepdim=True)
    apart = torch.ones_like(together)
    for slot in chosen.nonzero()[:, 0].tolist():
        apart = apart * conditional.sum([i for i in range(LENGTH) if i != slot], keepdim=True)
    return divergence(together, apart)


@pytest.mark.parametrize("block", [None, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_one_slot_chosen_before_it_is_drawn_is_exact(order: str, block: int | None) -> None:
    for joint in JOINTS.values():
        found = enumerated(Stepwise(order, block), joint)
        assert not found.sees_draws and found.mean_passes == pytest.approx(LENGTH)
        assert variation(found.joint, joint) < 1e-9


@pytest.mark.slow
def test_one_slot_chosen_by_what_was_drawn_is_not_exact() -> None:
    every = [enumerated(Stepwise("sampled"), joint) for joint in JOINTS.values()]
    assert all(found.sees_draws for found in every)
    off = [
        variation(found.joint, joint) for found, joint in zip(every, JOINTS.values(), strict=True)
    ]
    assert sum(value > 0.05 for value in off) >= 4
    assert Stepwise("sampled").exactness == "relaxed" != Stepwise().exactness


@pytest.mark.parametrize("gamma", [0.0, 0.1, 1.5])
@pytest.mark.parametrize("name", JOINTS)
def test_no_step_diverges_by_more_than_gamma(name: str, gamma: float) -> None:
    found = enumerated(EntropyBounded(gamma), JOINTS[name])
    assert not found.sees_draws
    states = {
        (tuple(before.tolist()), tuple(chosen.tolist()))
        for befores, chosens in zip(found.before, found.chosen, strict=True)
        for before, chosen in zip(befores, chosens, strict=True)
        if chosen.any()
    }
    costs = [total_correlation(JOINTS[name], torch.tensor(b), torch.tensor(c)) for b, c in states]
    assert max(costs) <= gamma + 1e-6
    if gamma == 1.5:
        assert found.mean_passes < LENGTH  # it takes several slots at once


def test_total_correlation_by_example() -> None:
    chosen = torch.tensor([True, False, True, False])
    nothing = torch.full((LENGTH,), -1)
    assert total_correlation(JOINTS["copy pairs"], nothing, chosen) > 0.1
    assert total_correlation(JOINTS["independent"], nothing, chosen) < 1e-6


@pytest.mark.parametrize("nats", [0.0, 0.2, 3.0])
@pytest.mark.parametrize("name", JOINTS)
def test_no_sequence_diverges_by_more_than_its_budget(name: str, nats: float) -> None:
    found = enumerated(EntropyBounded(budget_nats=nats), JOINTS[name])
    assert float(found.nats.max()) <= nats + 1e-9
    assert divergence(JOINTS[name], found.joint) <= nats + 1e-6
    if nats == 0:  # below what two slots cost, unless they cost nothing
        assert variation(found.joint, JOINTS[name]) < 1e-9
    if nats == 3:
        assert found.mean_passes < LENGTH


def test_a_choice_after_the_draw_is_detected_and_not_exact() -> None:
    for policy in (MaskedParallel(None, choice=0.0), MaskedParallel(4, choice=1.0)):
        assert policy.exactness == "relaxed"
        for name in ("markov", "replace one"):
            found = enumerated(policy, JOINTS[name])
            assert found.sees_draws and variation(found.joint, JOINTS[name]) > 0.05
    assert MaskedParallel(None, choose="first").exactness == "distribution"
    assert MaskedParallel(None, choose="first", cache="dual").exactness == "relaxed"
    assert MaskedParallel(4, choose="first").exactness == "relaxed"


def test_confidence_rules_are_inexact_where_slots_depend_on_each_other() -> None:
    """Every slot is most likely unchanged, but one of them is changed."""
    joint = JOINTS["replace one"]
    bold = enumerated(ConfidentParallel(0.7), joint)
    assert variation(bold.joint, joint) > 0.3 and bold.mean_passes < 2
    assert variation(enumerated(EntropyBounded(0.1), joint).joint, joint) < 1e-9


def test_the_divergence_bound_charges_a_case_computed_by_hand() -> None:
    """Three slots at once: sum of their entropies less the largest; then one, for nothing."""
    lone = torch.tensor([[0.5, 0.5, 0.0], [0.9, 0.1, 0.0], [0.8, 0.1, 0.1], [0.4, 0.3, 0.3]])
    joint = torch.einsum("a,b,c,d->abcd", *lone.double())
    entropy = [0.693147, 0.325083, 0.639032, 1.088900]
    policy = EntropyBounded(sum(entropy[:3]) - max(entropy[:3]) + 1e-4)
    run = decode(policy, ReferenceDenoiser(joint), LENGTH, 5, noise=1)
    assert run.stats.passes == 2 and run.stats.accepted == [5, 0, 5]
    assert run.stats.nats == pytest.approx(5 * 0.964115, abs=1e-4)


# Bugs.

STEPWISE = Stepwise()


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
        self.is_left_alone &= bool((prompt == 0).all() and (given == 2).all())
        return super().forward(entries)


def canvas_is_left_alone() -> bool:
    """Prompt and given slots stay, mask tokens are never emitted, every pass commits."""
    joint = 0.1 / TOKENS**LENGTH + 0.9 * JOINTS["markov"]
    for policy in (Stepwise(), EntropyBounded(1.0), RevisedParallel(0.2, "edit", least=0.1)):
        counts = [0]

        def note(progress: Any, counts: list[int] = counts) -> None:
            counts.append(int(progress.is_committed.sum()))

        model = Watching(joint)
        run = decode(policy, model, LENGTH, 8, noise=4, layout=Given(), on_step=note)
        are_tokens = bool((run.tokens[:, 1] == 2).all() and (run.tokens < TOKENS).all())
        grown = [b - a for a, b in zip(counts, counts[1:], strict=False)]
        commits = min(grown) >= 1 or isinstance(policy, RevisedParallel)
        if not (model.is_left_alone and are_tokens and commits):
            return False
    return True


def distribution_is_the_models(policy: Any = STEPWISE) -> bool:
    for joint in JOINTS.values():
        paths = enumerated(policy, joint)
        if paths.sees_draws or not variation(paths.joint, joint) < 1e-9:
            return False
    return True


def budget_is_kept() -> bool:
    for joint in JOINTS.values():
        paths = enumerated(EntropyBounded(budget_nats=0.5), joint)
        if float(paths.nats.max()) > 0.5 + 1e-9 or divergence(joint, paths.joint) > 0.5 + 1e-6:
            return False
    return True


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


def test_the_canvas_is_left_alone() -> None:
    assert canvas_is_left_alone()


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
