"""An invalid draft that is thrown away changes no token and does not end the call."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import (
    AcousticGroups,
    Autoregressive,
    GroupedSpeculative,
    Jacobi,
    NumericsError,
    Speculative,
    SpeculativeJacobi,
)
from mmaccel.contracts import Pass
from mmaccel.kernels import dispatch
from mmaccel.policies import Policy
from mmaccel.results import Generation, Progress
from tests.fixtures.graph_replay import Replay
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import ToyLanguage, sample

BAD, LENGTH, N_ROWS = 8, 18, 6
MODES = ("auto", "torch")  # of acceptance: row by row in numpy, or all rows at once
POLICIES: list[Policy] = [
    Jacobi(6, "random"),
    SpeculativeJacobi(6, "independent", "random"),
    SpeculativeJacobi(6, "maximal", "random"),
    SpeculativeJacobi(6, "gumbel", "random"),
    GroupedSpeculative(6, group=0, drafts="random"),
    AcousticGroups(6, radius=1e-6, drafts="random"),
    Speculative(4, ToyLanguage(9, seed=5, depth=2)),
]


class Contagious(ToyLanguage):
    """A language in which token `BAD` is impossible, and invalid where it is drafted.

    Its keys and values are NaN, so that every slot of a row is invalid while they are in the
    memory, those before it included, as in attention under a mask.
    """

    n_spoiled = 0

    def logits_after(self, memory: Tensor, last: Tensor) -> Tensor:
        logits = super().logits_after(memory, last).clone()
        logits[..., BAD] = -math.inf
        is_bad = (memory[:, :-1] == BAD).any(1)
        self.n_spoiled += int(is_bad.sum()) if self.setup.runner is None else 0
        return torch.where(is_bad[:, None, None], math.nan, logits)


def _sample(policy: Policy, model: Any, **options: Any) -> Generation:
    return sample(policy, model, [[1, 2], [3], [4, 5, 6]] * (N_ROWS // 3), LENGTH, **options)


@pytest.mark.parametrize(
    ("policy", "mode"), [*((each, "auto") for each in POLICIES), (POLICIES[0], "torch")], ids=repr
)
def test_the_call_goes_on(policy: Policy, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, mode)
    model = Contagious(9, depth=2)
    made = _sample(policy, model)
    assert model.n_spoiled > 0  # the drafts were invalid
    assert made.lengths.tolist() == [LENGTH] * N_ROWS and not (made.tokens == BAD).any()
    assert made.stats.tokens == sum(k * n for k, n in enumerate(made.stats.accepted, 1))
    if isinstance(policy, Jacobi):
        assert made.tokens.equal(_sample(Autoregressive(), Contagious(9, depth=2)).tokens)


@pytest.mark.parametrize("sync_every", [1, 3])
def test_captured_steps(sync_every: int) -> None:
    """Every replay still reads nothing back; the pass that repeats one is not captured."""
    model: Any = Contagious(9, depth=2)
    model.forward = lambda entries: _forward_without_checks(model, entries)
    model.setup.runner = Replay(sync_every)
    made = _sample(Jacobi(6, "random"), model)
    assert made.tokens.equal(_sample(Autoregressive(), Contagious(9, depth=2)).tokens)
    assert model.setup.runner.replayed > 0 and model.setup.runner.recorded == [
        6 if sync_every == 1 else (6, 3)
    ]


def _forward_without_checks(model: Contagious, entries: Pass) -> Tensor:
    tokens, start = entries.tokens, entries.start
    assert start is not None
    positions = start[:, None] + torch.arange(tokens.shape[1])
    positions = positions.clamp(max=model.n_positions)
    model.memory.scatter_(1, positions, tokens)
    return model.logits_after(model.memory, positions)


@pytest.mark.parametrize("policy", [*POLICIES[::3], Autoregressive()], ids=repr)
@pytest.mark.parametrize("mode", MODES)
def test_a_row_that_is_really_invalid_ends_the_call(
    policy: Policy, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(ToyLanguage):
        def logits_after(self, memory: Tensor, last: Tensor) -> Tensor:
            logits = super().logits_after(memory, last)
            row = torch.arange(len(memory))[:, None, None]
            return torch.where((row == 4) & (last >= 9)[..., None], math.nan, logits)

    monkeypatch.setenv(dispatch.VARIABLE, mode)
    with pytest.raises(NumericsError) as error:
        _sample(policy, Broken(9, depth=2))
    assert error.value.rows == (4,)


@pytest.mark.parametrize("mode", MODES)
def test_invalid_slots_behind_a_rows_end(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`on_step` ends rows after the pass: what the pass made behind their end is not wanted."""

    class Finite(ToyLanguage):
        def logits_after(self, memory: Tensor, last: Tensor) -> Tensor:
            logits = torch.zeros(*last.shape, 9)
            logits[..., 7] = 50.0  # the left draft is always right
            return logits.masked_fill((last >= 8)[..., None], math.nan)

    def on_step(progress: Progress) -> Tensor:
        return torch.full_like(progress.lengths, 4)

    monkeypatch.setenv(dispatch.VARIABLE, mode)
    made = _sample(Jacobi(6, "left"), Finite(9, depth=2), on_step=on_step)
    assert made.lengths.tolist() == [4] * N_ROWS and made.tokens[:, :4].eq(7).all()


@pytest.mark.parametrize(("attention", "fused"), [("sdpa", "auto"), ("eager", False)])
def test_a_model_whose_embedding_of_a_token_is_invalid(attention: str, fused: Any) -> None:
    """Padding ids of published checkpoints may have such embeddings; greedy drafts meet them."""
    model = build_lm("llama", tie_word_embeddings=False, attn_implementation=attention)
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    options: dict[str, Any] = dict(
        max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    with torch.no_grad():
        model.get_input_embeddings().weight[17] = math.nan
        model.get_output_embeddings().weight[17] = 0
    plain = model.generate(ids, **options)
    assert not (plain == 17).any()
    policy = SpeculativeJacobi(8, drafts="random")
    with mmaccel.attach(model, policy, seed=3, fused=fused, strict=True):
        assert model.generate(ids, **options).equal(plain)
