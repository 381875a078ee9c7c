"""SlotPredictions: what a pass over a canvas predicts for the slots that may be committed now.

The *model's distribution* is the model's after guidance and the layout's mask; thresholds on
confidence apply to it, so that they mean the same at every temperature and truncation. The *target
distribution* is what tokens are drawn from: after temperature, top-k, top-p and the other rules.
Entropies, and the nats they add up to, are the target's; at temperature 0 the model's.

A selector receives *sealed* predictions, without the tokens that were drawn: a choice of slots that
depended on them would bias these tokens (see `docs/exactness.md`).
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


@dataclass(frozen=True)
class SlotPredictions:
    """Predictions for Q slots of each of B rows; they mean nothing where a slot is not open."""

    slots: Tensor  # [B, Q] int64
    is_open: Tensor  # [B, Q] bool, slots that may be committed
    peak: Tensor  # [B, Q] float32, largest probability of the model's distribution
    gap: Tensor  # [B, Q] float32, the same less the second largest
    entropy: Tensor  # [B, Q] float32, nats, of the target (at temperature 0 of the model's)
    logits: Tensor  # [B, Q, V] float32, of the model's distribution
    # [B] bool, rows with an open slot whose logits are NaN or infinite, or leave no token possible
    has_invalid_logits: Tensor
    drawn: Tensor | None = None  # [B, Q] int64, tokens drawn from the target; None where sealed
    chance: Tensor | None = None  # [B, Q] float32, their probability in it; None where sealed

    def sealed(self) -> SlotPredictions:
        return replace(self, drawn=None, chance=None)

    def at_least_one(self, chosen: Tensor) -> Tensor:
        """Chosen open slots `[B, Q]`, and the most confident slot of a row that has none."""
        chosen = chosen & self.is_open
        best = torch.where(self.is_open, self.peak, -1.0).argmax(1, keepdim=True)
        is_idle = ~chosen.any(1, keepdim=True) & self.is_open.any(1, keepdim=True)
        return chosen.scatter(1, best, chosen.gather(1, best) | is_idle)

    def split(self, copies: int) -> list[SlotPredictions]:
        """Predictions of K canvases of B rows, one after the other."""
        fields: dict[str, Any] = {}
        for name, value in vars(self).items():
            fields[name] = [None] * copies if value is None else value.chunk(copies)
        views = zip(*fields.values(), strict=True)
        return [SlotPredictions(**dict(zip(fields, view))) for view in views]

    @staticmethod
    def pick(views: list[SlotPredictions], index: Tensor) -> SlotPredictions:
        """For each row the predictions of one of several canvases, `index` `[B]` int64."""
        rows = torch.arange(index.shape[0], device=index.device)
        fields: dict[str, Any] = {}
        for name, value in vars(views[0]).items():
            if value is None:
                fields[name] = None
            else:
                fields[name] = torch.stack([getattr(view, name) for view in views])[index, rows]
        return SlotPredictions(**fields)


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
    """A token is drawn for every open slot by its own frozen noise; none is `mask_token`. `logits`
    are `[G * B, Q, V]`, branch-major, `slots` `[B, Q]` int64, `is_open` `[B, Q]` bool.
    """
    purpose = torch.zeros((), dtype=torch.int64, device=logits.device)  # frozen
    model = params.to_model_scores(logits, branches, slots, layout)  # [B, Q, V]
    if 0 <= mask_token < model.shape[-1]:
        model = model.index_fill(-1, purpose + mask_token, float("-inf"))
    key = (noise.seeds, noise.items, slots, purpose)
    if params.temperature == 0:
        target = model
        drawn = raw = dispatch.run(unmask, model, is_open, 0.0, *key)
    else:
        target = params.to_target_scores(model, params.find_cooling(logits))
        drawn = dispatch.run(unmask, target, is_open, 1.0, *key)
        raw = drawn if target is model else dispatch.run(unmask, model, is_open, 0.0, *key)
    largest = model.amax(-1)
    if params.temperature not in (0.0, 1.0) or params.adaptive:
        largest = largest + target.amax(-1)  # division by a tiny temperature gives infinities
    has_invalid_logits = (is_open & (largest - largest != 0)).any(1)  # NaN and infinity leave NaN
    return SlotPredictions(
        slots,
        is_open,
        raw.peak,
        raw.gap,
        drawn.entropy,
        model,
        has_invalid_logits,
        drawn.tokens,
        drawn.confidence,
    )
