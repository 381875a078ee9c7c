"""BanditSpec: which source drafts, and how many drafts a pass verifies, is learned by a bandit.

Y. Hou et al., "BanditSpec: Adaptive Speculative Decoding via Bandit Algorithms", ICML 2025 (arXiv
2505.15141): configurations of speculative decoding are the arms of a multi-armed bandit, which is
played once a pass; UCBSpec takes the arm whose tokens a pass may be the most.

Departures: what an arm, a source with a width, is worth are the tokens of its passes for their cost
in plain passes, drafting and learning included (`mmaccel.samplers.drafting.pass_costs`). What is
learned of a source when it drafts is how often its next draft is right, which is also what any
width of it is worth. An arm is played only where no row, were the pass to gain it one token alone,
would have cost more than it is allowed to lose, a share of its length ("Conservative Bandits",
Y. Wu et al., ICML 2016, arXiv 1602.04282). Where no arm is worth a plain pass the sources rest, the
longer the more often. What was learned is kept as long as the model lives. Widths depend on all
rows and on the clock: the source goes with bitwise policies alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmaccel.checks import check_number, show
from mmaccel.errors import OptionError
from mmaccel.samplers.drafting.contract import (
    Drafter,
    Drafts,
    DraftSource,
    OpenRun,
    PassScores,
)
from mmaccel.samplers.drafting.memory.aded import ADED
from mmaccel.samplers.drafting.memory.stand import STAND
from mmaccel.samplers.drafting.pass_costs import PLAIN, Arm, Costs, CountedCosts, MeasuredCosts
from mmaccel.samplers.drafting.token_recycling import TokenRecycling
from mmaccel.samplers.window.window_size import find_calibration

if TYPE_CHECKING:
    from mmaccel.samplers.window.step_state import Held

_KEPT = 0.98  # of what was counted before a pass: texts change
_REST = (4, 64)  # plain passes before arms are compared again: at first, and at most


@dataclass(frozen=True)
class BanditSpec(DraftSource):
    """The source and the width that have gained most for their cost.

    Args:
        sources: that may draft, each of another class.
        widths: tokens of a pass that are tried beside 1; those beyond the policy's window are not.
        risk: by how much a row may cost more than at window 1, as a share of its length.
        token_cost: what a further token of a pass costs, as a share of a pass of one. None: what
            passes cost is measured. With a number passes are the same in every run.

    Raises:
        OptionError: a value out of range, or a source that needs more than tokens and scores.
    """

    sources: tuple[DraftSource, ...] = (ADED(), TokenRecycling(), STAND())
    widths: tuple[int, ...] = (2, 4, 8, 16, 32)
    risk: float = 0.03
    token_cost: float | None = None

    only_bitwise = True
    keeps_predictions = False
    reads_last_scores = False
    reads_scores = True
    name = "bandit"

    def __post_init__(self) -> None:
        if self.token_cost is not None:
            check_number("BanditSpec.token_cost", self.token_cost, 0, 1, "0.03 suits small models")
        check_number("BanditSpec.risk", self.risk, 0, 1, "try 0.03")
        given = self.sources if isinstance(self.sources, tuple) else ()
        if not given or len({type(each) for each in given}) < len(given):
            _refuse("sources of different classes", self.sources)
        for each in given:
            if not isinstance(each, DraftSource):
                _refuse("draft sources", each)
            if each.reads_last_scores or each.corrects or each.needs_layers or each.has_model:
                _refuse("sources that read tokens and the scores of passes alone", each)
        is_width = [isinstance(each, int) and 2 <= each <= 1024 for each in self.widths]
        if not is_width or not all(is_width):
            raise OptionError(
                f"BanditSpec.widths: expected integers of 2 to 1024, received {show(self.widths)}; "
                "give (2, 4, 8, 16, 32)"
            )

    def open(self, run: OpenRun) -> Drafter:
        kind = (self, run.prompt.batch, run.params.guidance_scale, run.params.temperature)
        return BanditDrafter(
            self,
            drafters=tuple(each.open(run) for each in self.sources),
            judgement=find_calibration(run.model, kind, self._make_judgement),
            debt=run.state.declare("what rows are behind plain decoding"),
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
    """

    costs: Costs
    sources: dict[int, Judged] = field(default_factory=dict)
    n_passes: int = 0


@dataclass(eq=False)
class BanditDrafter(Drafter):
    """The bandit in one run.

    Args:
        drafters: of the sources.
        judgement: of this run and earlier ones.
        debt: `[B]` float64, the cost of a row's passes so far less its tokens.
    """

    source: BanditSpec
    drafters: tuple[Drafter, ...]
    judgement: Judgement
    debt: Held
    _arm: Arm = field(default=PLAIN, init=False)  # of the present pass
    _drafts: Tensor | None = field(default=None, init=False)  # [B, K], of the present pass
    _rests: int = field(default=0, init=False)  # plain passes that are still to come
    _rest: int = field(default=_REST[0], init=False)  # how many there will be next time

    def choose_width(self, run: OpenRun, most: int) -> int:
        """See `Drafter.choose_width`: that of the arm with the most tokens for its cost."""
        if self._rests > 0:
            self._rests -= 1
            self._arm = PLAIN
        else:
            self._arm = self._choose_arm(run, most)
        self.judgement.costs.begin(self._arm)
        return self._arm.width

    def _choose_arm(self, run: OpenRun, most: int) -> Arm:
        """What the next pass is, at most `most` wide; after a plain one the sources rest."""
        allowed = self.source.risk * run.length - self._debt(run)
        room = float(allowed.masked_fill(run.rows.ended, math.inf).min())
        best = 1.0  # a plain pass gains one token
        chosen = PLAIN
        for number in range(len(self.drafters)):
            judged = self.judgement.sources.get(number, Judged())
            chance = judged.hope(self.judgement.n_passes)
            for width in self.source.widths:
                hoped, feared = self.judgement.costs.expect(Arm(number, width))
                if width > most or feared - 1 > room + 1e-9:
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
        _, feared = self.judgement.costs.expect(self._arm)
        self.debt.hold(self._debt(run) + (feared - n_new) * (n_new > 0))
        self._judge(run, n_new)

    def close(self, run: OpenRun) -> None:
        """See `Drafter.close`."""
        self.judgement.costs.pause()
        for drafter in self.drafters:
            drafter.close(run)

    def begin_rows(self, run: OpenRun, batch_slots: Tensor) -> None:
        """See `Drafter.begin_rows`."""
        for drafter in self.drafters:
            drafter.begin_rows(run, batch_slots)
        if self.debt.value is not None:
            self.debt.get()[batch_slots] = 0.0

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

    def _debt(self, run: OpenRun) -> Tensor:
        found = self.debt.value
        if found is None:
            return torch.zeros(run.prompt.batch, dtype=torch.float64, device=run.model.device)
        return found
