"""Lossless unmasking: several slots a pass, and the tokens of stepwise decoding.

S. Wu, J. Zhang, "Free Draft-and-Verification: Toward Lossless Parallel Decoding for Diffusion Large
Language Models" (FreeDave), 2025, arXiv 2510.00294 (nested drafts, verified in one batched pass),
and Y. Gao et al., "Self Speculative Decoding for Diffusion Large Language Models", 2025, arXiv
2510.04147.

The last predictions guess which slots stepwise decoding commits next, with which tokens: canvases
d1, d2, ..., each with one more, all in one pass. d1 is certain; d(k+1) is right as long as it is
what stepwise decoding makes of d(k).

Departures: it holds at any temperature: every slot has frozen Gumbel noise of its own, used once,
and the choice of slots does not depend on what is drawn, so that the stepwise result is a function
of the canvas. Where the order does not depend on logits, guesses of a rejected draft are reused
("carried"). The number of drafts, on which no token depends, may be chosen by measured cost.
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

_STRETCH = 64  # columns within which passes are taken to cost the same
_ORDERS = tuple(order for order in ORDERS if order != "sampled")
_HINT = "4 to 16 suits most, and 'auto' chooses by measured cost"


@dataclass(frozen=True)
class LosslessUnmask(RunPolicy):
    """The tokens of `Stepwise` with the same order, block, cache and seed, in fewer passes: nested
    guesses of what stepwise decoding does next, verified in one pass.

    Args:
        drafts: canvases that a pass computes, 1..256, of which 1 is `Stepwise`; or "auto" to choose
            1, 2, 4 or 8 by measured cost. `stats.drafts` says what was chosen.
        order: which slot is next, as in `Stepwise`, but not "sampled".
        block, cache: as in `Stepwise`.
        layout: canvases of a pass as "rows" of a batch, or as "entries" of one row, which share
            what is cached; None takes entries where a cache is kept and rows otherwise.

    Memory: a pass has room for `drafts` canvases, 8 with "auto".
    Loses: in seconds where several canvases cost as many times one (a CPU): "auto" then stays at 1
    and loses 2 % at most; in orders that depend on logits; with `cache="block"` in ragged batches.
    Figures: passes 256 to 42 on `scenes-masked` (Halton), 170 by confidence; 14.3 to 5.5 on
    `grammar-masked`.
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

    def open(self, model: Denoiser, prompt: Prompt, length: int, **options: Any) -> CanvasRun:
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
        order = run.order(self.order)
        counts = self.draft_counts(run)
        carried = None
        with run.interruptible():
            predictions = run.forward() if run.sync() else None
            while predictions is not None:
                run.commit(predictions, order.first(predictions))
                if not run.sync():
                    break
                if run.has_new_rows or run.model_pass.is_refresh_due(run.canvas):
                    predictions, carried = run.forward(), None  # which may write to the cache
                    continue
                rows = run.model_pass.n_rows
                number = int(self.drafts) if counts is None else counts.choose(rows)
                began = time.perf_counter()
                n_right = torch.zeros_like(run.canvas.limit)
                if number == 1:
                    predictions, carried = run.forward(), None
                else:
                    predictions, carried, n_right = verify_drafts(
                        run, order, predictions, carried, number
                    )
                if counts is not None:
                    gains = mean_gains(run, number, n_right)  # waits for the pass
                    counts.observe(number, gains, time.perf_counter() - began)
        run.stats.drafts = "" if counts is None else counts.describe()
        return run.generation()


def mean_gains(run: CanvasRun, number: int, n_right: Tensor) -> list[float]:
    """Slots that a row gains on average in the last pass and the commit after it, with 1, 2, 4, …
    of its canvases; `n_right` `[B]` drafts were right.
    """
    right = [n_right.clamp(max=tried - 1).sum() for tried in CANDIDATES if tried <= number]
    n_live, *totals = torch.stack([run.canvas.is_live.sum(), *right]).tolist()
    return [1 + total / n_live for total in totals]


def verify_drafts(
    run: CanvasRun, order: Order, before: SlotPredictions, carried: Tensor | None, length: int
) -> tuple[SlotPredictions, Tensor | None, Tensor]:
    """One pass over K nested drafts, after which the run goes on from the last one that is right.

    The run's canvas is the first draft; `before` are predictions of the canvas before its last
    commit, `carried` `[B, Q]` int64 better guesses of tokens, or None. Returns predictions of the
    canvas, guesses `[B, Q]` for the next drafts or None, and `[B]` int64, drafts that were right.
    """
    assert before.drawn is not None
    canvas, model_pass = run.canvas, run.model_pass
    is_open = before.is_open & canvas.active().gather(1, before.slots)  # [B, Q]
    indices = order.argsort(replace(before, is_open=is_open))
    rank = torch.empty_like(indices)
    rank.scatter_(1, indices, torch.arange(indices.shape[1], device=rank.device).expand_as(rank))
    most = model_pass.commits_before_refresh(canvas, length - 1)  # [B]
    usable = torch.minimum(is_open.sum(1) - 1, most)  # the block's last slot is left open
    # [B, Q], slot is committed from draft step + 1 on; K where it is in no draft
    step = torch.where(is_open & (rank < usable[:, None]), rank, length)
    tokens = before.drawn if carried is None else carried
    drafts = canvas.copies(length)
    index = torch.arange(length, device=step.device)[:, None, None]
    run.commit_on(drafts, (step < index).flatten(0, 1), tokens.repeat(length, 1))
    together, n_entries = model_pass.forward(drafts, length)
    run.bound.count_pass(n_entries, length * model_pass.n_rows)
    views = together.split(length)
    right = []  # whether draft k + 1 is what stepwise decoding makes of draft k
    for k, view in enumerate(views[:-1]):
        drafted = step == k
        is_next = (order.first(view) == drafted).all(1) & drafted.any(1)
        right.append(is_next & ((view.drawn == tokens) | ~drafted).all(1))
    n_right = torch.stack([*right, torch.zeros_like(right[0])]).int().cumprod(0).sum(0)
    n_committed = canvas.is_committed.sum(1)
    canvas.take(drafts, n_right)
    run.bound.add_gain(canvas.is_committed.sum(1) - n_committed)  # with the next `commit`
    predictions = SlotPredictions.pick(views, n_right)
    if order.ranks is None or predictions.drawn is None:  # the order may change
        return predictions, None, n_right
    drawn = torch.stack([view.drawn for view in views if view.drawn is not None])  # [K, B, Q]
    guess = drawn.gather(0, step.clamp(max=length - 1)[None])[0]  # in the draft before each slot
    guess = torch.where(guess < 0, predictions.drawn, guess)  # closed in a wrong draft
    return predictions, guess, n_right
