"""Lossless unmasking: several slots a pass, and the tokens of stepwise decoding.

S. Wu, J. Zhang, "Free Draft-and-Verification: Toward Lossless Parallel Decoding for Diffusion Large
Language Models" (FreeDave), 2025, arXiv 2510.00294 (nested drafts, verified in one batched pass),
and Y. Gao et al., "Self Speculative Decoding for Diffusion Large Language Models", 2025, arXiv
2510.04147.

From the last predictions guess the next slots that stepwise decoding will commit and their tokens:
canvases d1, d2, ..., each with one more. One pass predicts all of them. d1 is certain; d(k+1) is
right as long as it is what stepwise decoding makes of d(k).

Departures: it holds at any temperature. Every slot has Gumbel noise of its own, frozen for the run,
and the choice of slots does not depend on what is drawn, so that the stepwise result is a function
of the canvas, and equality can be checked token by token. Every slot's noise is used once, when it
is committed, so that the distribution is that of fresh noise. Where the order does not depend on
logits, guesses of a rejected draft are reused for the next one ("carried"), as in Jacobi decoding.
The number of drafts may be chosen by measured cost (`mmaccel.samplers.canvas.draft_count`): the
tokens do not depend on it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmaccel.capabilities import NOTHING, Words
from mmaccel.checks import one_of, show, within
from mmaccel.contracts import Denoiser, Prompt
from mmaccel.errors import OptionError
from mmaccel.results import Exactness, Generation
from mmaccel.samplers.canvas.cache_plan import CachePlan, as_plan
from mmaccel.samplers.canvas.draft_count import CANDIDATES, MeasuredDrafts
from mmaccel.samplers.canvas.orders import ORDERS, Order
from mmaccel.samplers.canvas.policy import RunPolicy
from mmaccel.samplers.canvas.predictions import SlotPredictions
from mmaccel.samplers.canvas.run import CanvasRun
from mmaccel.samplers.canvas.state import Canvas

_STRETCH = 64  # columns within which passes are taken to cost the same


_ORDERS = tuple(order for order in ORDERS if order != "sampled")
_HINT = "4 to 16 suits most, and 'auto' chooses by measured cost"


@dataclass(frozen=True)
class LosslessUnmask(RunPolicy):
    """The tokens of `Stepwise` with the same order, block, cache and seed, in fewer passes.

    Args:
        drafts: canvases that a pass computes, 1..256, of which 1 is `Stepwise`; or "auto" to choose
            1, 2, 4 or 8 by measured cost. `stats.drafts` says what was chosen.
        order: which slot is next, as in `Stepwise`, but not "sampled".
        block, cache: as in `Stepwise`.
        layout: canvases of a pass as "rows" of a batch, or as "entries" of one row, which share
            what is cached; None takes entries where a cache is kept and rows otherwise.
    """

    drafts: int | str = within("auto", 1, 256, _HINT, words=("auto",))
    order: str = one_of("auto", _ORDERS, "what was drawn must not decide it; choose 'confidence'")
    block: int | None = within(None, 1, hint="None takes the whole canvas, or the model's own")
    cache: CachePlan | str = "none"
    layout: str | None = one_of(None, ("rows", "entries"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layout == "rows" and as_plan(self.cache).reuses:
            raise OptionError(
                "layout: expected 'entries', 'rows' (without a cache) or None, received "
                f"{show(self.layout)} with cache {as_plan(self.cache).kind!r}; None chooses"
            )

    @property
    def exactness(self) -> Exactness:
        """Bitwise as `Stepwise`; with a stale cache its own distribution is not the model's."""
        return "bitwise" if as_plan(self.cache).is_exact else "relaxed"

    @property
    def needs(self) -> Words:
        shared = frozenset({"kept entries"}) if self.layout == "entries" else NOTHING
        return super().needs | {"verified canvases"} | shared

    @property
    def run_type(self) -> type[CanvasRun]:
        return DraftRun

    def open(self, model: Denoiser, prompt: Prompt, length: int, **options: Any) -> CanvasRun:
        """A run of this policy, before its first pass."""
        layout = self.layout or ("entries" if as_plan(self.cache).reuses else "rows")
        most = CANDIDATES[-1] if self.drafts == "auto" else int(self.drafts)
        return super().open(model, prompt, length, copies=most, layout=layout, **options)

    def draft_counts(self, run: CanvasRun) -> MeasuredDrafts | None:
        """What measures how many canvases each pass of a run computes; None where it is fixed."""
        if self.drafts != "auto":
            return None
        model_pass = run.model_pass
        columns = model_pass.columns
        conditions = (self, model_pass.params, columns.branches, columns.n // _STRETCH)
        return MeasuredDrafts(model_pass.model, conditions, run.canvas.length)

    def decode(self, run: CanvasRun) -> Generation:
        """Fill the canvas of a run of this policy."""
        assert isinstance(run, DraftRun)
        order = run.order(self.order)
        counts = self.draft_counts(run)
        carried = None
        with run.interruptible():
            predictions = run.forward() if run.sync() else None
            while predictions is not None:
                run.commit(predictions, order.first(predictions))
                if not run.sync():
                    break
                if run.needs_single_pass:
                    predictions = run.forward()
                    carried = None
                    continue
                rows = run.model_pass.n_rows
                number = int(self.drafts) if counts is None else counts.choose(rows)
                began = time.perf_counter()
                n_right = torch.zeros_like(run.canvas.limit)
                if number == 1:
                    predictions = run.forward()
                    carried = None
                else:
                    chain = DraftChain(run, order, predictions, carried, number)
                    predictions, carried, n_right = chain.verify()
                if counts is not None:
                    gains = run.mean_gains(number, n_right)  # waits for the pass
                    counts.observe(number, gains, time.perf_counter() - began)
        run.stats.drafts = "" if counts is None else counts.describe()
        return run.generation()


class DraftRun(CanvasRun):
    """A run that computes several canvases in one pass and goes on from one of them; the same
    arguments as `CanvasRun`.
    """

    @property
    def needs_single_pass(self) -> bool:
        """Whether the next pass writes to the cache, or is some row's first: it takes one canvas
        only.
        """
        return self.has_new_rows or self.model_pass.is_refresh_due(self.canvas)

    def forward_drafts(self, drafts: Canvas, copies: int) -> list[SlotPredictions]:
        """One pass over several canvases at once.

        Args:
            drafts: `[K * B]` rows, copies of the canvas with more committed in the active block.
            copies: K.

        Returns:
            SlotPredictions `[B, Q]` of each.
        """
        predictions, n_entries = self.model_pass.forward(drafts, copies)
        self.bound.count_pass(n_entries, copies * self.model_pass.n_rows)
        return predictions.split(copies)

    def accept(self, drafts: Canvas, index: Tensor) -> None:
        """Go on from one of the copies `[K * B]` of a pass, `index` `[B]` in 0..K-1.

        What it has committed is counted with the next `commit`.
        """
        before = self.canvas.is_committed.sum(1)
        self.canvas.take(drafts, index)
        self.bound.add_gain(self.canvas.is_committed.sum(1) - before)

    def mean_gains(self, number: int, n_right: Tensor) -> list[float]:
        """Slots that a row gains on average in the last pass and the commit after it, with 1, 2,
        4, ... canvases up to `number`. Cost: one host synchronisation.

        Args:
            number: canvases of the pass.
            n_right: `[B]` int64, drafts that were right.
        """
        right = [n_right.clamp(max=tried - 1).sum() for tried in CANDIDATES if tried <= number]
        n_live, *totals = torch.stack([self.canvas.is_live.sum(), *right]).tolist()
        return [1 + total / n_live for total in totals]

    def still_open(self, predictions: SlotPredictions) -> Tensor:
        """`[B, Q]` bool, slots of `predictions` that are still open in the same active block."""
        return predictions.is_open & self.canvas.active().gather(1, predictions.slots)


class DraftChain:
    """Nested drafts, beginning with the run's canvas.

    Args:
        run: its canvas is the first draft.
        order: of the slots.
        predictions: of the canvas before its last commit.
        carried: `[B, Q]` int64, better guesses of tokens than those of `predictions`, or None.
        length: K, drafts.
    """

    def __init__(
        self,
        run: DraftRun,
        order: Order,
        predictions: SlotPredictions,
        carried: Tensor | None,
        length: int,
    ) -> None:
        assert predictions.drawn is not None
        self._run, self._order, self._length = run, order, length
        is_open = run.still_open(predictions)  # [B, Q]
        indices = order.argsort(replace(predictions, is_open=is_open))  # [B, Q]
        steps = torch.arange(indices.shape[1], device=indices.device).expand_as(indices)
        step = torch.empty_like(indices).scatter_(1, indices, steps)
        most = run.model_pass.commits_before_refresh(run.canvas, length - 1)  # [B]
        usable = torch.minimum(is_open.sum(1) - 1, most)  # the block's last slot is left open
        # [B, Q], slot is committed from draft step + 1 on; K where it is in no draft
        self._step = torch.where(is_open & (step < usable[:, None]), step, length)
        self._tokens = predictions.drawn if carried is None else carried

    def verify(self) -> tuple[SlotPredictions, Tensor | None, Tensor]:
        """One pass; the run goes on from the last draft that is right.

        Returns:
            SlotPredictions of the canvas, guesses `[B, Q]` for the next chain or None, and `[B]`
            int64, drafts that were right.
        """
        run = self._run
        length = self._length
        drafts = run.canvas.copies(length)
        index = torch.arange(length, device=self._step.device)[:, None, None]
        chosen = (self._step < index).flatten(0, 1)  # [K * B, Q]
        run.commit_on(drafts, chosen, self._tokens.repeat(length, 1))
        views = run.forward_drafts(drafts, length)
        right = [self._is_right(view, k) for k, view in enumerate(views[:-1])]
        n_right = torch.stack([*right, torch.zeros_like(right[0])]).int().cumprod(0).sum(0)
        run.accept(drafts, n_right)
        predictions = SlotPredictions.pick(views, n_right)
        return predictions, self._carry(views, predictions), n_right

    def _is_right(self, view: SlotPredictions, k: int) -> Tensor:
        """`[B]` bool, whether draft k + 1 is what stepwise decoding makes of draft k."""
        assert view.drawn is not None
        wanted = self._order.first(view)  # [B, Q]
        drafted = self._step == k
        same = (wanted == drafted).all(1) & drafted.any(1)
        return same & ((view.drawn == self._tokens) | ~drafted).all(1)

    def _carry(self, views: list[SlotPredictions], predictions: SlotPredictions) -> Tensor | None:
        """What each slot drew in the draft before it; None where the order may change."""
        if self._order.ranks is None or predictions.drawn is None:
            return None
        drawn = torch.stack([view.drawn for view in views if view.drawn is not None])  # [K, B, Q]
        source = self._step.clamp(max=self._length - 1)
        guess = drawn.gather(0, source[None])[0]
        return torch.where(guess < 0, predictions.drawn, guess)  # closed in a wrong draft
