"""The distribution a canvas policy decodes, without sampling: every path, with its probability.

For a model with a table of its conditionals and a handful of slots. The policy itself runs on one
batch with a row for every outcome, and its draws are prescribed.

A policy whose choice of slots does not depend on the draws takes one path to every outcome x: the
slots it chooses follow from what was committed, which is x there. So a run in which slot i draws
x_i whenever it is asked is that path. The probability of x is the product of the probabilities
that its tokens had when they were committed. Among rows that share a canvas, all continuations
occur: where such rows choose different slots, the choice depends on the draws, and the paths are
enumerated one pass after the other with every combination of draws instead.

After slots are committed together that have no joint probability, the model need not predict
anything; its distribution counts as uniform. The draws of two passes count as independent, as they
are in the published samplers; this matters only where the choice depends on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import CanvasPass, Denoiser, Prompt
from mmaccel.evaluation.exactness.g_test import total_variation
from mmaccel.evaluation.exactness.reference_models import (
    ReferenceDenoiser,
    WrappedDenoiser,
    families,
)
from mmaccel.samplers.canvas.predictions import SlotPredictions
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams

_LENGTH, _TOKENS = 4, 3
_CLOSE = 1e-4  # between probabilities in float32 and float64


@dataclass(frozen=True)
class PolicyPaths:
    """N paths of a policy over L slots of V tokens.

    Attributes:
        tokens: `[N, L]` int64, what each path ends in.
        chance: `[N]` float64, of each path.
        joint: `[V] * L` float64, of each outcome.
        passes: `[N]` int64.
        nats: `[N]` float64, what the divergence bound charged.
        sees_draws: whether the choice of slots depends on what is drawn.
        before: per pass `[N, L]` int64, the canvas; -1 where nothing is committed.
        chosen: per pass `[N, L]` bool, what it committed.
    """

    tokens: Tensor
    chance: Tensor
    joint: Tensor
    passes: Tensor
    nats: Tensor
    sees_draws: bool
    before: list[Tensor]
    chosen: list[Tensor]

    @property
    def mean_passes(self) -> float:
        """Passes, on average over the distribution."""
        return float((self.chance * self.passes).sum())


def enumerate_paths(policy: Any, model: Denoiser, length: int, n_tokens: int) -> PolicyPaths:
    """What a policy decodes from a prompt of one token 0, at temperature 1, exactly.

    Args:
        policy: has `open` and `decode`, as the policies of `mmaccel.samplers` do; does not revise.
        model: its distribution is over ids 0..V-1.
        length: L.
        n_tokens: V; there are V ** L outcomes, and many more paths if the choice depends on draws.
    """
    outcomes = torch.tensor(list(product(range(n_tokens), repeat=length)), dtype=torch.int64)
    trace = _run(policy, model, outcomes[:, None].expand(-1, length, -1))
    if trace.chooses_alike():
        return trace.collect(n_tokens, torch.ones(len(outcomes), dtype=torch.float64), False)
    return _all_paths(policy, model, length, n_tokens)


def _all_paths(policy: Any, model: Denoiser, length: int, n_tokens: int) -> PolicyPaths:
    """CanvasPass by pass: every path so far, with every combination of draws at the next pass."""
    outcomes = torch.tensor(list(product(range(n_tokens), repeat=length)), dtype=torch.int64)
    draws = outcomes.new_zeros(1, length, length)  # one path, nothing drawn yet
    weight = torch.ones(1, dtype=torch.float64)
    trace = _run(policy, model, draws)
    for level in range(length):
        asked = trace.asked[level] if level < len(trace.asked) else draws[:, 0] < 0
        fits = ((outcomes == 0) | asked[:, None]).all(-1)  # [paths, V ** L]; no draw counts as 0
        path, outcome = fits.nonzero().unbind(1)
        draws, asked, weight = draws[path], asked[path], weight[path]
        draws[:, level] = outcomes[outcome]
        trace = _run(policy, model, draws)
        if level < len(trace.chances):
            weight = weight * torch.where(asked, trace.chances[level], 1.0).prod(1)
        is_done = trace.committed_at <= level
        way = torch.cat([trace.committed_at, trace.tokens], 1)
        way = torch.where(torch.cat([is_done, is_done], 1), way, -1)
        ways, group = way.unique(dim=0, return_inverse=True)  # that committed the same, as one
        weight = weight.new_zeros(len(ways)).index_add_(0, group, weight)
        index = torch.arange(len(group))
        draws = draws[index.new_empty(len(ways)).scatter_(0, group, index)]
        trace = _run(policy, model, draws)
    return trace.collect(n_tokens, weight, True)


class _Trace:
    """The record of a run of N rows with prescribed draws."""

    def __init__(self, draws: Tensor) -> None:
        self.draws = draws  # [N, passes, L]
        self.before: list[Tensor] = []  # per pass [N, L], -1 where open
        self.asked: list[Tensor] = []  # per pass [N, L] bool, slots that drew
        self.chances: list[Tensor] = []  # per pass [N, L] float64, of what they drew
        self.tokens = self.passes = self.nats = self.committed_at = draws.new_zeros(0)

    def finish(self, tokens: Tensor, passes: Tensor, nats: Tensor) -> None:
        """Record the result of the run."""
        self.tokens, self.passes, self.nats = tokens, passes, nats
        self.chosen = [
            (self.before[t] < 0) & (after >= 0)
            for t, after in enumerate([*self.before[1:], tokens])
        ]
        self.committed_at = torch.stack(self.chosen).int().argmax(0)

    def chooses_alike(self) -> bool:
        """Whether rows with the same canvases so far chose the same slots, at every pass."""
        way = torch.zeros_like(self.tokens[:, 0])
        for before, chosen in zip(self.before, self.chosen, strict=True):
            _, way = torch.cat([way[:, None], before], 1).unique(dim=0, return_inverse=True)
            both = torch.cat([way[:, None], chosen.long()], 1).unique(dim=0)
            if len(both) != int(way.max()) + 1:
                return False
        return True

    def collect(self, n_tokens: int, weight: Tensor, sees_draws: bool) -> PolicyPaths:
        """Rows as paths; their probabilities are given, or the product of what they committed."""
        chance = weight
        if not sees_draws:
            for chances, chosen in zip(self.chances, self.chosen, strict=True):
                chance = chance * torch.where(chosen, chances, 1.0).prod(1)
        length = self.tokens.shape[1]
        outcome = (self.tokens * n_tokens ** torch.arange(length - 1, -1, -1)).sum(1)
        joint = chance.new_zeros(n_tokens**length).index_add_(0, outcome, chance)
        shaped = joint.view((n_tokens,) * length)
        own = (self.passes, self.nats, sees_draws, self.before, self.chosen)
        return PolicyPaths(self.tokens, chance, shaped, *own)


def _run(policy: Any, model: Denoiser, draws: Tensor) -> _Trace:
    """Run a policy with prescribed draws `[N, passes, L]`."""
    n, _, length = draws.shape
    prompt = Prompt(draws.new_zeros(n, 1), draws.new_ones(n))
    recorded, trace = _RecordedModel(model), _Trace(draws)
    options = {"params": SamplingParams(), "noise": Noise(*draws.new_zeros(2, n))}
    run = policy.open(recorded, prompt, length, **options)

    def prescribe(seen: SlotPredictions) -> SlotPredictions:
        canvas = run.canvas
        drawn = draws[:, min(len(trace.before), draws.shape[1] - 1)].gather(1, seen.slots)
        predicted = recorded.distributions(seen, run.live)
        chances = predicted.gather(-1, drawn[..., None])[..., 0]  # [N, Q]
        trace.before.append(torch.where(canvas.is_committed, canvas.tokens, -1))
        trace.asked.append(canvas.spread(seen.slots, seen.is_open, False) & canvas.active())
        wide = torch.ones(n, length, dtype=torch.float64)
        own = torch.where(seen.is_open, chances, 1.0)
        trace.chances.append(wide.scatter_reduce_(1, seen.slots, own, "prod"))
        return replace(seen, drawn=drawn, chance=chances.float())

    run.draws = prescribe
    made = policy.decode(run)
    trace.finish(made.tokens, made.passes, run.bound.nats)
    return trace


class _RecordedModel(WrappedDenoiser):
    """A model whose last logits are recorded in float64, uniform where they are NaN."""

    def __init__(self, model: Denoiser) -> None:
        super().__init__(model)
        self._logits = torch.zeros(0, dtype=torch.float32)

    def forward(self, entries: CanvasPass) -> Tensor:
        logits = super().forward(entries)
        is_none = (logits == float("-inf")) | logits.isnan()
        self._logits = torch.where(is_none.all(-1, keepdim=True), 0.0, logits)
        return self._logits

    def distributions(self, seen: SlotPredictions, live: Tensor | None) -> Tensor:
        """The predictions `[N, Q, V]` in float64; exact in the rows of this pass."""
        rounded = seen.logits.double().softmax(-1)
        scores = self._logits.double()
        if self.mask_token is not None:
            scores = scores.index_fill(
                -1, torch.tensor([self.mask_token], dtype=torch.int64), float("-inf")
            )
        exact = (
            scores.softmax(-1) if live is None else rounded.index_copy(0, live, scores.softmax(-1))
        )
        is_same = ((exact - rounded).abs() < _CLOSE) | ~seen.is_open[..., None]
        return torch.where(is_same.all(-1, keepdim=True), exact, rounded)


def measure_toys(policies: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A dict per policy: total variation between its distribution and the joint, passes and nats.

    All are means over the joints of `families`. Policies that revise, need a cache or wait for an
    end token, which no joint has, are left out.

    Args:
        policies: label to policy.
    """
    for label, policy in policies.items():
        if not can_enumerate(policy):
            continue
        found = {
            name: (enumerate_paths(policy, ReferenceDenoiser(joint), _LENGTH, _TOKENS), joint)
            for name, joint in families(_LENGTH, _TOKENS).items()
        }
        apart = {name: total_variation(own.joint, joint) for name, (own, joint) in found.items()}
        n = len(found)
        passes = sum(own.mean_passes for own, _ in found.values()) / n
        nats = sum(float((own.chance * own.nats).sum()) for own, _ in found.values()) / n
        yield {
            "model": "six joints of 4 slots, exact",
            "policy": label,
            "settings": repr(policy),
            "exactness": policy.exactness,
            "rows": n,
            "tokens": float(_LENGTH),
            "passes": passes,
            "tokens_per_pass": _LENGTH / passes,
            "canvases": passes,
            "positions": _LENGTH * passes,
            "nats": nats,
            "same": None,
            "seconds": 0.0,
            "quality": {
                "total_variation": sum(apart.values()) / n,
                "worst": max(apart.values()),
                **apart,
            },
        }


def can_enumerate(policy: Any) -> bool:
    """Whether a policy's distribution on a model without a cache can be enumerated."""
    revises = type(policy).__name__ in ("RevisedParallel", "LosslessUnmask")
    has_noise = bool(getattr(policy, "choice", 0.0))
    ends = getattr(policy, "end_threshold", None) is not None
    ends = ends or getattr(policy, "drop_suffix", False)
    return not (revises or has_noise or ends) and hasattr(policy, "decode")
