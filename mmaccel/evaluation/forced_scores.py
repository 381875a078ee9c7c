"""Where two runs part: how close the two best tokens were, and how far rounding moves scores.

A window's pass adds in another order than a pass of one token, so its scores differ in their last
bits. That explains a parting where the token taken was behind the best by no more than these
differences; a wider gap is a bug. Both are measured on the model itself, by feeding it the plain
loop's tokens again, one by one and in windows. Differences of more than half of the digits are a
bug themselves, as of a window that sees what it should not, and explain nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.pipelines.one_run import alone
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.noise import Noise

_REACH = 4  # a gap of so many times the largest difference seen still counts as rounding


@dataclass(frozen=True)
class Parting:
    """Where a row parts from the plain loop, and why it may.

    Attributes:
        slot: index of the first other token.
        gap: by which the other token was behind the best there, in the units of the scores (noise
            included); None where the filters rule it out.
        rounding: largest difference of a score between passes of one token and of a window.
        limit: above which such a difference is no rounding: half of the digits.
        is_rounding: whether rounding explains the parting.
    """

    slot: int
    gap: float | None
    rounding: float
    limit: float
    is_rounding: bool


def explain_parting(
    pipe: Any, caption: str, tokens: Tensor, slot: int, other: int, filters: Filters, noise: Noise,
    width: int, dtype: torch.dtype = torch.float32,
) -> Parting:  # fmt: skip
    """Look at the slot where a run parted from the plain loop.

    Args:
        pipe: a `TextToImage` over a window.
        caption: of the row.
        tokens: `[L]` int64, of the plain loop.
        slot: where the other run parts.
        other: the token it has there.
        filters: of the run; without a processor.
        noise: of the row, B of 1.
        width: of the windows to compare with.
        dtype: that the model computes in.

    Cost: L passes of one token and L / width of a window.
    """
    single = forced_scores(pipe, caption, tokens[: slot + 1], filters, noise, 1)
    wide = forced_scores(pipe, caption, tokens, filters, noise, width)[: slot + 1]
    both = single.isfinite() & wide.isfinite()
    rounding = float((single - wide)[both].abs().max())
    limit = math.sqrt(torch.finfo(dtype).eps) * float(single[both].abs().max())
    behind = [float(scores[slot].max() - scores[slot, other]) for scores in (single, wide)]
    gap = next((own for own in behind if math.isfinite(own)), None)  # cut by one of them alone
    is_rounding = gap is not None and rounding <= limit and gap <= _REACH * rounding
    return Parting(slot, gap, rounding, limit, is_rounding)


@torch.no_grad()
def forced_scores(
    pipe: Any, caption: str, tokens: Tensor, filters: Filters, noise: Noise, width: int
) -> Tensor:
    """Scores plus frozen noise at every slot of given tokens, the last of which is not fed.

    Args:
        pipe, caption, filters, noise: as in `explain_parting`.
        tokens: `[L]` int64.
        width: tokens fed in one pass.

    Returns:
        `[L, V]` float32; the argmax is the token that a run draws there. At temperature 0, where
        filters leave one token, before truncation.
    """
    temperature = filters.temperature  # 0 draws no noise
    if temperature == 0:
        filters = Filters(filters.guidance_scale)
    model = pipe.model
    found = []
    with alone(model):
        prompt = pipe.pictures.prompt([pipe.pictures.encode(caption)], filters.guidance_scale != 1)
        rows, longest = prompt.tokens.shape
        model.reserve(rows, longest + len(tokens))
        if longest > 1:
            model.feed(prompt.tokens[:, :-1], torch.zeros_like(prompt.lengths))
        last = prompt.tokens.gather(1, prompt.lengths[:, None] - 1)  # [R, 1]
        own = tokens.to(last.device)
        line = torch.cat([last, own[:-1].expand(rows, -1)], 1)  # [R, L]
        for first in range(0, len(tokens), width):
            part = line[:, first : first + width].contiguous()
            logits = model.forward(part, prompt.lengths - 1 + first)
            slots = torch.arange(first, first + part.shape[1], device=own.device)[None]
            empty = torch.zeros_like(slots[:, :0])
            scores = filters.apply(
                logits, prompt.branches, empty, slots, slots, prompt.layout
            )  # [1, W, V]; no processor looks at the line
            drawn = noise.frozen(slots, scores.shape[-1], temperature)
            found.append((scores + drawn)[0].cpu())
    return torch.cat(found)
