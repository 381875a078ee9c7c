"""One step of maximal coupling: target distributions, accepted drafts and redrawn tokens.

Every draft x ~ q is accepted with probability min(1, p(x)/q(x)), else redrawn from (p - q)+; the
bonus slot after the last draft is drawn from p. Leviathan et al. 2023 (arXiv 2211.17192), section
2.3; "MC-SJD", arXiv 2510.24211, section 4.1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmaccel.kernels.acceptance import draw, is_kept, residual


class Coupled(NamedTuple):
    """The result for a window."""

    p_target: Tensor  # [B, W, V] float32
    kept: Tensor  # [B, W-1] bool
    verified: Tensor  # [B, W] int64: the draft if accepted, else the redraw; last, the bonus


def couple(
    scores: Tensor, p_draft: Tensor, drafts: Tensor, coins: Tensor, redraws: Tensor
) -> Coupled:
    """Verify the drafts `[B, W-1]` of a window by coins `[B, W-1]` and redraw those that fail.

    `scores` `[B, W, V]` are filtered, `p_draft` `[B, W-1, V]` is what the drafts were drawn from;
    coins and redraws `[B, W]` are uniform in (0, 1), fresh and independent. A token of weight 0 is
    never drawn. Where scores are invalid (NaN, or none above -inf) the token means nothing.
    """
    p_target = scores.softmax(-1)
    before = p_target[:, :-1]
    kept = is_kept(before, p_draft, drafts, coins)
    drawn = draw(torch.cat([residual(before, p_draft), p_target[:, -1:]], 1), redraws)
    verified = torch.cat([torch.where(kept, drafts, drawn[:, :-1]), drawn[:, -1:]], 1)
    return Coupled(p_target, kept, verified)
