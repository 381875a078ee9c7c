"""BanditSpec: which source drafts, and how many drafts a pass verifies, is learned by a bandit.

Y. Hou et al., "BanditSpec: Adaptive Speculative Decoding via Bandit Algorithms", ICML 2025 (arXiv
2505.15141): configurations of speculative decoding are the arms of a multi-armed bandit, which is
played once a pass; UCBSpec takes the arm whose tokens a pass may be the most.

Departures: an arm is a source with a width. What it is worth are the tokens of a pass for its cost,
in passes of width 1: 1 + `token_cost` for each further token. All sources draft for every pass, and
the accepted tokens judge them all ("Not-a-Bandit", H. Liu et al., ICLR 2026): what is learned of a
source is how often its next draft is right, which is also what any width of it is worth. An arm is
played only where no row, were the pass to gain it one token alone, would have cost more than 1 +
`risk` passes of width 1 for each of its tokens ("Conservative Bandits", Y. Wu et al., ICML 2016,
arXiv 1602.04282). What was learned is kept as long as the model lives. Widths depend on all rows:
the source goes with bitwise policies alone.
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
from mmaccel.samplers.drafting.token_recycling import TokenRecycling
from mmaccel.samplers.window.window_size import find_calibration

if TYPE_CHECKING:
    from mmaccel.samplers.window.step_state import Held

_KEPT = 0.98  # of what was counted before a pass: texts change


@dataclass(frozen=True)
class BanditSpec(DraftSource):
    """The source and the width that have gained most for their cost.

    Args:
        sources: that may draft, each of another class.
        widths: tokens of a pass that are tried beside 1; those beyond the policy's window are not.
        token_cost: what a further token of a pass costs, as a share of a pass of one.
        risk: by how much a row may cost more than at window 1, as a share, at any time.

    Raises:
        OptionError: a value out of range, or a source that needs more than tokens and scores.
    """

    sources: tuple[DraftSource, ...] = (STAND(), TokenRecycling(), ADED())
    widths: tuple[int, ...] = (2, 4, 8, 16, 32)
    token_cost: float = 0.03
    risk: float = 0.03

    only_bitwise = True
    keeps_predictions = False
    reads_last_scores = False
    reads_scores = True
    name = "bandit"

    def __post_init__(self) -> None:
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
            judgement=find_calibration(run.model, kind, Judgement),
            debt=run.state.declare("what rows are behind plain decoding"),
        )


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
        sources: by number.
        n_passes: that were judged.
    """

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
    _played: int = field(default=0, init=False)  # number of the source that drafts
    _proposed: tuple[Tensor, ...] = field(default=(), init=False)  # [B, K] of each source

    def choose_width(self, run: OpenRun, most: int) -> int:
        """See `Drafter.choose_width`: that of the arm with the most tokens for its cost."""
        allowed = self.source.risk * run.buffer.n_generated.double() - self._debt(run)
        room = float(allowed.masked_fill(run.rows.ended, math.inf).min())
        best = 1.0  # a pass of width 1 gains one token
        chosen = 1
        for number in range(len(self.drafters)):
            judged = self.judgement.sources.get(number, Judged())
            chance = judged.hope(self.judgement.n_passes)
            for width in self.source.widths:
                cost = self._cost(width)
                if width > most or cost - 1 > room + 1e-9:
                    continue
                worth = sum(chance**k for k in range(width)) / cost
                if worth > best:
                    best = worth
                    chosen = width
                    self._played = number
        return chosen

    def propose(self, run: OpenRun) -> Drafts:
        """See `Drafter.propose`: what the drafter of the played arm proposes."""
        proposed = []
        for drafter in self.drafters:
            found = drafter.propose(run)
            tokens = found.tokens
            if tokens is None:
                assert found.scores is not None
                tokens = found.scores.argmax(-1).expand(-1, run.width - 1)
            proposed.append(tokens)
        self._proposed = tuple(proposed)
        return Drafts(proposed[self._played])

    def observe(self, run: OpenRun, scores: PassScores, noise: Tensor | None) -> None:
        """See `Drafter.observe`; all sources learn from all passes."""
        for drafter in self.drafters:
            if drafter.source.reads_scores:
                drafter.observe(run, scores, noise)

    def accepted(self, run: OpenRun, n_new: Tensor) -> None:
        """See `Drafter.accepted`: all sources are judged by the accepted tokens."""
        for drafter in self.drafters:
            drafter.accepted(run, n_new)
        is_open = n_new > 0
        debt = self._debt(run) + (self._cost(run.width) - n_new) * is_open
        self.debt.hold(debt)
        if run.width > 1:
            self._judge(run, n_new)

    def close(self, run: OpenRun) -> None:
        """See `Drafter.close`."""
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
        tokens = run.buffer.tokens.gather(1, run.buffer.columns[:, :-1])  # [B, K]
        is_known = torch.arange(tokens.shape[1], device=tokens.device) < n_new[:, None]
        self.judgement.n_passes += 1
        for number, proposed in enumerate(self._proposed):
            is_right = ((proposed == tokens) & is_known).long().cumprod(1)
            is_wrong = is_right.sum(1) < is_known.sum(1)
            judged = self.judgement.sources.setdefault(number, Judged())
            judged.right = _KEPT * judged.right + float(is_right.sum())
            judged.wrong = _KEPT * judged.wrong + float(is_wrong.sum())

    def _cost(self, width: int) -> float:
        """Of a pass, in passes of width 1."""
        return 1 + self.source.token_cost * (width - 1)

    def _debt(self, run: OpenRun) -> Tensor:
        found = self.debt.value
        if found is None:
            return torch.zeros(run.prompt.batch, dtype=torch.float64, device=run.model.device)
        return found
