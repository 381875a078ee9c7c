"""The distribution of every canvas policy, enumerated on joints small enough for a table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmaccel.contracts import Prompt
from mmaccel.evaluation.exactness.reference_models import ReferenceDenoiser
from mmaccel.samplers.canvas.confident_parallel import ConfidentParallel
from mmaccel.samplers.canvas.entropy_bounded import EntropyBounded
from mmaccel.samplers.canvas.masked_parallel import MaskedParallel
from mmaccel.samplers.canvas.stepwise import Stepwise
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from tests.fixtures.canvas_paths import PolicyPaths, enumerate_paths
from tests.fixtures.joints import families

LENGTH, TOKENS = 4, 3
JOINTS = families(LENGTH, TOKENS)
ORDERS = ("confidence", "entropy", "margin", "left", "random", "halton")


def enumerated(policy: object, joint: Tensor) -> PolicyPaths:
    found = enumerate_paths(policy, ReferenceDenoiser(joint), LENGTH, TOKENS)
    assert float(found.joint.sum()) == pytest.approx(1, abs=1e-9)
    return found


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


def test_one_slot_chosen_by_what_was_drawn_is_not_exact() -> None:
    every = [enumerated(Stepwise("sampled"), joint) for joint in JOINTS.values()]
    assert all(found.sees_draws for found in every)
    off = [
        variation(found.joint, joint) for found, joint in zip(every, JOINTS.values(), strict=True)
    ]
    assert sum(value > 0.05 for value in off) >= 4
    assert Stepwise("sampled").exactness == "relaxed" != Stepwise().exactness


@pytest.mark.parametrize("gamma", [0.0, 0.1, 0.5, 1.5])
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


@pytest.mark.parametrize("nats", [0.0, 0.2, 1.0, 3.0])
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
    noise, ones = Noise.from_seed(1, 5), torch.ones(5, dtype=torch.int64)
    prompt = Prompt(torch.zeros(5, 1, dtype=torch.int64), ones)
    options = {"params": SamplingParams(), "noise": noise}
    run = policy.sample(ReferenceDenoiser(joint), prompt, LENGTH, **options)
    assert run.stats.passes == 2 and run.stats.accepted == [5, 0, 5]
    assert run.stats.nats == pytest.approx(5 * 0.964115, abs=1e-4)
