"""The law of every canvas policy, enumerated on laws small enough for a table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmaccel.contracts import Prompt
from mmaccel.evaluation.exactness.canvas_enumeration import PolicyPaths, enumerate_paths
from mmaccel.evaluation.exactness.reference_models import ReferenceDenoiser, families
from mmaccel.samplers.canvas.adaptive_block import AdaptiveBlock
from mmaccel.samplers.canvas.confident_parallel import ConfidentParallel
from mmaccel.samplers.canvas.entropy_bounded import EntropyBounded
from mmaccel.samplers.canvas.kl_stable import KLStable
from mmaccel.samplers.canvas.local_leap import LocalLeap
from mmaccel.samplers.canvas.masked_parallel import MaskedParallel
from mmaccel.samplers.canvas.stepwise import Stepwise
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams

LENGTH, TOKENS = 4, 3
LAWS = families(LENGTH, TOKENS)
ORDERS = ("confidence", "entropy", "margin", "left", "random", "halton")


def law_of(policy: object, joint: Tensor) -> PolicyPaths:
    law = enumerate_paths(policy, ReferenceDenoiser(joint), LENGTH, TOKENS)
    assert float(law.joint.sum()) == pytest.approx(1, abs=1e-9)
    return law


def variation(one: Tensor, other: Tensor) -> float:
    return float((one - other / other.sum()).abs().sum() / 2)


def divergence(true: Tensor, other: Tensor) -> float:
    true = true / true.sum()
    return float(torch.where(true > 0, true * (true / other).log(), 0.0).sum())


def total_correlation(joint: Tensor, canvas: Tensor, chosen: Tensor) -> float:
    """Nats between the joint law of chosen slots and the product of their own, at a canvas."""
    model = ReferenceDenoiser(joint)
    agrees = ((model.table == canvas) | (canvas < 0)).all(1)
    weight = agrees * model.joint.flatten()
    if not weight.sum():
        return 0.0  # a canvas that cannot be
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
def test_one_slot_chosen_before_it_is_drawn_is_the_models_law(
    order: str, block: int | None
) -> None:
    for joint in LAWS.values():
        law = law_of(Stepwise(order, block), joint)
        assert not law.sees_draws and law.mean_passes == pytest.approx(LENGTH)
        assert variation(law.joint, joint) < 1e-9


def test_one_slot_chosen_by_what_was_drawn_is_another_law() -> None:
    found = [law_of(Stepwise("sampled"), joint) for joint in LAWS.values()]
    assert all(law.sees_draws for law in found)
    off = [variation(law.joint, joint) for law, joint in zip(found, LAWS.values(), strict=True)]
    assert sum(value > 0.05 for value in off) >= 4
    assert Stepwise("sampled").exactness == "relaxed" != Stepwise().exactness


@pytest.mark.parametrize("gamma", [0.0, 0.1, 0.5, 1.5])
@pytest.mark.parametrize("name", LAWS)
def test_no_step_diverges_by_more_than_gamma(name: str, gamma: float) -> None:
    law = law_of(EntropyBounded(gamma), LAWS[name])
    assert not law.sees_draws
    states = {
        (tuple(before.tolist()), tuple(chosen.tolist()))
        for befores, chosens in zip(law.before, law.chosen, strict=True)
        for before, chosen in zip(befores, chosens, strict=True)
        if chosen.any()
    }
    costs = [total_correlation(LAWS[name], torch.tensor(b), torch.tensor(c)) for b, c in states]
    assert max(costs) <= gamma + 1e-6
    if gamma == 1.5:
        assert law.mean_passes < LENGTH  # it is tried


def test_total_correlation_is_seen_where_it_is() -> None:
    chosen = torch.tensor([True, False, True, False])
    nothing = torch.full((LENGTH,), -1)
    assert total_correlation(LAWS["copy pairs"], nothing, chosen) > 0.1
    assert total_correlation(LAWS["independent"], nothing, chosen) < 1e-6


@pytest.mark.parametrize("nats", [0.0, 0.2, 1.0, 3.0])
@pytest.mark.parametrize("name", LAWS)
def test_no_sequence_diverges_by_more_than_its_budget(name: str, nats: float) -> None:
    law = law_of(EntropyBounded(budget_nats=nats), LAWS[name])
    assert float(law.nats.max()) <= nats + 1e-9
    assert divergence(LAWS[name], law.joint) <= nats + 1e-6
    if nats == 0:  # below what two slots cost, unless they cost nothing
        assert variation(law.joint, LAWS[name]) < 1e-9
    if nats == 3:
        assert law.mean_passes < LENGTH


@pytest.mark.parametrize(
    "policy",
    [
        ConfidentParallel(1.0),
        ConfidentParallel(rule="frechet", factor=0.0),
        KLStable(threshold=1.0),
        KLStable(kl=0.0),
        LocalLeap(anchor=1.0),
        AdaptiveBlock((2,), threshold=1.0, block=2),
        MaskedParallel(None, choose="first"),
        MaskedParallel(None, order="halton"),
        MaskedParallel(LENGTH, order="random", schedule="linear"),
    ],
    ids=repr,
)
def test_policy_is_stepwise_where_its_page_says_so(policy: object) -> None:
    for joint in LAWS.values():
        law = law_of(policy, joint)
        assert not law.sees_draws and variation(law.joint, joint) < 1e-6


def test_choice_behind_the_draw_is_seen_and_is_another_law() -> None:
    for policy in (MaskedParallel(None, choice=0.0), MaskedParallel(4, choice=1.0)):
        assert policy.exactness == "relaxed"
        for name in ("markov", "replace one"):
            law = law_of(policy, LAWS[name])
            assert law.sees_draws and variation(law.joint, LAWS[name]) > 0.05
    assert MaskedParallel(None, choose="first").exactness == "distribution"
    assert MaskedParallel(None, choose="first", cache="dual").exactness == "relaxed"
    assert MaskedParallel(4, choose="first").exactness == "relaxed"


def test_confidence_rules_lose_where_slots_depend_on_each_other() -> None:
    """Every slot is most likely unchanged, but one of them is changed."""
    joint = LAWS["replace one"]
    bold = law_of(ConfidentParallel(0.7), joint)
    assert variation(bold.joint, joint) > 0.3 and bold.mean_passes < 2
    assert variation(law_of(EntropyBounded(0.1), joint).joint, joint) < 1e-9


def test_ledger_charges_a_case_computed_by_hand() -> None:
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
