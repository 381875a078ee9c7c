"""SlotPredictions: what a pass over a canvas says of the slots that may be committed now.

Two laws. The *model's law* is what guidance and the layout's mask leave of the logits; thresholds
on confidence speak of it, so that they mean the same with every temperature and truncation. The
*target law* is what a token is drawn from: the model's after temperature, top-k, top-p and min-p.
Entropies, and the nats they add up to, are the target law's; at temperature 0, where the target law
has none, the model's.

A selector sees evidence *sealed*, without the tokens that were drawn: a choice of slots that knows
what they will hold biases what they hold (see `docs/exactness.md`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import Layout
from mmaccel.kernels import dispatch
from mmaccel.kernels.unmask import unmask
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams

_NEVER = float("-inf")


@dataclass(frozen=True)
class SlotPredictions:
    """Of B rows and Q slots each.

    Attributes:
        slots: `[B, Q]` int64.
        is_open: `[B, Q]` bool, slots that may be committed; the other attributes mean nothing
            elsewhere.
        peak: `[B, Q]` float32, largest probability of the model's law.
        gap: `[B, Q]` float32, largest less second largest probability of the model's law.
        entropy: `[B, Q]` float32, nats, of the target law (of the model's at temperature 0).
        law: `[B, Q, V]` float32, unnormalised logarithms of the model's law.
        is_lawless: `[B]` bool, rows with an open slot whose scores are no law (NaN, infinity, or
            nothing possible).
        drawn: `[B, Q]` int64, tokens drawn from the target law; None where sealed.
        chance: `[B, Q]` float32, target law's probability of `drawn`; None where sealed.
    """

    slots: Tensor
    is_open: Tensor
    peak: Tensor
    gap: Tensor
    entropy: Tensor
    law: Tensor
    has_invalid_logits: Tensor
    drawn: Tensor | None = None
    chance: Tensor | None = None

    def sealed(self) -> SlotPredictions:
        """The same without what was drawn."""
        return replace(self, drawn=None, chance=None)

    def at_least_one(self, chosen: Tensor) -> Tensor:
        """Chosen open slots `[B, Q]`, and the surest one of a row that has none of them."""
        chosen = chosen & self.is_open
        surest = torch.where(self.is_open, self.peak, -1.0).argmax(1, keepdim=True)
        is_idle = ~chosen.any(1, keepdim=True) & self.is_open.any(1, keepdim=True)
        return chosen.scatter(1, surest, chosen.gather(1, surest) | is_idle)

    @staticmethod
    def pick(views: list[SlotPredictions], index: Tensor) -> SlotPredictions:
        """Of each row the evidence of one of several canvases, `index` `[B]` int64."""
        rows = torch.arange(index.shape[0], device=index.device)
        fields: dict[str, Any] = {
            name: None
            if value is None
            else torch.stack([getattr(view, name) for view in views])[index, rows]
            for name, value in vars(views[0]).items()
        }
        return SlotPredictions(**fields)

    def split(self, copies: int) -> list[SlotPredictions]:
        """SlotPredictions of K canvases of B rows, one after the other."""
        fields: dict[str, Any] = {
            name: [None] * copies if value is None else value.chunk(copies)
            for name, value in vars(self).items()
        }
        return [SlotPredictions(**{n: v[k] for n, v in fields.items()}) for k in range(copies)]


def read_logits(
    logits: Tensor,
    branches: int,
    slots: Tensor,
    is_open: Tensor,
    *,
    mask_token: int,
    params: SamplingParams,
    noise: Noise,
    layout: Layout | None,
) -> SlotPredictions:
    """SlotPredictions of a pass, with a token drawn for every open slot by its own frozen noise.

    Args:
        logits: `[G * B, Q, V]`, branch-major.
        branches: G.
        slots: `[B, Q]` int64.
        is_open: `[B, Q]` bool.
        mask_token: never drawn, and no part of any law.
        filters, noise, layout: of the run.
    """
    purpose = torch.zeros((), dtype=torch.int64, device=logits.device)  # frozen
    law = params.to_model_scores(logits, branches, slots, layout)  # [B, Q, V]
    if 0 <= mask_token < law.shape[-1]:
        law = law.index_fill(-1, purpose + mask_token, _NEVER)
    key = (noise.seeds, noise.items, slots, purpose)
    greedy = params.temperature == 0
    target = law if greedy else params.to_target_scores(law)
    found = dispatch.run(unmask, target, is_open, 0.0 if greedy else 1.0, *key)
    raw = found if target is law else dispatch.run(unmask, law, is_open, 0.0, *key)
    peak = law.amax(-1)
    if params.temperature not in (0.0, 1.0):  # next to nothing, it leaves infinities
        peak = peak + target.amax(-1)
    has_invalid_logits = (is_open & (peak - peak != 0)).any(1)  # NaN and infinity leave NaN
    own = (slots, is_open, raw.peak, raw.gap, found.entropy, law, has_invalid_logits)
    return SlotPredictions(*own, found.tokens, found.confidence)
