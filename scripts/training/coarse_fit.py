"""Trains a coarse model on passes, within a number of minutes.

The loss is the cross-entropy of the large model's distribution on the right tokens from the one
that the coarse model describes, for slots that a pass has seen and for slots that none has. With
large vocabularies both are normalised over a part of the ids: the tokens of the batch, and others
drawn by how often they occur.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.errors import OptionError
from mmaccel.samplers.drafting.coarse_model import CoarseConfig, CoarseModel
from scripts.training.coarse_passes import PassData, Slots

_SEEN, _UNSEEN = 768, 384  # slots of a batch
_WRONG = 0.05  # share of a slot's neighbours that are replaced by any token: drafts are wrong too
_WARM_UP = 100  # steps
_WHOLE_VOCABULARY = 4096  # up to which the softmax is over all ids
_DRAWN_IDS = 1024
_CHUNK = 64  # slots of a softmax over a large vocabulary
_CHECKS = 20  # validations of a whole training
_LARGEST = 1e-3  # of all learning rates in the last step, as a share of the first


class CoarseTraining:
    """The training of one coarse model; it goes on where an earlier one in its folder stopped.

    Args:
        output: `[V, D]`, the large model's output matrix.
        work: holds `training.pt`, of a coarse model of these sizes.
        temperature: of the runs; the loss is that of the distributions at it.

    Attributes:
        state: steps and seconds so far, and, as few rows are soon learned by heart, the weights of
            the lowest cross-entropy on rows that are not learned from, `best` and `lowest`.
    """

    def __init__(
        self,
        config: CoarseConfig,
        output: Tensor,
        data: PassData,
        work: Path,
        rate: float = 3e-3,
        temperature: float = 1.0,
    ) -> None:
        self.data, self.rate, self.device = data, rate, output.device
        self.scale = 1 / (temperature or 1.0)
        self.file = work / "training.pt"
        torch.manual_seed(0)
        self.model = CoarseModel(config, output).to(output.device)
        with torch.no_grad():
            self.model.out.weight.mul_(0.3)  # begin near the pass's own scores
        self._optimiser = torch.optim.AdamW(
            self.model.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.02
        )
        self.state: dict[str, Any] = {"step": 0, "seconds": 0.0, "lowest": math.inf}
        self.state |= {"config": asdict(config), "best": self._weights()}
        if self.file.exists():
            self.state = torch.load(self.file, map_location=self.device, weights_only=True)
            if self.state["config"] != asdict(config):
                raise OptionError(
                    f"work: expected no training, or one of a coarse model of these sizes in "
                    f"{self.file}, received another; give another --work"
                )
            self.model.load_state_dict(self.state.pop("model"))
            self._optimiser.load_state_dict(self.state.pop("optimiser"))

    def run(self, minutes: float) -> None:
        """Train until so many minutes have passed, counted over all runs."""
        state = self.state
        rng = torch.Generator().manual_seed(state["step"] + 1)
        began = time.monotonic() - state["seconds"]
        checked = state["seconds"]
        while (elapsed := time.monotonic() - began) < 60 * minutes:
            share = elapsed / (60 * minutes)
            fall = 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
            warm = min(1.0, (state["step"] + 1) / _WARM_UP)
            self._optimiser.param_groups[0]["lr"] = self.rate * warm * max(fall, _LARGEST)
            seen, unseen = self.data.draw_seen(_SEEN, rng), self.data.draw_unseen(_UNSEEN, rng)
            self._optimiser.zero_grad(set_to_none=True)
            self.loss(seen, unseen, rng).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self._optimiser.step()
            state |= {"step": state["step"] + 1, "seconds": elapsed}
            if elapsed - checked > 60 * minutes / _CHECKS:
                checked = elapsed
                self.check()
        state["seconds"] = max(state["seconds"], 60 * minutes)
        self.check()

    def check(self) -> None:
        """Validate, keep the weights if they are the best so far, and save."""
        found = self.validate(is_whole=False)
        if found["seen"] + found["unseen"] < self.state["lowest"]:
            self.state |= {"best": self._weights(), "lowest": found["seen"] + found["unseen"]}
        parts = {"model": self.model.state_dict(), "optimiser": self._optimiser.state_dict()}
        partial = self.file.with_suffix(".partial")
        torch.save(self.state | parts, partial)
        partial.replace(self.file)

    def _weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def loss(self, seen: Slots, unseen: Slots, rng: torch.Generator) -> Tensor:
        """Cross-entropy of both kinds of slots, summed, nats."""
        now = unseen.now
        n_ids = self.model.config.vocab_size
        is_wrong = (torch.rand(now.shape, generator=rng) < _WRONG) & (now < n_ids)
        others = torch.randint(n_ids, now.shape, generator=rng)
        wrong = replace(unseen, now=torch.where(is_wrong, others, now))
        head = self.head(torch.cat([seen.tokens, unseen.tokens]), rng)
        found = [
            self._cross_entropy(self.predict(slots), slots.finals.to(self.device), head).mean()
            for slots in (seen, wrong)
        ]
        return found[0] + found[1]

    def predict(self, slots: Slots) -> Tensor:
        """The states `[K, D]` that the coarse model predicts."""
        model, device = self.model, self.device
        states = slots.states.to(device)
        distances = slots.distances.to(device)
        base = model.base(slots.slots.to(device), distances, states, slots.prompts.to(device))
        if slots.seen is None:
            return model.new_state(model.hidden(slots.now.to(device), base), distances, states)
        both = torch.cat([slots.now, slots.seen]).to(device)
        now, seen = model.hidden(both, torch.cat([base, base])).chunk(2)
        return model.corrected_state(now, seen, states)

    def head(self, tokens: Tensor, rng: torch.Generator) -> Tensor:
        """Rows of the output matrix over which a batch's loss is normalised."""
        output = self.model.output
        if len(output) <= _WHOLE_VOCABULARY:
            return output
        drawn = torch.multinomial(self.data.counts + 1e-3, _DRAWN_IDS, generator=rng)
        return output[torch.cat([tokens, drawn]).unique().to(output.device)]

    def _cross_entropy(self, states: Tensor, finals: Tensor, head: Tensor) -> Tensor:
        target = (self.scale * finals @ head.T).softmax(-1)
        return -(target * (self.scale * states @ head.T).log_softmax(-1)).sum(-1)

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
            output = self.head(torch.cat([seen.tokens, unseen.tokens]), rng)
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
