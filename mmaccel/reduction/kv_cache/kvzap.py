"""KVzap: S. Jegou, M. Jeblick, 2026 (arXiv:2601.07891), with the rule of A. Lancucki et al., 2025
(arXiv:2506.05345): entries whose score is below a threshold go, except for the last ones. A score
is the logarithm of the attention that an entry will receive times the size of what it then adds.
`scorer` is a network that predicts it from the hidden states that a layer's attention reads.
Without one it is measured on the queries of the last `window` entries: the most that one of them
gives to an entry, times the length of its value in proportion to the row's mean.

Departures: without `every` entries go once, when the prompt is processed; with it they go in
rounds, where the paper drops each when it leaves the last ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from mmaccel.checks import within
from mmaccel.errors import OptionError
from mmaccel.reduction.kv_cache.contract import CachedLayer, LayerSizes
from mmaccel.reduction.kv_cache.headwise import ThresholdMethod
from mmaccel.reduction.kv_cache.kvzap_scorer import Scorer, open_scorer

_TINY = 1e-30


@dataclass(frozen=True)
class KVzap(ThresholdMethod):
    """Keeps what later queries may need, as much as that is, head by head.

    Args:
        budget: the last entries, which stay in every head; without a scorer the window among them.
        threshold: the least score of an entry that stays, a natural logarithm: -7 is a thousandth
            of a query's attention to a value of mean length. For published scorers kvpress' example
            has -3.
        window: how many of the last queries are looked at, where there is no scorer.
        scorer: the model's trained scorer, a file of safetensors in kvpress' layout or a folder
            with its `model.safetensors`; None measures scores.

    Loses: where memory has to be known beforehand; attention runs part by part in torch. Published
    scorers were not at hand; thresholds of theirs are not those of measured scores.
    Figures: SmolLM2-135M: 71, 53, 42 % right at budgets of 1/2, 1/4, 1/10, which left 66, 52 and 47
    % of the entries.
    """

    threshold: float = -7.0
    window: int = within(64, 1, hint="64 suits most models")
    scorer: str | None = within(None, hint="give a path as a str; None measures scores")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scorer is not None:
            open_scorer(self.scorer)
            return
        # of a wider window heads may have dropped entries in the round before
        most = max(self.budget, self.every or self.window)
        if self.window > most:
            raise OptionError(
                f"{self.name}.window: expected at most {most} in rounds of {self.every}, the "
                f"larger of budget and every, received {self.window}; give a larger budget"
            )

    @property
    def observed(self) -> int:
        return self.window if self.scorer is None else 0

    @property
    def reads_hidden(self) -> bool:
        return self.scorer is not None

    @property
    def sizes(self) -> LayerSizes | None:
        return None if self.scorer is None else self._opened.sizes

    def rate(self, index: int, hidden: Tensor) -> Tensor:
        """The scorer's logarithms `[R, H, W]`."""
        return self._opened.score(index, hidden)

    @cached_property
    def _opened(self) -> Scorer:
        """The scorer, as it was when it was first needed."""
        assert self.scorer is not None
        return open_scorer(self.scorer)

    def score(self, layer: CachedLayer) -> Tensor:
        """Logarithms `[R, H, S]`."""
        if layer.rated is not None:
            return layer.rated
        received = layer.weights().amax((2, 3))
        length = layer.values.float().norm(dim=-1).where(layer.is_entry(), 0)
        mean = length.sum(-1, keepdim=True) / layer.lengths[:, None, None]
        return (received * length / mean.clamp(min=_TINY)).clamp(min=_TINY).log()
