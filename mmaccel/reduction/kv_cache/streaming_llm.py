"""StreamingLLM: G. Xiao et al., ICLR 2024 (arXiv:2309.17453), section 3.2. With `rerotate`
positions are counted inside the cache, as in the paper: the rotation of kept keys is taken back and
that of consecutive positions applied, as in Z. He et al., "PIE", ICLR 2025 (arXiv:2407.03157).

Departures: the paper moves the window on with every token. Here entries go when the prompt is
processed, and in rounds of `every` tokens; kept keys keep their positions unless `rerotate` is
given, which has no rounds. So a stream without an end is out of reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmaccel.checks import within
from mmaccel.errors import OptionError
from mmaccel.reduction.kv_cache.contract import CachedLayer, CacheMethod, budget_above


@dataclass(frozen=True)
class StreamingLLM(CacheMethod):
    """Keeps the first entries of a prompt, which attract attention whatever they say, and the last.

    Args:
        sinks: how many of the first entries stay, fewer than the budget; 0 for the last ones alone.
        rerotate: whether kept keys are turned to consecutive positions, and new ones follow them,
            in models with rotary positions.

    Loses: the middle of the prompt, whatever is asked; without `rerotate` positions go on, so that
    a model must know texts of that length. `rerotate` is refused beside `every`, and where
    positions are learned or of three axes.
    Figures: SmolLM2-135M: 57, 35, 15 % right at 1/2, 1/4, 1/10; the last entries alone (`sinks=0`)
    54, 33, 14.
    """

    budget: int = budget_above("sinks")
    sinks: int = within(4, hint="4 suits most models")
    rerotate: bool = False

    reads_keys: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rerotate and self.every is not None:
            raise OptionError(
                f"{self.name}.every: expected None beside rerotate=True, which turns the keys of a "
                f"prompt once, received {self.every}; leave every or rerotate out"
            )

    @property
    def rerotates(self) -> bool:
        return self.rerotate

    def score(self, layer: CachedLayer) -> Tensor:
        """The later the better, and the first ones best, `[R, 1, S]`."""
        n_rows, _, n_entries, _ = layer.keys.shape
        is_sink = layer.at < self.sinks
        scores = layer.at.masked_fill(is_sink, n_entries).float()  # exact up to 2**24
        return scores.expand(n_rows, 1, -1)
