"""A coarse model's task: passes to learn from, and the loss on them.

The loss is the cross-entropy of the large model's distribution on the right tokens from the one
that the coarse model describes, for slots that a pass has seen and for slots that none has. With
large vocabularies both are normalised over a part of the ids: the tokens of the batch, and others
drawn by how often they occur.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from mmaccel.samplers.drafting.coarse_model import CoarseConfig, CoarseModel, save_coarse
from scripts.training.coarse_passes import PassData, Slots
from scripts.training.loop import Plan, Task

PLAN = Plan(4000, 2000, 2304, warmup=200, mixed=True, keeps_best=True)
_UNSEEN = 3  # one slot of so many
_WRONG = 0.05  # share of a slot's neighbours that are replaced by any token: drafts are wrong too
_WHOLE_VOCABULARY = 4096  # up to which the softmax is over all ids
_DRAWN_IDS = 1024
_CHUNK = 64  # slots of a softmax over a large vocabulary


class CoarseFit(Task):
    """The training of one coarse model. A batch is slots that a pass has seen, and new ones.

    Args:
        output: `[V, D]`, the large model's output matrix.
        temperature: of the runs; the loss is that of the distributions at it.
    """

    matrices = re.compile(r"^(mix|state|prompt|inner)\.")

    def __init__(
        self, config: CoarseConfig, output: Tensor, data: PassData, temperature: float = 1.0
    ) -> None:
        self.config, self.output, self.data = config, output, data
        self.scale = 1 / (temperature or 1.0)

    def build(self, before: Path | None) -> CoarseModel:
        model = CoarseModel(self.config, self.output)
        with torch.no_grad():
            model.out.weight.mul_(0.3)  # begin near the pass's own scores
        return model

    def batch(self, step: int, size: int) -> tuple[Slots, Slots]:
        rng = torch.Generator().manual_seed(step)
        n_unseen = size // _UNSEEN
        unseen = self.data.draw_unseen(n_unseen, rng)
        now = unseen.now
        n_ids = self.config.vocab_size
        is_wrong = (torch.rand(now.shape, generator=rng) < _WRONG) & (now < n_ids)
        others = torch.randint(n_ids, now.shape, generator=rng)
        wrong = replace(unseen, now=torch.where(is_wrong, others, now))
        return self.data.draw_seen(size - n_unseen, rng), wrong

    def loss(self, model: CoarseModel, ids: Slots, labels: Slots, step: int) -> Tensor:
        """Cross-entropy of both kinds of slots, summed, nats."""
        rng = torch.Generator().manual_seed(step)
        head = self.head(torch.cat([ids.tokens, labels.tokens]), rng)
        found = [
            self._cross_entropy(predict(model, slots), slots.finals, head).mean()
            for slots in (ids, labels)
        ]
        return found[0] + found[1]

    def head(self, tokens: Tensor, rng: torch.Generator) -> Tensor:
        """Rows of the output matrix over which a batch's loss is normalised."""
        output = self.output
        if len(output) <= _WHOLE_VOCABULARY:
            return output
        drawn = torch.multinomial(self.data.counts + 1e-3, _DRAWN_IDS, generator=rng)
        return output[torch.cat([tokens, drawn.to(tokens.device)]).unique()]

    def _cross_entropy(self, states: Tensor, finals: Tensor, head: Tensor) -> Tensor:
        target = (self.scale * finals @ head.T).float().softmax(-1)
        return -(target * (self.scale * states @ head.T).float().log_softmax(-1)).sum(-1)

    def validate(self, model: CoarseModel, device: str) -> dict[str, float]:
        """The loss on rows that are not learned from, over the same ids at every call."""
        found = self.measure(model, device, is_whole=False)
        return {"validation": found["seen"] + found["unseen"]} | found

    @torch.no_grad()
    def measure(
        self, model: CoarseModel, device: str, count: int = 2000, is_whole: bool = True
    ) -> dict[str, float]:
        """Cross-entropy in nats on rows that are not learned from.

        Args:
            count: slots of each kind, at most.
            is_whole: normalise over all ids, which takes long with a large vocabulary; otherwise
                as in training.

        Returns:
            `seen`, `unseen`: of the coarse model. `stale`: of the pass's scores of seen slots.
            `model_seen`, `model_unseen`: the entropy of the large model on the right tokens, the
            least that is possible.
        """
        rng = torch.Generator().manual_seed(1)
        head = self.output
        count = count if len(head) <= _WHOLE_VOCABULARY else min(count, 512)
        seen = self.data.draw_seen(count, rng, is_validation=True).to(device)
        unseen = self.data.draw_unseen(count, rng, is_validation=True).to(device)
        if not is_whole:
            head = self.head(torch.cat([seen.tokens, unseen.tokens]), rng)
        pairs = {
            "seen": (predict(model, seen), seen.finals),
            "stale": (seen.states, seen.finals),
            "model_seen": (seen.finals, seen.finals),
            "unseen": (predict(model, unseen), unseen.finals),
            "model_unseen": (unseen.finals, unseen.finals),
        }
        found = {}
        for name, (states, finals) in pairs.items():
            parts = zip(states.split(_CHUNK), finals.split(_CHUNK))
            losses = [self._cross_entropy(s, f, head) for s, f in parts]
            found[name] = round(float(torch.cat(losses).mean()), 4)
        return found

    def save(self, model: nn.Module, folder: Path) -> None:
        save_coarse(model, folder, {})  # type: ignore[arg-type]


def predict(model: CoarseModel, slots: Slots) -> Tensor:
    """The states `[K, D]` that the coarse model predicts."""
    states, distances = slots.states, slots.distances
    base = model.base(slots.slots, distances, states, slots.prompts)
    if slots.seen is None:
        return model.new_state(model.hidden(slots.now, base), distances, states)
    both = torch.cat([slots.now, slots.seen])
    now, seen = model.hidden(both, torch.cat([base, base])).chunk(2)
    return model.corrected_state(now, seen, states)
