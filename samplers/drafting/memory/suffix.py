"""What followed the longest suffix that stood before, as many tokens of it as pay.

Y. Hu et al., "SAM Decoding: Speculative Decoding via Suffix Automaton", 2024 (arXiv 2411.10666),
section 3: the length of the suffix says how likely its continuation is right.

Departures: a suffix counts up to eight tokens and is looked for anew in each pass. A pass covers
the width with the most tokens for its cost: chances by the length of the match, begun at measured
ones and corrected by what the call accepts, and costs that are measured while it runs, or counted
(`--set drafts=suffix:token_cost=0.03`). Widths depend on all rows and the clock: bitwise policies
alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from mmaccel.checks import within
from mmaccel.samplers.drafting.contract import Drafter, Drafts, DraftSource, OpenRun
from mmaccel.samplers.drafting.copying import copy_on
from mmaccel.samplers.drafting.memory.candidates import find_suffix
from mmaccel.samplers.tuner import STALE, Tuner, keep

# That the next token is the one that followed a match of 0 … 8 tokens: means over copying, code,
# summaries and stories by SmolLM2-135M and Gemma 3 270M at temperatures 0 and 0.7.
_CHANCES = (0.0, 0.22, 0.45, 0.62, 0.7, 0.75, 0.78, 0.82, 0.92)
_WEIGHT = 6.0  # drafts that these count for
_KEPT = 0.97  # of what was counted before a draft: texts change
_WIDTHS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Suffix(DraftSource):
    """What followed the latest earlier occurrence of the longest suffix, in passes as wide as pays,
    at most the policy's window, and of one token where nothing does. "auto" of text.

    Args:
        token_cost: see `BanditSpec`.

    Loses: on images, and where a text does not repeat itself: its passes are then plain ones.
    Figures: SmolLM2-135M and Gemma 3 270M: a draft behind a match of 1, 3 and 8 tokens is right in
    22, 62 and 92 %.
    """

    token_cost: float | None = within(None, 0, 1, "0.03 suits small models")

    only_bitwise = True
    chooses_widths = True
    keeps_predictions = False
    reads_last_scores = False
    name = "suffix"

    def open(self, run: OpenRun) -> Drafter:
        if self.token_cost is not None:
            return SuffixDrafter(self, self.make_tuner())
        conditions = (self, run.prompt.batch, run.params.guidance_scale, run.params.temperature)
        return SuffixDrafter(self, keep(run.model, conditions, self.make_tuner))

    def make_tuner(self) -> Tuner:
        return Tuner(_WIDTHS, self.token_cost, margin=1.1, risk=0.02, loan=4.0, stale=STALE)


@dataclass(eq=False)
class SuffixDrafter(Drafter):
    tuner: Tuner  # of the model's passes, from earlier runs too
    _right: list[float] = field(default_factory=lambda: [0.0] * len(_CHANCES), init=False)
    _judged: list[float] = field(default_factory=lambda: [0.0] * len(_CHANCES), init=False)
    _first: Tensor | None = field(default=None, init=False)  # [B, 1], what followed the matches
    _lengths: list[int] = field(default_factory=list, init=False)  # of the matches, by row
    _width: int = field(default=1, init=False)
    _gain: float = field(default=1.0, init=False)  # tokens of a row in the last pass

    def choose_width(self, run: OpenRun, most: int) -> int:
        filled = run.rows.origin + run.rows.n_generated[:, None]  # [B, 1]
        tokens = run.rows.tokens[:, : int(filled.max())]
        self._first, lengths = find_suffix(tokens, filled, len(_CHANCES) - 1)
        self._lengths = lengths.where(~run.rows.ended, -1).tolist()
        self._width = self._choose([n for n in self._lengths if n >= 0], most)
        return self._width

    def _choose(self, lengths: list[int], most: int) -> int:
        chances = [self._chance(n) for n in range(len(_CHANCES))]
        gained = [0.0] * most  # by slots: tokens of a row in the mean
        for length in lengths:
            right = 1.0
            for slot in range(1, most):
                right *= chances[min(length + slot - 1, len(chances) - 1)] if length else 0.0
                gained[slot] += right / len(lengths)
        return self.tuner.choose(most, lambda width: (1 + sum(gained[:width])) * (width <= most))

    def _chance(self, length: int) -> float:
        """That the draft behind a match of a length is right."""
        right = _WEIGHT * _CHANCES[length] + self._right[length]
        return right / (_WEIGHT + self._judged[length])

    def propose(self, run: OpenRun) -> Drafts:
        assert self._first is not None
        return Drafts(copy_on(run.frontier(), self._first))

    def accepted(self, run: OpenRun, n_new: Tensor) -> None:
        self._gain = 1.0
        if self._width == 1:
            return
        self._gain = float(n_new.sum() / (n_new > 0).sum().clamp(min=1))
        for n, length in zip(n_new.tolist(), self._lengths, strict=True):
            for slot in range(min(n, self._width - 1) if length > 0 else 0):
                at = min(length + slot, len(_CHANCES) - 1)
                self._judged[at] = _KEPT * self._judged[at] + 1
                self._right[at] = _KEPT * self._right[at] + (slot < n - 1)

    def timed(self, run: OpenRun, seconds: float) -> None:
        self.tuner.add(self._width, seconds, self._gain)
