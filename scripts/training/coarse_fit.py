"""Trains a coarse model on passes, within a number of minutes.

The loss is the cross-entropy of the large model's distribution on the right tokens from the one
that the coarse model describes, for slots that a pass has seen and for slots that none has. With
large vocabularies both are normalised over a part of the ids: the tokens of the batch, and others
drawn by how often they occur.
"""

from __future__ import annotations

import math
import time
from copy import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.errors import OptionError
from mmaccel.samplers.drafting.coarse_model import CoarseConfig, CoarseModel
from scripts.training.coarse_passes import PassData, Slots

_WHOLE_VOCABULARY = 4096  # up to which the softmax is over all ids
_DRAWN_IDS = 1024
_CHUNK = 64  # slots of a softmax over a large vocabulary
_CHECKS = 20  # validations of a whole training
_LARGEST = 1e-3  # of all learning rates in the last step, as a share of the first


@dataclass(frozen=True)
class FitOptions:
    """How a coarse model is trained.

    Attributes:
        rate: largest learning rate of AdamW.
        n_seen, n_unseen: slots of a batch.
        wrong: share of a slot's neighbours that are replaced by any token, as drafts are wrong too.
        temperature: of the runs; the loss is that of the distributions at it.
        warm_up: steps in which the learning rate rises.
    """

    rate: float = 3e-3
    n_seen: int = 768
    n_unseen: int = 384
    wrong: float = 0.05
    temperature: float = 1.0
    warm_up: int = 100


class CoarseTraining:
    """The training of one coarse model; it goes on where an earlier one in its folder stopped.

    Args:
        config: sizes.
        output: `[V, D]`, the large model's output matrix.
        data: the passes.
        work: holds `training.pt`.
        minutes: training in all, the minutes of earlier runs included.
        options: see there.

    Attributes:
        model: as trained so far.
        best: weights of the lowest cross-entropy on rows that are not learned from; few rows are
            soon learned by heart.
        lowest: that cross-entropy.
        step, seconds: so far.
        curve: points of the card's curve.

    Raises:
        OptionError: `work` holds the training of a coarse model of other sizes.
    """

    def __init__(
        self,
        config: CoarseConfig,
        output: Tensor,
        data: PassData,
        work: Path,
        minutes: float,
        options: FitOptions = FitOptions(),  # noqa: B008 (frozen)
    ) -> None:
        self.data = data
        self.options = options
        self.minutes = minutes
        self.device = output.device
        self.file = work / "training.pt"
        torch.manual_seed(0)
        self.model = CoarseModel(config, output).to(output.device)
        with torch.no_grad():
            self.model.out.weight.mul_(0.3)  # begin near the pass's own scores
        weights = self.model.parameters()
        self._optimiser = torch.optim.AdamW(
            weights, options.rate, betas=(0.9, 0.98), weight_decay=0.02
        )
        self.step = 0
        self.seconds = 0.0
        self.curve: list[dict[str, Any]] = []
        self.best = self._weights()
        self.lowest = math.inf
        if self.file.exists():
            self._load()

    def _load(self) -> None:
        state = torch.load(self.file, map_location=self.device, weights_only=True)
        if state["config"] != asdict(self.model.config):
            raise OptionError(
                f"work: expected no training, or one of a coarse model of these sizes in "
                f"{self.file}, received another; give another --work"
            )
        self.model.load_state_dict(state["model"])
        self._optimiser.load_state_dict(state["optimiser"])
        self.step = state["step"]
        self.seconds = state["seconds"]
        self.curve = state["curve"]
        self.best = state["best"]
        self.lowest = state["lowest"]

    def save(self) -> None:
        """Write the state, complete or not at all."""
        state = {
            "config": asdict(self.model.config),
            "model": self.model.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "curve": self.curve,
            "best": self.best,
            "lowest": self.lowest,
        }
        partial = self.file.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.file)

    def run(self, until: float) -> None:
        """Train until `until` minutes of training have passed, counted over all runs."""
        rng = torch.Generator().manual_seed(self.step + 1)
        began = time.monotonic() - self.seconds
        checked = self.seconds
        while (elapsed := time.monotonic() - began) < 60 * until:
            self.seconds = elapsed
            self._set_rate(elapsed / (60 * self.minutes))
            loss = self.loss(
                self.data.draw_seen(self.options.n_seen, rng),
                self.data.draw_unseen(self.options.n_unseen, rng),
                rng,
            )
            self._optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self._optimiser.step()
            self.step += 1
            if elapsed - checked > 60 * self.minutes / _CHECKS:
                checked = elapsed
                self._check()
        self.seconds = max(self.seconds, 60 * until)
        self._check()

    def _check(self) -> None:
        """Validate, keep the weights if they are the best so far, and save."""
        found = self.validate(is_whole=False)
        if found["seen"] + found["unseen"] < self.lowest:
            self.best = self._weights()
            self.lowest = found["seen"] + found["unseen"]
        self.save()

    def _weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def at_best(self) -> CoarseTraining:
        """A copy of this training whose model has the best weights."""
        found = copy(self)
        found.model = CoarseModel(self.model.config, self.model.output).to(self.device)
        found.model.load_state_dict(self.best)
        return found

    def _set_rate(self, share: float) -> None:
        fall = 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
        warm = min(1.0, (self.step + 1) / self.options.warm_up)
        for group in self._optimiser.param_groups:
            group["lr"] = self.options.rate * warm * max(fall, _LARGEST)

    def loss(self, seen: Slots, unseen: Slots, rng: torch.Generator) -> Tensor:
        """Cross-entropy of both kinds of slots, summed, nats."""
        now = unseen.now
        n_ids = self.model.config.vocab_size
        is_wrong = (torch.rand(now.shape, generator=rng) < self.options.wrong) & (now < n_ids)
        others = torch.randint(n_ids, now.shape, generator=rng)
        wrong = Slots(**{**vars(unseen), "now": torch.where(is_wrong, others, now)})
        head = self._head(torch.cat([seen.tokens, unseen.tokens]), rng)
        found = [
            self._cross_entropy(self.predict(slots), slots.finals.to(self.device), head).mean()
            for slots in (seen, wrong)
        ]
        return found[0] + found[1]

    def predict(self, slots: Slots) -> Tensor:
        """The states `[K, D]` that the coarse model predicts."""
        model = self.model
        device = self.device
        states = slots.states.to(device)
        distances = slots.distances.to(device)
        prompts = slots.prompts.to(device)
        base = model.base(slots.slots.to(device), distances, states, prompts)
        if slots.seen is None:
            return model.new_state(model.hidden(slots.now.to(device), base), distances, states)
        both = torch.cat([slots.now, slots.seen]).to(device)
        now, seen = model.hidden(both, torch.cat([base, base])).chunk(2)
        return model.corrected_state(now, seen, states)

    def _head(self, tokens: Tensor, rng: torch.Generator) -> Tensor:
        """Rows of the output matrix over which a batch's loss is normalised."""
        output = self.model.output
        if len(output) <= _WHOLE_VOCABULARY:
            return output
        drawn = torch.multinomial(self.data.counts + 1e-3, _DRAWN_IDS, generator=rng)
        return output[torch.cat([tokens, drawn]).unique().to(output.device)]

    def _cross_entropy(self, states: Tensor, finals: Tensor, head: Tensor) -> Tensor:
        scale = 1 / (self.options.temperature or 1.0)
        target = (scale * finals @ head.T).softmax(-1)
        return -(target * (scale * states @ head.T).log_softmax(-1)).sum(-1)

    @torch.no_grad()
    def validate(self, count: int = 2000, is_whole: bool = True) -> dict[str, float]:
        """Cross-entropy in nats on rows that are not learned from.

        Args:
            count: slots of each kind, at most.
            is_whole: normalise over all ids, which takes long with a large vocabulary; otherwise
                as in training, over the same ids at every call.

        Returns:
            `seen`, `unseen`: of the coarse model. `stale`: of the pass's scores of seen slots.
            `model_seen`, `model_unseen`: the entropy of the large model on the right tokens, the
            least that is possible.
        """
        rng = torch.Generator().manual_seed(1)
        output = self.model.output
        count = count if len(output) <= _WHOLE_VOCABULARY else min(count, 512)
        seen = self.data.draw_seen(count, rng, is_validation=True)
        unseen = self.data.draw_unseen(count, rng, is_validation=True)
        if not is_whole:
            output = self._head(torch.cat([seen.tokens, unseen.tokens]), rng)
        pairs = {
            "seen": (self.predict(seen), seen.finals),
            "stale": (seen.states, seen.finals),
            "model_seen": (seen.finals, seen.finals),
            "unseen": (self.predict(unseen), unseen.finals),
            "model_unseen": (unseen.finals, unseen.finals),
        }
        found = {}
        for name, (states, finals) in pairs.items():
            parts = zip(states.to(self.device).split(_CHUNK), finals.to(self.device).split(_CHUNK))
            losses = [self._cross_entropy(s, f, output) for s, f in parts]
            found[name] = round(float(torch.cat(losses).mean()), 4)
        return found
