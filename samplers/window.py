"""The window loop: feed a window, let a sampler judge it, keep what it keeps.

This file knows positions, rows, stops and counts, and nothing about probability; the samplers know probability and
nothing about positions. One host synchronisation a pass: the number of slots still wanted and whether a score was NaN
come back together.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from mmaccel.contracts import Generation, OnStep, Policy, Progress, Prompt, Stats, TokenModel
from mmaccel.errors import NumericsError, OptionError, ShapeError
from mmaccel.samplers.drafts import Frontier, Proposal, check_source, propose
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.width import AdaptiveWidth, FixedWidth


class WindowRun:
    """One decoding run of B rows; a sampler drives it pass by pass while `width` is not 0.

    Attributes:
        width: W of the next pass; 0 once every row has ended.
        slots: `[B, W]` int64, the slots the next pass predicts.
        passes: passes so far.
        vocab_size: V.

    Raises:
        OptionError: length < 1, or a draft source that needs a layout the prompt lacks.
        ShapeError: the noise is for another batch.
    """

    def __init__(
        self, policy: Policy, model: TokenModel, prompt: Prompt, length: int, *, filters: Filters, noise: Noise,
        on_step: OnStep | None, window: int | str = 1, drafts: str = "left",
    ) -> None:
        if length < 1:
            raise OptionError(f"length: expected at least 1 token, received {length}; ask for 1 or more")
        if noise.seeds.shape[0] != prompt.batch:
            raise ShapeError(
                f"noise: expected {prompt.batch} rows, received {noise.seeds.shape[0]}; make it for this batch"
            )
        check_source(drafts, prompt.layout, final=True)
        self.model, self.prompt, self.length, self.filters = model, prompt, length, filters
        self.on_step, self.source = on_step, drafts
        self.vocab_size = model.vocab_size
        self.stats = Stats(policy=repr(policy), exactness=policy.exactness)
        self.chooser = AdaptiveWidth() if window == "adaptive" else FixedWidth(int(window))
        self._began = time.perf_counter()
        self._prefill()
        self._aim(length)

    # -- what a sampler calls, in this order ---------------------------------------------------------------------

    def standing(self) -> Tensor:
        """`[B, W-1]` bool: which draft slots of the window hold something the last pass predicted."""
        return self._columns[:, :-1] < self._filled[:, None]

    def propose(self) -> Proposal:
        """Ask the draft source about all draft slots of the window (`[B, W-1]`)."""
        frontier = Frontier(
            self.line, self._columns[:, :-1], self._filled, self.slots[:, :-1], self._last_scores,
            self.prompt.layout, self.vocab_size,
        )
        return propose(self.source, frontier)

    def settle(self, new: Tensor) -> Tensor:
        """Write drafts: `new` `[B, W-1]` where nothing stands, forced tokens where the layout knows them.

        Returns:
            `[B, W-1]` int64, the drafts that will be fed.
        """
        columns = self._columns[:, :-1]
        drafts = torch.where(self.standing(), self.line.gather(1, columns), new)
        layout = self.prompt.layout
        forced = layout.forced(self.slots[:, :-1]) if layout is not None else None
        if forced is not None:
            drafts = torch.where(forced >= 0, forced, drafts)
        self.line.scatter_(1, columns, drafts)
        return drafts

    def forward(self) -> Tensor:
        """One pass over the window.

        Returns:
            Scores `[B, W, V]` float32 of the target law at each slot (see `Filters.apply`).
        """
        tokens = self.line.gather(1, self._columns - 1)  # [B, W]
        branches = self.prompt.branches
        start = self.prompt.lengths - 1 + self.made.repeat(branches)  # [R]
        began = time.perf_counter()
        logits = self.model.forward(tokens.repeat(branches, 1), start)  # [R, W, V]
        self.stats.forward_seconds += time.perf_counter() - began
        scores = self.filters.apply(
            logits, branches, self.line, self._columns, self.slots, self.prompt.layout
        )
        self._peak = scores.amax(-1)  # [B, W]
        self._last_scores = scores[:, -1]
        self.stats.passes += 1
        return scores

    def commit(self, tokens: Tensor, n_kept: Tensor) -> None:
        """Keep the first `n_kept` tokens of each row; the rest of the window stands as drafts.

        Args:
            tokens: `[B, W]` int64, the window's new contents.
            n_kept: `[B]` int64 in 1..W.
        """
        inside = torch.arange(self.width, device=tokens.device)[None] < n_kept[:, None]
        bad = ((~(self._peak > float("-inf"))) & inside & ~self._ended[:, None]).any()
        self.line.scatter_(1, self._columns, torch.where(self._ended[:, None], 0, tokens))
        n_new = torch.minimum(n_kept, self.length - self.made).masked_fill(self._ended, 0)
        if self.prompt.stop_tokens is not None:
            n_new = self._stop(tokens, n_new)
        self._count(n_new)
        self._filled = self._columns[:, -1] + 1
        previous, self.made = self.made, self.made + n_new
        self._ended |= self.made >= self.length
        if self.on_step is not None:
            self._tell(previous)
        wanted = (self.length - self.made).masked_fill(self._ended, 0).amax()
        remaining, is_bad, n_tokens = torch.stack([wanted, bad.long(), n_new.sum()]).tolist()  # the one sync
        if is_bad:
            raise NumericsError(
                "scores: expected finite logits with at least one possible token, received NaN or none; "
                "check the model's dtype and weights, or loosen the filters"
            )
        now = time.perf_counter()
        self.chooser.observe(self.width, n_tokens, now - self._pass_began)
        self._aim(remaining)

    def generation(self) -> Generation:
        """The result, once `width` is 0."""
        tokens = self.line[:, self._origin : self._origin + self.length]
        index = torch.arange(self.length, device=tokens.device)[None]
        tokens = torch.where(index < self.made[:, None], tokens, 0)
        accepted = self._histogram.tolist()
        while accepted and not accepted[-1]:
            accepted.pop()
        self.stats.accepted = accepted
        self.stats.row_passes = sum(accepted)
        self.stats.tokens = int(self.made.sum())
        self.stats.seconds = time.perf_counter() - self._began
        return Generation(tokens, self.made, self.stats)

    # -- inside --------------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        tokens, lengths, batch = self.prompt.tokens, self.prompt.lengths, self.prompt.batch
        longest, widest = tokens.shape[1], self.chooser.widest
        device = tokens.device
        self._origin = longest  # column of slot 0 in `line`; the prompt stands right-aligned before it
        self.line = torch.full((batch, longest + self.length + widest), -1, device=device)
        shift = longest - lengths[:batch, None]
        index = torch.arange(longest, device=device)[None] - shift  # [B, T]
        prompt = tokens[:batch].gather(1, index.clamp(min=0))
        self.line[:, :longest] = torch.where(index >= 0, prompt, -1)
        self.line[:, longest:] = 0
        self.made = torch.zeros(batch, dtype=torch.int64, device=device)
        self._ended = torch.zeros(batch, dtype=torch.bool, device=device)
        self._filled = torch.full((batch,), longest, device=device)
        self._histogram = torch.zeros(widest, dtype=torch.int64, device=device)
        self._last_scores: Tensor | None = None
        self.model.reserve(tokens.shape[0], longest + self.length + widest)
        if longest > 1:
            self.model.forward(tokens[:, :-1].clamp(min=0), torch.zeros_like(lengths))
            self.stats.prefill_passes += 1

    def _aim(self, remaining: int) -> None:
        """Place the next window; it never reaches beyond the longest unfinished row's end."""
        self._pass_began = time.perf_counter()
        self.width = self.chooser.choose(remaining) if remaining else 0
        offset = torch.arange(self.width, device=self.made.device)[None]
        self.slots = self.made[:, None] + offset  # [B, W]
        self._columns = self._origin + self.slots

    def _stop(self, tokens: Tensor, n_new: Tensor) -> Tensor:
        index = torch.arange(self.width, device=tokens.device)[None]
        assert self.prompt.stop_tokens is not None
        stops = torch.isin(tokens, self.prompt.stop_tokens) & (index < n_new[:, None])
        first = torch.where(stops, index, self.width).amin(1)
        self._ended |= first < self.width
        return torch.minimum(n_new, first + 1)

    def _count(self, n_new: Tensor) -> None:
        self._histogram.scatter_add_(0, (n_new - 1).clamp(min=0), (n_new > 0).long())

    def _tell(self, previous: Tensor) -> None:
        assert self.on_step is not None
        tokens = self.line[:, self._origin : self._origin + self.length]
        limit = self.on_step(Progress(tokens, self.made, previous, self.stats.passes))
        if limit is not None:
            self._ended |= limit <= self.made
            self.made = torch.minimum(self.made, limit)
