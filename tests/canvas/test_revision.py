"""Revisers: what a shadow sees, what is taken back, and that every run ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.contracts import Prompt
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.evaluation.exactness.reference_models import ReferenceDenoiser, families
from mmaccel.results import Generation
from mmaccel.samplers.canvas.model_pass import ShadowLook
from mmaccel.samplers.canvas.revised_parallel import RevisedParallel
from mmaccel.samplers.canvas.revision import RevisedRun, ShadowReviser
from mmaccel.samplers.canvas.stepwise import Stepwise
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from tests.fixtures.kv_reference import StoreOracle

LENGTH, ROWS = 6, 6
LAWS = {name: 0.02 / 3**LENGTH + 0.98 * law for name, law in families(LENGTH, 3).items()}


def decode(policy: Any, model: Any, rows: int = ROWS, **options: Any) -> Generation:
    ones = torch.ones(rows, dtype=torch.int64)
    stop = options.pop("stop", None)
    prompt = Prompt(torch.zeros(rows, 1, dtype=torch.int64), ones, stop_tokens=stop)
    usual = {"params": SamplingParams(), "noise": Noise.from_seed(3, rows)}
    return policy.sample(model, prompt, LENGTH, **{**usual, **options})


@pytest.mark.parametrize("cache", ["none", "dual", "prefix"])
def test_a_shadow_sees_everything_but_the_token_it_checks(
    cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = StoreOracle(LAWS["markov"])
    chances = []
    look = ShadowLook.look

    def spy(self: ShadowLook, canvas: Any, copies: int) -> Any:
        found = look(self, canvas, copies)
        chances.append((canvas.tokens.clone(), canvas.start.clone(), self.left_out.clone()))
        return found

    monkeypatch.setattr(ShadowLook, "look", spy)
    monkeypatch.setattr(ShadowReviser, "most", lambda self, seen: torch.full((ROWS,), 2))
    decode(RevisedParallel(0.0, least=0.5, block=3, cache=cache), model)
    checked = 0
    for told, (canvas, start, left_out) in zip(model.told, chances, strict=True):
        slots = start[:, None] + torch.arange(3)
        for row in range(ROWS):
            for place, slot in enumerate(slots[row].tolist()):
                if slot >= LENGTH or canvas[row, slot] == model.mask_token:
                    continue
                rest = canvas[row].clone()
                rest[slot] = model.mask_token
                assert torch.equal(told[row, 3 + place], rest)
                agrees = (model.table == rest) | (rest == model.mask_token)
                weight = agrees.all(1) * model.joint.flatten()
                wanted = weight[model.table[:, slot] == canvas[row, slot]].sum() / weight.sum()
                assert float(left_out[row, place]) == pytest.approx(float(wanted), abs=1e-5)
                checked += 1
        assert (told[:, :3] == canvas[:, None]).all()  # nobody else sees a shadow
    assert checked > 10


REVISED = [
    RevisedParallel(0.0, least=1.0),
    RevisedParallel(0.2, block=3),
    RevisedParallel(0.0, "edit", least=0.0, budget=4),
    RevisedParallel(0.3, "edit", least=0.1, block=3, budget=2),
    RevisedParallel(0.0, "redo", least=1.0),
    RevisedParallel(0.4, "redo", block=2),
]


@pytest.mark.parametrize("policy", REVISED, ids=repr)
def test_every_run_ends_in_the_passes_its_file_gives(policy: RevisedParallel) -> None:
    block = policy.block or LENGTH
    bound = {"shadow": LENGTH, "edit": LENGTH + LENGTH // block * policy.budget, "redo": 2 * LENGTH}
    for name, law in LAWS.items():
        for temperature in (0.0, 1.0, 2.0):
            model = StoreOracle(law)
            run = decode(policy, model, params=SamplingParams(temperature=temperature))
            assert run.stats.passes <= bound[policy.revise], name
            assert (run.tokens < 3).all() and (run.tokens >= 0).all()
            assert run.lengths.tolist() == [LENGTH] * ROWS


@pytest.mark.parametrize("policy", REVISED, ids=repr)
@pytest.mark.parametrize("stop", [None, 2])
def test_rows_do_not_see_each_other(policy: RevisedParallel, stop: int | None) -> None:
    given = {} if stop is None else {"stop": torch.tensor([stop])}
    noise = Noise.from_seed(8, ROWS)
    whole = decode(policy, StoreOracle(LAWS["copy pairs"]), noise=noise, **given)
    for row in range(ROWS):
        own = Noise(noise.seeds[row : row + 1], noise.items[row : row + 1])
        alone = decode(policy, StoreOracle(LAWS["copy pairs"]), 1, noise=own, **given)
        assert torch.equal(alone.tokens[0], whole.tokens[row])
        assert alone.passes[0] == whole.passes[row] and alone.lengths[0] == whole.lengths[row]


def states_of(policy: RevisedParallel, model: Any) -> list[Tensor]:
    """What stood on the canvas behind every pass, -1 where nothing did."""
    states: list[Tensor] = []

    def note(progress: Any) -> None:
        states.append(torch.where(progress.is_committed, progress.tokens, -1))

    decode(policy, model, on_step=note)
    return states


def test_two_forward_and_one_back_still_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check fails; what a pass takes back is one less than the pass before committed."""
    monkeypatch.setattr(ShadowReviser, "most", lambda self, seen: torch.full((ROWS,), 2))
    states = states_of(RevisedParallel(0.0, least=1.0), StoreOracle(LAWS["markov"]))
    filled = [(state >= 0).sum(1).tolist() for state in states]
    assert filled == [[n] * ROWS for n in (2, 3, 4, 5, 6)]
    back = [((a >= 0) & (b < 0)).sum(1) for a, b in zip(states, states[1:], strict=False)]
    assert [n.tolist() for n in back[:3]] == [[1] * ROWS] * 3


def test_what_was_unsure_is_redone_with_its_neighbours() -> None:
    states = states_of(RevisedParallel(0.0, "redo", least=1.0), StoreOracle(LAWS["markov"]))
    filled = [(state >= 0).sum(1).tolist() for state in states]
    assert filled == [[n] * ROWS for n in range(LENGTH + 1)]  # opened before it moves on


def test_a_bold_draft_redone_agrees_where_the_law_does() -> None:
    # the law's slots agree in pairs, and a draft of all of them at once does not see that
    law = LAWS["copy pairs"]
    plain = decode(RevisedParallel(0.0, "edit", budget=0), StoreOracle(law)).tokens
    off = decode(RevisedParallel(0.0, "redo", least=1.0), StoreOracle(law)).tokens
    half = LENGTH // 2
    agree = [(t[:, :half] == t[:, half:]).float().mean() for t in (plain, off)]
    assert agree[1] > agree[0]


def test_an_edit_replaces_a_token_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that, shown any token, prefers the next one: edits go on until the budget ends."""

    class Restless(ReferenceDenoiser):
        def forward(self, entries: Any) -> Tensor:
            self.passes += 1
            tokens = entries.tokens.gather(1, entries.queries)
            return torch.nn.functional.one_hot((tokens + 1) % 3, 4).double() * 9

    for budget in (0, 1, 5):
        model = Restless(LAWS["markov"])
        states = states_of(RevisedParallel(0.0, "edit", budget=budget), model)
        assert model.passes == 1 + budget == len(states)
        for a, b in zip(states, states[1:], strict=False):
            assert torch.equal(b, (a + 1) % 3)


def test_a_reviser_that_finds_nothing_leaves_stepwise_decoding() -> None:
    for law in LAWS.values():
        plain = decode(Stepwise("confidence"), StoreOracle(law)).tokens
        for policy in (RevisedParallel(1.0, least=0.0), RevisedParallel(1.0, "redo", least=0.0)):
            assert torch.equal(decode(policy, StoreOracle(law)).tokens, plain)


def test_stop_tokens_are_not_taken_back() -> None:
    for policy in REVISED:
        run = decode(policy, StoreOracle(LAWS["markov"]), stop=torch.tensor([2]))
        for tokens, length in zip(run.tokens, run.lengths.tolist(), strict=True):
            assert length == LENGTH or tokens[length - 1] == 2


def test_what_it_refuses() -> None:
    with pytest.raises(UnsupportedModelError, match="can be kept"):
        decode(RevisedParallel(), ReferenceDenoiser(LAWS["markov"]))
    uniform = StoreOracle(LAWS["markov"])
    uniform.mask_token = None  # type: ignore[assignment]
    with pytest.raises(OptionError, match="expected a model with a mask token"):
        decode(RevisedParallel(), uniform)
    with pytest.raises(OptionError, match="revise: expected one of shadow, edit, redo"):
        RevisedParallel(revise="again")
    with pytest.raises(OptionError, match="budget: expected an integer >= 0"):
        replace(mmaccel.RevisedParallel(), budget=-1)
    assert RevisedRun.looks is not ShadowLook
