"""DISCO: a classifier says after each draft whether the next one will be accepted.

J. Mamou et al., "Dynamic Speculation Lookahead Accelerates Speculative Decoding of Large Language
Models", 2024 (arXiv 2405.04304): features of the draft model's distribution and the number of the
draft go into a small classifier; drafting stops where its answer is below a threshold.

Departures: the paper's classifier is trained beforehand. Here it is a logistic regression on the
draft's probability, the entropy and the number of the draft, begun at weights that trust the draft
model and taught by each pass, by each row for itself. The answer is about the draft that was just
made: the next one is worth its pass only if that is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmaccel.checks import within
from mmaccel.samplers.drafting.contract import OpenRun
from mmaccel.samplers.drafting.lengths.contract import Drafted, DraftLength, LengthJudge

if TYPE_CHECKING:
    from mmaccel.samplers.window.steps import Held

_FIRST = (-1.0, 3.0, -0.5, 0.0)  # of 1, probability, entropy and number: 0.5 at a third


@dataclass(frozen=True)
class DISCO(DraftLength):
    """Drafts until an online classifier expects a rejection.

    Args:
        threshold: of the probability of acceptance.
        rate: step of the classifier's gradient descent; 0 teaches it nothing.

    Loses: where drafts are nearly free, and in batches.
    """

    threshold: float = within(0.4, 0, 1, "0.4 is a start")
    rate: float = within(0.2, 0, 10, "0.2 is a start")

    def open(self, run: OpenRun) -> LengthJudge:
        return Classifier(
            self,
            weights=run.steps.declare("classifier of draft lengths"),
            threshold=self.threshold,
            rate=self.rate,
        )


@dataclass(eq=False)
class Classifier(LengthJudge):
    weights: Held  # [B, 4]
    threshold: float
    rate: float
    _features: Tensor | None = None  # [B, k, 4] of the window's drafts
    _is_drafted: Tensor | None = None  # [B, k] bool, which of them the row has drafted

    def goes_on(self, run: OpenRun, drafted: Drafted) -> Tensor:
        chance = drafted.confidences[:, -1]
        k = drafted.confidences.shape[1]
        number = torch.full_like(chance, k / 8)
        features = torch.stack([torch.ones_like(chance), chance, drafted.entropy, number], 1)
        features = features.nan_to_num(0.0)  # of a draft model gone wrong, which teaches nothing
        if k == 1 or self._features is None:
            self._features = features[:, None]
            self._is_drafted = torch.ones_like(chance, dtype=torch.bool)[:, None]
        else:
            assert self._is_drafted is not None
            is_drafted = self._is_drafted[:, -1] & self._answer(run, self._features[:, -1])
            self._features = torch.cat([self._features, features[:, None]], 1)
            self._is_drafted = torch.cat([self._is_drafted, is_drafted[:, None]], 1)
        return self._answer(run, features)

    def accepted(self, run: OpenRun, n_new: Tensor) -> None:
        """Teach the drafts up to the first rejection; those behind it were not judged."""
        if self._features is None or self._is_drafted is None or not self.rate:
            return
        number = torch.arange(self._is_drafted.shape[1], device=n_new.device)
        is_judged = self._is_drafted & (number < n_new[:, None]) & (n_new > 0)[:, None]
        is_right = number < n_new[:, None] - 1
        weights = self._weights(run, len(n_new))
        predicted = (self._features * weights[:, None]).sum(-1).sigmoid()
        error = (is_right.float() - predicted) * is_judged
        step = (error[..., None] * self._features).sum(1)
        self.weights.hold(weights + self.rate * step)
        self._features = None
        self._is_drafted = None

    def begin_rows(self, run: OpenRun, batch_slots: Tensor) -> None:
        if self.weights.value is not None:
            first = torch.tensor(_FIRST, device=batch_slots.device, dtype=torch.float32)
            self.weights.get()[batch_slots] = first

    def _answer(self, run: OpenRun, features: Tensor) -> Tensor:
        weights = self._weights(run, len(features))
        return (features * weights).sum(-1).sigmoid() >= self.threshold

    def _weights(self, run: OpenRun, rows: int) -> Tensor:
        if self.weights.value is not None:
            return self.weights.value
        device = run.prompt.tokens.device
        return torch.tensor(_FIRST, device=device, dtype=torch.float32).repeat(rows, 1)
