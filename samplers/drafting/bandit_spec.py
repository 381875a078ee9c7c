"""BanditSpec: which source drafts, and how many drafts a pass verifies, is learned by a bandit.

Y. Hou et al., "BanditSpec: Adaptive Speculative Decoding via Bandit Algorithms", ICML 2025 (arXiv
2505.15141): configurations of speculative decoding are the arms of a multi-armed bandit, which is
played once a pass; UCBSpec takes the arm whose tokens a pass may be the most.

Departures: an arm, a source with a width, is worth the tokens of its passes for their cost in plain
passes, drafting and learning included (`mmaccel.samplers.tuner`); what is learned of a source is
how often its next draft is right. An arm is played only where all runs of the model, were the pass
to gain each row one token alone, would have lost no more than a share of their tokens
("Conservative Bandits", Y. Wu et al., ICML 2016, arXiv 1602.04282); where none is worth a plain
pass the sources rest. Widths depend on all rows and on the clock: bitwise policies alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmaccel.checks import show, within
from mmaccel.errors import OptionError
from mmaccel.samplers.drafting.contract import (
    Drafter,
    Drafts,
    DraftSource,
    OpenRun,
    PassScores,
)
from mmaccel.samplers.drafting.ngram import NGram
from mmaccel.samplers.drafting.token_recycling import TokenRecycling
from mmaccel.samplers.tuner import STALE, Tuner, keep

_KEPT = 0.98  # of what was counted before a pass: texts change
_LOAN = 4.0  # plain passes that may be lost before any token was made, once in a model's life
_REST = (4, 64)  # plain passes before arms are compared again: at first, and at most


@dataclass(frozen=True)
class BanditSpec(DraftSource):
    """The source and the width that have gained most for their cost.

    Args:
        sources: that may draft, each of another class.
        widths: tokens of a pass that are tried beside 1; those beyond the policy's window are not.
        risk: by how much all runs of a model may cost more than at window 1, as a share; beside
            four plain passes at the beginning.
        token_cost: what a further token of a pass costs, as a share of a pass of one. None: what
            passes cost is measured. With a number passes are the same in every run.

    Loses: in short passes on a CPU, where choosing costs what it saves.
    Figures: `stdlib`, window 6, greedy: 2.91 tokens a pass and 1.57 times as fast as `generate`
    (`ngram` alone 2.75).
    """

    sources: tuple[DraftSource, ...] = within(
        (NGram(), TokenRecycling()), hint="give draft sources such as (ADED(), STAND())", fewest=1
    )
    widths: tuple[int, ...] = within((2, 4, 8, 16, 32), 2, 1024, "give (2, 4, 8, 16, 32)", fewest=1)
    risk: float = within(0.03, 0, 1, "try 0.03")
    token_cost: float | None = within(None, 0, 1, "0.03 suits small models")

    only_bitwise = True
    chooses_widths = True
    keeps_predictions = False
    reads_last_scores = False
    reads_scores = True
    name = "bandit"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len({type(each) for each in self.sources}) < len(self.sources):
            _refuse("sources of different classes", self.sources)
        for each in self.sources:
            if each.reads_last_scores or each.corrects or each.needs_layers or each.other_model:
                _refuse("sources that read tokens and the scores of passes alone", each)

    def open(self, run: OpenRun) -> Drafter:
        conditions = (self, run.prompt.batch, run.params.guidance_scale, run.params.temperature)
        return BanditDrafter(
            self,
            drafters=tuple(each.open(run) for each in self.sources),
            judged=keep(run.model, conditions, lambda: [self._judge() for _ in self.sources]),
        )

    def _judge(self) -> Judged:
        share = len(self.sources)
        tuner = Tuner(
            (1, *sorted(self.widths)),
            self.token_cost,
            risk=self.risk / share,
            loan=_LOAN / share,
            stale=STALE,
        )
        return Judged(tuner)


def _refuse(expected: str, received: object) -> None:
    raise OptionError(
        f"BanditSpec.sources: expected {expected}, received {show(received)}; give for example "
        "(mmaccel.TokenRecycling(), mmaccel.ADED())"
    )


@dataclass
class Judged:
    """What is known of a source; of its drafts earlier ones count less."""

    tuner: Tuner  # of its widths
    right: float = 0.0  # drafts that were accepted, or would have been
    wrong: float = 0.0  # first drafts of a window that were not; those behind are not judged
    n_passes: int = 0  # in which any source drafted

    def hope(self) -> float:
        """How often the next draft may be right; more than it was, while little is known."""
        n = self.right + self.wrong
        bonus = math.sqrt(math.log(2 + self.n_passes) / (n + 1)) / 4
        return min((self.right + 0.5) / (n + 1) + bonus, 1.0)


@dataclass(eq=False)
class BanditDrafter(Drafter):
    source: BanditSpec
    drafters: tuple[Drafter, ...]
    judged: list[Judged]  # what is known of each source, from earlier runs too
    _number: int = field(default=0, init=False)  # of the source that drafts in the present pass
    _width: int = field(default=1, init=False)  # of the pass; 1: no source drafts or learns
    _drafts: Tensor | None = field(default=None, init=False)  # [B, K], of the present pass
    _gain: float = field(default=1.0, init=False)  # tokens of a row in the present pass
    _rests: int = field(default=0, init=False)  # plain passes that are still to come
    _rest: int = field(default=_REST[0], init=False)  # how many there will be next time

    def choose_width(self, run: OpenRun, most: int) -> int:
        self._width = 1
        self._gain = 1.0
        if self._rests > 0:
            self._rests -= 1
            return 1
        best = 1.0  # a plain pass gains one token
        for number, judged in enumerate(self.judged):
            chance = judged.hope()

            def gain(width: int, chance: float = chance) -> float:
                return sum(chance**k for k in range(width)) if width <= most else 0.0

            width = judged.tuner.choose(most, gain)
            worth = gain(width) / judged.tuner.expect(width)[0]
            if worth > best:
                best = worth
                self._number, self._width = number, width
        if self._width == 1:
            self._rests = self._rest - 1
            self._rest = min(2 * self._rest, _REST[1])
        else:
            self._rest = _REST[0]
        return self._width

    def propose(self, run: OpenRun) -> Drafts:
        if self._width == 1:
            return Drafts(run.rows.tokens[:, :0])
        proposed = self.drafters[self._number].propose(run)
        self._drafts = proposed.tokens
        if self._drafts is None:
            assert proposed.scores is not None
            self._drafts = proposed.scores.argmax(-1).expand(-1, run.width - 1)
        return Drafts(self._drafts)

    def observe(self, run: OpenRun, scores: PassScores, noise: Tensor | None) -> None:
        if self._width == 1:
            return
        for drafter in self.drafters:
            if drafter.source.reads_scores:
                drafter.observe(run, scores, noise)

    def accepted(self, run: OpenRun, n_new: Tensor) -> None:
        if self._width == 1:
            return
        for drafter in self.drafters:
            drafter.accepted(run, n_new)
        self._gain = float(n_new.sum() / (n_new > 0).sum().clamp(min=1))

        # the source that drafted is judged: right drafts, and the first wrong one, as far as tokens
        # were accepted
        assert self._drafts is not None
        tokens = run.rows.tokens.gather(1, run.rows.columns[:, :-1])  # [B, K]
        is_known = torch.arange(tokens.shape[1], device=tokens.device) < n_new[:, None]
        is_right = ((self._drafts == tokens) & is_known).long().cumprod(1)
        is_wrong = is_right.sum(1) < is_known.sum(1)
        for each in self.judged:
            each.n_passes += 1
        judged = self.judged[self._number]
        judged.right = _KEPT * judged.right + float(is_right.sum())
        judged.wrong = _KEPT * judged.wrong + float(is_wrong.sum())

    def timed(self, run: OpenRun, seconds: float) -> None:
        for number, judged in enumerate(self.judged):
            if self._width == 1 or number == self._number:
                judged.tuner.add(self._width, seconds, self._gain)

    def close(self, run: OpenRun) -> None:
        for drafter in self.drafters:
            drafter.close(run)

    def begin_rows(self, run: OpenRun, batch_slots: Tensor) -> None:
        for drafter in self.drafters:
            drafter.begin_rows(run, batch_slots)
