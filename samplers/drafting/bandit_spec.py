"""BanditSpec: which source drafts, and how many drafts a pass verifies, is learned by a bandit.

Y. Hou et al., "BanditSpec: Adaptive Speculative Decoding via Bandit Algorithms", ICML 2025 (arXiv
2505.15141): configurations of speculative decoding are the arms of a multi-armed bandit, which is
played once a pass; UCBSpec takes the arm whose tokens a pass may be the most.

Departures: what an arm, a source with a width, is worth are the tokens of its passes for their cost
in plain passes, drafting and learning included (`pass_costs.py` in `lengths/`). What is learned of
a source when it drafts is how often its next draft is right, which is also what any width of it is
worth. An arm is played only where all runs of the model, were the pass to gain each row one token
alone, would have lost no more than a share of their tokens ("Conservative Bandits", Y. Wu et al.,
ICML 2016, arXiv 1602.04282). Where no arm is worth a plain pass the sources rest, the longer the
more often. What was learned and lost is kept as long as the model lives. Widths depend on all rows
and on the clock: the source goes with bitwise policies alone.
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
from mmaccel.samplers.drafting.lengths.pass_costs import (
    PLAIN,
    Arm,
    CountedCosts,
    MeasuredCosts,
)
from mmaccel.samplers.drafting.ngram import NGram
from mmaccel.samplers.drafting.token_recycling import TokenRecycling
from mmaccel.samplers.window.window_size import find_calibration

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

    Raises:
        OptionError: a value out of range, or a source that needs more than tokens and scores.
    """

    sources: tuple[DraftSource, ...] = within(
        (NGram(), TokenRecycling()), hint="give draft sources such as (ADED(), STAND())"
    )
    widths: tuple[int, ...] = within((2, 4, 8, 16, 32), 2, 1024, "give (2, 4, 8, 16, 32)")
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
        if not self.sources or len({type(each) for each in self.sources}) < len(self.sources):
            _refuse("sources of different classes", self.sources)
        for each in self.sources:
            if each.reads_last_scores or each.corrects or each.needs_layers or each.other_model:
                _refuse("sources that read tokens and the scores of passes alone", each)
        if not self.widths:
            raise OptionError("BanditSpec.widths: expected a width, received none; give (2, 8, 32)")

    def open(self, run: OpenRun) -> Drafter:
        kind = (self, run.prompt.batch, run.params.guidance_scale, run.params.temperature)
        return BanditDrafter(
            self,
            drafters=tuple(each.open(run) for each in self.sources),
            judgement=find_calibration(run.model, kind, self._make_judgement),
        )

    def _make_judgement(self) -> Judgement:
        if self.token_cost is None:
            return Judgement(MeasuredCosts())
        return Judgement(CountedCosts(self.token_cost))


def _refuse(expected: str, received: object) -> None:
    raise OptionError(
        f"BanditSpec.sources: expected {expected}, received {show(received)}; give for example "
        "(mmaccel.TokenRecycling(), mmaccel.ADED())"
    )


@dataclass
class Judged:
    """How often drafts of a source were right, earlier passes counting less.

    Attributes:
        right: drafts that were accepted, or would have been.
        wrong: first drafts of a window that were not; those behind them are not judged.
    """

    right: float = 0.0
    wrong: float = 0.0

    def hope(self, n_passes: float) -> float:
        """How often the next draft may be right; more than it was, while little is known."""
        n = self.right + self.wrong
        bonus = math.sqrt(math.log(2 + n_passes) / (n + 1)) / 4
        return min((self.right + 0.5) / (n + 1) + bonus, 1.0)


@dataclass
class Judgement:
    """What is known of all sources of a model.

    Attributes:
        costs: of passes.
        sources: by number.
        n_passes: in which something was drafted.
        n_tokens: of runs that have ended.
        lost: plain passes that rows took part in beyond one for each of their tokens.
    """

    costs: CountedCosts | MeasuredCosts
    sources: dict[int, Judged] = field(default_factory=dict)
    n_passes: int = 0
    n_tokens: int = 0
    lost: float = 0.0


@dataclass(eq=False)
class BanditDrafter(Drafter):
    """The bandit in one run.

    Args:
        drafters: of the sources.
        judgement: of this run and earlier ones.
    """

    source: BanditSpec
    drafters: tuple[Drafter, ...]
    judgement: Judgement
    _arm: Arm = field(default=PLAIN, init=False)  # of the present pass
    _drafts: Tensor | None = field(default=None, init=False)  # [B, K], of the present pass
    _gained: tuple[int, int] = field(default=(0, 0), init=False)  # rows and tokens of this pass
    _rests: int = field(default=0, init=False)  # plain passes that are still to come
    _rest: int = field(default=_REST[0], init=False)  # how many there will be next time

    def choose_width(self, run: OpenRun, most: int) -> int:
        """See `Drafter.choose_width`: that of the arm with the most tokens for its cost."""
        if self._rests > 0:
            self._rests -= 1
            self._arm = PLAIN
        else:
            self._arm = self._choose_arm(run, most)
        return self._arm.width

    def _choose_arm(self, run: OpenRun, most: int) -> Arm:
        """What the next pass is, at most `most` wide; after a plain one the sources rest."""
        known = self.judgement
        n_open = max(1, int((~run.rows.ended).sum()))
        n_tokens = known.n_tokens + int(run.buffer.n_generated.sum())
        room = self.source.risk * n_tokens + _LOAN * n_open - known.lost
        best = 1.0  # a plain pass gains one token
        chosen = PLAIN
        for number in range(len(self.drafters)):
            chance = known.sources.get(number, Judged()).hope(known.n_passes)
            for width in self.source.widths:
                if width > most:
                    continue
                hoped, feared = known.costs.expect(Arm(number, width))
                if n_open * (feared - 1) > room + 1e-9:
                    continue
                worth = sum(chance**k for k in range(width)) / hoped
                if worth > best:
                    best = worth
                    chosen = Arm(number, width)
        if chosen == PLAIN:
            self._rests = self._rest - 1
            self._rest = min(2 * self._rest, _REST[1])
        else:
            self._rest = _REST[0]
        return chosen

    def propose(self, run: OpenRun) -> Drafts:
        """See `Drafter.propose`: what the drafter of the played arm proposes."""
        if self._arm == PLAIN:
            return Drafts(run.buffer.tokens[:, :0])
        found = self.drafters[self._arm.source].propose(run)
        self._drafts = found.tokens
        if self._drafts is None:
            assert found.scores is not None
            self._drafts = found.scores.argmax(-1).expand(-1, run.width - 1)
        return Drafts(self._drafts)

    def observe(self, run: OpenRun, scores: PassScores, noise: Tensor | None) -> None:
        """See `Drafter.observe`; all sources learn, but in plain passes."""
        if self._arm == PLAIN:
            return
        for drafter in self.drafters:
            if drafter.source.reads_scores:
                drafter.observe(run, scores, noise)

    def accepted(self, run: OpenRun, n_new: Tensor) -> None:
        """See `Drafter.accepted`: the source that drafted is judged by the accepted tokens."""
        if self._arm == PLAIN:
            return
        for drafter in self.drafters:
            drafter.accepted(run, n_new)
        self._gained = int((n_new > 0).sum()), int(n_new.sum())
        self._judge(run, n_new)

    def timed(self, run: OpenRun, seconds: float) -> None:
        cost = self.judgement.costs.add(self._arm, seconds)
        if self._arm != PLAIN:
            n_rows, n_tokens = self._gained
            self.judgement.lost += n_rows * cost - n_tokens

    def close(self, run: OpenRun) -> None:
        self.judgement.n_tokens += int(run.buffer.n_generated.sum())
        for drafter in self.drafters:
            drafter.close(run)

    def begin_rows(self, run: OpenRun, batch_slots: Tensor) -> None:
        for drafter in self.drafters:
            drafter.begin_rows(run, batch_slots)

    def _judge(self, run: OpenRun, n_new: Tensor) -> None:
        """Count right drafts and first wrong ones, as far as tokens were accepted."""
        assert self._drafts is not None
        tokens = run.buffer.tokens.gather(1, run.buffer.columns[:, :-1])  # [B, K]
        is_known = torch.arange(tokens.shape[1], device=tokens.device) < n_new[:, None]
        is_right = ((self._drafts == tokens) & is_known).long().cumprod(1)
        is_wrong = is_right.sum(1) < is_known.sum(1)
        self.judgement.n_passes += 1
        judged = self.judgement.sources.setdefault(self._arm.source, Judged())
        judged.right = _KEPT * judged.right + float(is_right.sum())
        judged.wrong = _KEPT * judged.wrong + float(is_wrong.sum())
