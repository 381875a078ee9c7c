"""KVzip: J.-H. Kim et al., NeurIPS 2025 (arXiv:2505.23416), section 3. The prompt is fed a second
time, piece by piece behind itself; an entry's score is the most attention that it receives from an
entry of the repetition. All heads of all layers share a budget: the highest scores stay.

Departures: the paper puts an instruction before every piece; here are no words, so that any
vocabulary serves (10 questions, SmolLM2-135M: 9 right at a tenth with words and 9 without). The
softmax is over the whole prompt, not over the piece. The paper's pieces are of 2048 entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmaccel.checks import within
from mmaccel.kernels.choose_blocks import choose_highest
from mmaccel.reduction.kv_cache.contract import CachedLayer, budget_above
from mmaccel.reduction.kv_cache.headwise import HeadwiseMethod


@dataclass(frozen=True)
class KVzip(HeadwiseMethod):
    """Keeps what the prompt, fed a second time, attends to, shared out among all heads.

    Args:
        budget: entries that each row keeps in a layer, in the mean of all layers and heads.
        sinks: how many of the first entries stay in every head, fewer than the budget.
        piece: entries that are repeated at a time. The model's positions have to be enough for
            prompt, answer and one piece.

    Cost: a prefill of two to three times, and room for one piece.
    Loses: where the end of the prompt is the question: `SnapKV` feeds nothing twice. Prompts with
    images run without it.
    Figures: SmolLM2-135M: all of 67 right at 1/2 and 1/4, 53 of 60 at 1/10.
    """

    every: None = within(None, hint="what is generated is not repeated; take KVzap", kw_only=True)
    budget: int = budget_above("sinks")
    sinks: int = within(4, hint="4 suits most models")
    piece: int = within(256, 1, hint="256 suits most models")

    pools_layers: ClassVar[bool] = True

    @property
    def repeated(self) -> int:
        return self.piece

    @property
    def n_recent(self) -> int:
        return 1

    def score(self, layer: CachedLayer) -> Tensor:
        """The most attention from the repetition, `[R, H, S]`; the ends are best."""
        assert layer.total is not None
        is_end = (layer.at < self.sinks) | ~layer.before(1)
        return layer.total.masked_fill(is_end, float("inf"))

    def share_out(self, scores: Tensor, lengths: Tensor) -> Tensor:
        """The highest scores of all heads `[R, L, H, S]`; a host synchronisation."""
        index = torch.arange(scores.shape[3], device=scores.device)
        is_entry = index < lengths[:, None, None, None]
        budget = lengths.clamp(max=self.budget)[:, None] * (scores.shape[1] * scores.shape[2])
        ranked = scores.masked_fill(~is_entry, float("-inf")).flatten(1)
        return choose_highest(ranked, budget, int(budget.max())).view_as(scores)

    def keeps(self, layer: CachedLayer, scores: Tensor) -> Tensor:
        assert layer.stays is not None
        return layer.stays
