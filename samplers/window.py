"""The window loop: feed a window, let a sampler judge it, keep what it keeps.

This file knows positions, rows, stops and counts, and nothing about probability; the samplers know
probability and nothing about positions. One host synchronisation a pass: the number of slots still
wanted and whether a score was NaN come back together.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from mmaccel.contracts import Policy, Prompt, TokenModel
from mmaccel.errors import NumericsError, OptionError, ShapeError
from mmaccel.results import Generation, OnStep, Progress, Stats
from mmaccel.samplers.adaptive_width import recall
from mmaccel.samplers.draft_window import DraftWindow
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.line import check_limit, cut_at_stop
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.width import make_chooser


class WindowRun(DraftWindow):
    """One decoding run of B rows; a sampler drives it pass by pass while `width` is not 0.

    A sampler calls, in this order: `propose`, `settle`, `forward`, `commit`; at the end
    `generation`.

    Attributes:
        width: W of the next pass; 0 once every row has ended.
        stats: counted so far; `stats.passes` numbers the next pass.

    For the window's contents see `DraftWindow`.

    Raises:
        OptionError: length < 1, or a draft source that needs a layout the prompt lacks.
        ShapeError: the noise is for another batch.
    """

    def __init__(
        self,
        policy: Policy,
        model: TokenModel,
        prompt: Prompt,
        length: int,
        *,
        filters: Filters,
        noise: Noise,
        on_step: OnStep | None,
        window: int | str = 1,
        drafts: str = "left",
    ) -> None:
        if length < 1:
            raise OptionError(
                f"length: expected at least 1 token, received {length}; ask for 1 or more"
            )
        if noise.seeds.shape[0] != prompt.batch:
            raise ShapeError(
                f"noise: expected {prompt.batch} rows, received {noise.seeds.shape[0]}; "
                "make it for this batch"
            )
        records = None
        if window == "adaptive":
            f = filters
            law = (f.guidance_scale, f.temperature, f.top_k, f.top_p, f.min_p)
            records = recall(model, (prompt.batch, prompt.branches, drafts, *law))
        self.chooser = make_chooser(window, policy.exactness, prompt.batch, length, records)
        super().__init__(prompt, model.vocab_size, length, self.chooser.widest, drafts)
        self.model, self.filters, self.on_step = model, filters, on_step
        self.impossible = filters.impossible(model.vocab_size)
        self._index = torch.arange(self.chooser.widest, device=self.made.device)
        self.stats = Stats(
            policy=repr(policy), exactness=policy.exactness, branches=prompt.branches
        )
        self._began = time.perf_counter()
        self._ended = torch.zeros_like(self.made, dtype=torch.bool)
        self._gains: list[Tensor] = []  # [B] each, tokens gained by every row in a pass
        self._n_open = prompt.batch  # rows that have not ended
        self._variation: Tensor | None = None
        self._spent = torch.zeros((), dtype=torch.float64, device=self.made.device)
        self._prefill()
        self._aim(length)

    def forward(self) -> Tensor:
        """One pass over the window.

        Returns:
            Scores `[B, W, V]` float32 of the target law at each slot (see `Filters.apply`).
        """
        branches = self.prompt.branches
        start = self.prompt.lengths - 1 + self.made.repeat(branches)  # [R]
        logits = self._pass(self.feed(self.columns - 1), start)  # [R, W, V]
        scores = self.filters.apply(
            logits, branches, self.line, self.columns, self.slots, self.prompt.layout
        )
        self._peak = scores.amax(-1)  # [B, W]
        self._last_scores = scores[:, -1].clone()  # a view would keep the whole window's
        self.stats.passes += 1
        return scores

    def spend(self, variation: Tensor) -> None:
        """Total variation `[B, W-1]` that judging each draft slot costs (relaxed policies).

        `commit` charges the slots whose tokens it keeps.
        """
        self._variation = variation

    def commit(self, tokens: Tensor, n_kept: Tensor) -> None:
        """Keep the first `n_kept` tokens of each row; the rest of the window stands as drafts.

        Args:
            tokens: `[B, W]` int64, the window's new contents.
            n_kept: `[B]` int64 in 1..W.

        Raises:
            NumericsError: if a kept token was drawn from scores that are no law.
        """
        self.line.scatter_(1, self.columns, torch.where(self._ended[:, None], 0, tokens))
        n_new = torch.minimum(n_kept, self.length - self.made).masked_fill(self._ended, 0)
        if self.prompt.stop_tokens is not None:
            n_new, stopped = cut_at_stop(tokens, n_new, self.prompt.stop_tokens)
            self._ended |= stopped
        is_kept = self._index[: self.width] < n_new[:, None]  # [B, W]
        bad = ((self._peak - self._peak != 0) & is_kept).any()  # NaN and infinity leave NaN
        self._filled = self.columns[:, -1] + 1
        previous = self.made
        self.made = previous + n_new
        self._ended |= self.made >= self.length
        if self.on_step is not None:
            n_new = self._tell(previous)
        self._count(n_new)
        wanted = (self.length - self.made).masked_fill(self._ended, 0)  # [B]
        facts = torch.stack([wanted.amax(), (wanted > 0).sum(), n_new.sum(), bad.long()])
        remaining, n_open, n_tokens, is_bad = facts.tolist()  # the one synchronisation
        if is_bad:
            raise NumericsError(
                "scores: expected finite logits with at least one possible token, received NaN, "
                "infinity or none; check the model's dtype and weights, or loosen the filters"
            )
        self.chooser.observe(n_tokens, self._n_open, time.perf_counter() - self._pass_began)
        self._n_open = n_open
        self._aim(remaining)

    def generation(self) -> Generation:
        """The result, once `width` is 0."""
        tokens = self.line[:, self.origin : self.origin + self.length]
        index = torch.arange(self.length, device=tokens.device)[None]
        tokens = torch.where(index < self.made[:, None], tokens, 0)
        gained = torch.stack(self._gains)  # [passes, B]
        passes = (gained > 0).sum(0)
        self.stats.accepted = torch.bincount(gained[gained > 0] - 1).tolist()
        self.stats.row_passes = int(passes.sum())
        self.stats.tokens = int(self.made.sum())
        self.stats.total_variation = float(self._spent)
        self.stats.seconds = time.perf_counter() - self._began
        return Generation(tokens, self.made, passes, self.stats)

    def _prefill(self) -> None:
        tokens = self.prompt.tokens
        self.model.reserve(tokens.shape[0], self.origin + self.length - 1)  # the last is not fed
        if self.origin > 1:
            began = time.perf_counter()
            start = self.prompt.lengths.new_zeros(1).expand_as(self.prompt.lengths)
            self.model.feed(tokens[:, :-1].clamp(min=0), start)
            self.stats.forward_seconds += time.perf_counter() - began
            self.stats.prefill_passes += 1

    def _pass(self, tokens: Tensor, start: Tensor) -> Tensor:
        began = time.perf_counter()
        logits = self.model.forward(tokens, start)
        self.stats.forward_seconds += time.perf_counter() - began
        return logits

    def _aim(self, remaining: int) -> None:
        """Place the next window."""
        self._pass_began = time.perf_counter()
        self.place(self.chooser.choose(remaining) if remaining else 0)

    def _count(self, n_new: Tensor) -> None:
        self._gains.append(n_new)
        if self._variation is not None:
            index = torch.arange(self._variation.shape[1], device=n_new.device)[None]
            charged = self._variation.masked_fill(index >= n_new[:, None], 0)
            self._spent += charged.sum(dtype=torch.float64)

    def _tell(self, previous: Tensor) -> Tensor:
        """Show the pass to `on_step`; returns `[B]`, the new tokens that are left to each row."""
        assert self.on_step is not None
        tokens = self.line[:, self.origin : self.origin + self.length]
        limit = self.on_step(Progress(tokens, self.made, previous, self.stats.passes))
        if limit is not None:
            limit = check_limit(limit, self.made)
            self._ended |= limit <= self.made
            self.made = torch.minimum(self.made, limit)
        return (self.made - previous).clamp(min=0)
