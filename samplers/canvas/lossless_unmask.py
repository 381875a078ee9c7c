"""Lossless unmasking: several slots a pass, and the tokens of stepwise decoding.

S. Wu, J. Zhang, "Free Draft-and-Verification: Toward Lossless Parallel Decoding for Diffusion Large
Language Models" (FreeDave), 2025, arXiv 2510.00294 (nested drafts, verified in one batched pass),
and Y. Gao et al., "Self Speculative Decoding for Diffusion Large Language Models", 2025, arXiv
2510.04147.

From what is known of a canvas guess the next slots that stepwise decoding will commit and what it
will put there: canvases d1, d2, ..., each with one more. One pass looks at all of them. d1 is
certain; d(k+1) is right as long as it is what stepwise decoding makes of d(k).

Departures: it holds at any temperature. Every slot has Gumbel noise of its own, frozen for the run,
and the choice of slots does not look at what is drawn, so that the stepwise result is a function of
the canvas, and equality can be checked token by token. Every slot's noise is used once, when it is
committed, so that the law is that of fresh noise. Where the order looks at no logits, guesses of a
rejected draft are kept for the next one ("carried"), as in Jacobi decoding.

A canvas run that looks at several canvases in one pass and goes on from one of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmaccel.canvas_contracts import Denoiser
from mmaccel.contracts import Prompt
from mmaccel.errors import OptionError
from mmaccel.results import Exactness, Generation
from mmaccel.samplers.canvas.cache_plan import CachePlan, as_plan
from mmaccel.samplers.canvas.orders import Order, check_order
from mmaccel.samplers.canvas.policy import RunPolicy
from mmaccel.samplers.canvas.predictions import SlotPredictions
from mmaccel.samplers.canvas.run import CanvasRun
from mmaccel.samplers.canvas.state import Canvas


class DraftRun(CanvasRun):
    """`CanvasRun` with drafts; the same arguments."""

    @property
    def is_due(self) -> bool:
        """Whether the next pass writes what later ones read, or is some row's first: it takes one
        canvas only.
        """
        return self.is_new or self._eyes.is_due(self.canvas)

    def look_along(self, drafts: Canvas, copies: int) -> list[SlotPredictions]:
        """One pass over several canvases at once.

        Args:
            drafts: `[K * B]` rows, copies of the canvas with more committed in the active block.
            copies: K.

        Returns:
            SlotPredictions `[B, Q]` of each.
        """
        seen, n_entries = self._eyes.look(drafts, copies)
        self.ledger.compute(n_entries)
        return seen.split(copies)

    def accept(self, drafts: Canvas, index: Tensor) -> None:
        """Go on from one of the copies `[K * B]` that were looked at, `index` `[B]` in 0..K-1.

        What that committed is counted with the next `commit`.
        """
        before = self.canvas.is_committed.sum(1)
        self.canvas.take(drafts, index)
        self.ledger.gain(self.canvas.is_committed.sum(1) - before)

    def still_open(self, seen: SlotPredictions) -> Tensor:
        """`[B, Q]` bool, slots of `seen` that are open yet and in the active block yet."""
        return seen.is_open & self.canvas.active().gather(1, seen.slots)

    def room_ahead(self, most: int) -> Tensor:
        """`[B]` int64, up to `most`: slots that can be committed before a full pass is due."""
        return self._eyes.room_ahead(self.canvas, most)


@dataclass(frozen=True)
class LosslessUnmask(RunPolicy):
    """`Stepwise` with the same order, block and cache, in fewer passes.

    Args:
        drafts: canvases a pass looks at, 1..256; 1 is `Stepwise`.
        order: which slot is next, one of `mmaccel.samplers.canvas.orders.ORDERS` but "sampled".
        block, cache: as in `Stepwise`.
        layout: canvases of a pass as "rows" of a batch, or as "entries" of one row, which share
            what is cached; None takes entries where a cache is kept and rows otherwise.
    """

    drafts: int = 8
    order: str = "confidence"
    block: int | None = None
    cache: CachePlan | str = "none"
    layout: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.drafts, bool) or not isinstance(self.drafts, int):
            received = repr(self.drafts)
        else:
            received = "" if 1 <= self.drafts <= 256 else str(self.drafts)
        if received:
            raise OptionError(
                f"drafts: expected an integer in 1..256, received {received}; 4 to 16 suits most"
            )
        check_order(self.order)
        if self.order == "sampled":
            raise OptionError(
                "order: expected one that does not look at what was drawn, received 'sampled'; "
                "choose 'confidence', or decode with Stepwise"
            )
        if self.layout not in (None, "rows", "entries") or (
            self.layout == "rows" and as_plan(self.cache).keeps
        ):
            raise OptionError(
                "layout: expected 'entries', 'rows' (without a cache) or None, received "
                f"{self.layout!r} with cache {as_plan(self.cache).kind!r}; None chooses"
            )

    @property
    def exactness(self) -> Exactness:
        """Bitwise as `Stepwise`; with a stale cache that law itself is another."""
        return "bitwise" if as_plan(self.cache).is_exact else "relaxed"

    @property
    def run_type(self) -> type[CanvasRun]:
        """What runs it."""
        return DraftRun

    def decode(self, run: CanvasRun) -> Generation:
        """Fill the canvas of a run of this policy."""
        assert isinstance(run, DraftRun)
        order = run.order(self.order)
        carried = None
        with run.interruptible():
            seen = run.look() if run.is_open else None
            while seen is not None:
                run.commit(seen, order.first(seen))
                if not run.is_open:
                    break
                if self.drafts == 1 or run.is_due:
                    seen, carried = run.look(), None
                    continue
                chain = Chain(run, order, seen, carried, self.drafts)
                seen, carried = chain.verify()
        return run.generation()

    def open(self, model: Denoiser, prompt: Prompt, length: int, **options: Any) -> CanvasRun:
        """A run of this policy, before its first pass."""
        layout = self.layout or ("entries" if as_plan(self.cache).keeps else "rows")
        return super().open(model, prompt, length, copies=self.drafts, layout=layout, **options)


class Chain:
    """Nested drafts from a canvas on.

    Args:
        run: its canvas is the first draft.
        order: of the slots.
        seen: of the canvas before its last commit.
        carried: `[B, Q]` int64, better guesses of tokens than those of `seen`, or None.
        length: K, drafts.
    """

    def __init__(
        self,
        run: DraftRun,
        order: Order,
        seen: SlotPredictions,
        carried: Tensor | None,
        length: int,
    ) -> None:
        assert seen.drawn is not None
        self._run, self._order, self._length = run, order, length
        still = run.still_open(seen)  # [B, Q], what is left of the same block
        ahead = order.ahead(replace(seen, is_open=still))  # [B, Q]
        place = torch.arange(ahead.shape[1], device=ahead.device).expand_as(ahead)
        turn = torch.empty_like(ahead).scatter_(1, ahead, place)
        room = run.room_ahead(length - 1)  # [B], commits before a refresh is due
        usable = torch.minimum(still.sum(1) - 1, room)  # the block's last slot is left open
        self._turn = torch.where(still & (turn < usable[:, None]), turn, length)  # [B, Q]
        self._tokens = seen.drawn if carried is None else carried

    def verify(self) -> tuple[SlotPredictions, Tensor | None]:
        """One pass; moves the canvas to the last draft that is right.

        Returns:
            SlotPredictions of the canvas, and guesses `[B, Q]` for the next chain, if they are any good.
        """
        run, length = self._run, self._length
        drafts = run.canvas.copies(length)
        step = torch.arange(length, device=self._turn.device)[:, None, None]
        chosen = (self._turn < step).flatten(0, 1)  # [K * B, Q]
        run.place(drafts, chosen, self._tokens.repeat(length, 1))
        views = run.look_along(drafts, length)
        right = [self._is_right(view, k) for k, view in enumerate(views[:-1])]
        n_right = torch.stack([*right, torch.zeros_like(right[0])]).int().cumprod(0).sum(0)
        run.accept(drafts, n_right)
        seen = SlotPredictions.pick(views, n_right)
        return seen, self._carry(views, seen)

    def _is_right(self, view: SlotPredictions, k: int) -> Tensor:
        """`[B]` bool, whether draft k + 1 is what stepwise decoding makes of draft k."""
        assert view.drawn is not None
        wanted = self._order.first(view)  # [B, Q]
        given = self._turn == k
        same = (wanted == given).all(1) & given.any(1)
        return same & ((view.drawn == self._tokens) | ~given).all(1)

    def _carry(self, views: list[SlotPredictions], seen: SlotPredictions) -> Tensor | None:
        """What each slot was, seen from the draft before it; None where the order may change."""
        if self._order.ranks is None or seen.drawn is None:
            return None
        drawn = torch.stack([view.drawn for view in views if view.drawn is not None])  # [K, B, Q]
        source = self._turn.clamp(max=self._length - 1)
        guess = drawn.gather(0, source[None])[0]
        return torch.where(guess < 0, seen.drawn, guess)  # closed in a draft that was wrong
