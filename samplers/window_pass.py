"""What a pass does on the device: feed the window, filter, keep what a sampler keeps, count.

Everything here works on tensors that stay in their places and reads nothing back, so that a pass
may be captured (see `mmaccel.samplers.step_runner`); the host's side is `mmaccel.samplers.window`.
"""

from __future__ import annotations

import time
from operator import attrgetter

import torch
from torch import Tensor

from mmaccel.contracts import Policy, Prompt, TokenModel
from mmaccel.places import EndedRow
from mmaccel.results import OnStep, Stats
from mmaccel.samplers.draft_window import DraftWindow
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.line import cut_at_stop
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.step_runner import StaticBuffers, make_graph_key, runner_of
from mmaccel.samplers.tally import Tally, count_gains

_STATIC = (  # tensors that outlive a pass, by attribute; what `hold` keeps is apart
    "line", "made", "impossible", "_last_of_prompt", "_filled", "_lengths", "_stops", "_limit",
    "_index", "_ended", "_n_new", "_facts", "noise.seeds", "noise.items", "noise.schedule",
    "tally.passes", "tally.is_bad", "tally.gains", "tally.spent",
)  # fmt: skip


class WindowPass(DraftWindow):
    """Passes of one run; see `mmaccel.samplers.window.WindowRun` for how they are driven.

    Args:
        policy, model, prompt, length, filters, noise, on_step: as in `WindowRun`.
        widest: largest width there will be.
        drafts: a draft source.

    Attributes:
        runner: what carries passes out.
        noise: what passes draw with: the numbers given for the rows, in the run's own tensors.
        stats: counted so far; `stats.passes` numbers the next pass.
        tally: counted so far on the device; `tally.passes` numbers the next pass.
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
        widest: int,
        drafts: str,
    ) -> None:
        self.runner = runner_of(model)
        key = make_graph_key(
            self.runner, policy, model, prompt, length, filters, widest=widest, drafts=drafts,
            has_callback=on_step is not None, is_refilled=self.is_refilled,
        )  # fmt: skip
        extent = None if key is None else key.room
        is_static, size = self.runner.is_static, model.vocab_size
        super().__init__(prompt, size, length, widest, drafts, is_static, extent)
        self.model, self.filters, self.noise, self.on_step = model, filters, noise, on_step
        self.impossible = filters.impossible(model.vocab_size)
        self.stats = Stats(
            policy=repr(policy),
            exactness=policy.exactness,
            branches=prompt.branches,
        )
        capacity = self.extent.slots + self.runner.sync_every
        self.tally = Tally(prompt.batch, capacity, self.made.device)
        self._lengths, self._stops = prompt.lengths, prompt.stop_tokens
        self._limit = self.made.new_full((), length)
        self._index = torch.arange(widest, device=self.made.device)
        self._ended = torch.zeros_like(self.made, dtype=torch.bool)
        self._n_new = torch.zeros_like(self.made)  # tokens of the last pass, for `on_step`
        self._facts = self.made.new_zeros(4)  # what the host looks at
        buffers = self.runner.load(key, self.static_inputs() if is_static else {})
        if buffers is not None:
            self._use(buffers)

    def static_inputs(self) -> dict[str, Tensor]:
        """Tensors that outlive a pass, by name, with the numbers that the run begins with."""
        found = {name: attrgetter(name)(self) for name in _STATIC}
        return {name: value for name, value in found.items() if value is not None}

    def _use(self, buffers: StaticBuffers) -> None:
        """Go on with static buffers; what the last pass of another run left in them is ignored."""
        self.noise = Noise(self.noise.seeds, self.noise.items)  # the caller's stays as it is
        for name, value in buffers.inputs.items():
            owner, _, attribute = name.rpartition(".")
            vars(attrgetter(owner)(self) if owner else self)[attribute] = value
        self.places = buffers.state

    def forward(self) -> Tensor:
        """One pass over the window.

        Returns:
            Scores `[B, W, V]` float32 of the target law at each slot (see `Filters.apply`).
        """
        scores = self._filter(self.logits(), slice(None))
        self._peak = scores.amax(-1)  # [B, W]
        self.hold("last scores", scores[:, -1].clone())  # a view would keep the whole window's
        return scores

    def logits(self) -> Tensor:
        """One pass over the window, raw: `[R, W, V]` of all branches. `note` is owed afterwards."""
        start = self._lengths - 1 + self.made.repeat(self.prompt.branches)  # [R]
        return self._pass(self.feed(self.columns - 1), start)

    def note(self, logits: Tensor, peak: Tensor) -> None:
        """What `forward` notes of its scores, where a kernel made none.

        Args:
            logits: of `logits()`.
            peak: `[B, W]`, the largest score of every slot after all filters.
        """
        self._peak = peak
        if self.source == "neighbour":  # the only one that looks at them
            self.hold("last scores", self._filter(logits[:, -1:], slice(-1, None))[:, 0])

    def _filter(self, logits: Tensor, part: slice) -> Tensor:
        """Scores of the target law at a part of the window's slots."""
        columns, slots = self.columns[:, part], self.slots[:, part]
        return self.filters.apply(
            logits, self.prompt.branches, self.line, columns, slots, self.prompt.layout
        )

    def spend(self, variation: Tensor) -> None:
        """Total variation `[B, W-1]` that judging each draft slot costs (relaxed policies).

        `commit` charges the slots whose tokens it keeps.
        """
        self.hold("variation", variation)

    def advance(self, tokens: Tensor, n_kept: Tensor) -> None:
        """Keep the first `n_kept` tokens of each row; the rest of the window stands as drafts.

        Args:
            tokens: `[B, W]` int64, the window's new contents.
            n_kept: `[B]` int64 in 1..W.
        """
        self.line.scatter_(1, self.columns, torch.where(self._ended[:, None], 0, tokens))
        n_new = torch.minimum(n_kept, self._limit - self.made).masked_fill(self._ended, 0)
        if self._stops is not None:
            n_new, stopped = cut_at_stop(tokens, n_new, self._stops)
            self._ended |= stopped
        is_kept = self._index[: self.width] < n_new[:, None]  # [B, W]
        bad = (self._peak - self._peak != 0) & is_kept  # NaN and infinity leave NaN
        self.tally.is_bad |= bad.any(1)
        self._filled.copy_(self.columns[:, -1] + 1)
        self.made += n_new
        self._ended |= self.made >= self._limit
        if self.on_step is None:
            self.count(n_new)
        else:
            self._n_new.copy_(n_new)

    def prefill(self) -> None:
        """One pass over the prompt without its last token."""
        tokens = self.prompt.tokens
        self.runner.reserve(self.model, tokens.shape[0], self.extent.positions)
        if tokens.shape[1] > 1:
            began = time.perf_counter()
            start = self.prompt.lengths.new_zeros(1).expand_as(self.prompt.lengths)
            self.model.feed(tokens[:, :-1].clamp(min=0), start)
            self.stats.forward_seconds += time.perf_counter() - began
            self.stats.prefill_passes += 1
            self.stats.fed += tokens[:, :-1].numel()

    def restart(self, places: Tensor, prompt: Prompt) -> None:
        """Begin anew in some places; see `DraftWindow.restart`. Their prompts are fed elsewhere."""
        super().restart(places, prompt)
        self._lengths.copy_(prompt.lengths)
        self._ended[places] = False
        self.tally.restart(places)

    def keep(self, places: Tensor, prompt: Prompt) -> None:
        """Go on with some places alone; see `DraftWindow.keep`."""
        super().keep(places, prompt)
        self._lengths, self._ended = prompt.lengths, self._ended[places]
        self._n_new, self.noise = self._n_new[places], self.noise.rows(places)
        self.tally.keep(places)

    def ended(self) -> list[bool]:
        """Which rows have ended. Cost: one host synchronisation."""
        found: list[bool] = self._ended.tolist()
        return found

    def row(self, place: int, row: int) -> EndedRow:
        """What was made in a place, where that row stood. Cost: some host synchronisations."""
        made = int(self.made[place])
        tokens = self.line[place, self.origin : self.origin + made].clone()
        gains, variation = self.tally.row(place)
        return EndedRow(row, tokens, len(gains), count_gains(gains), variation)

    def _pass(self, tokens: Tensor, start: Tensor) -> Tensor:
        began = time.perf_counter()
        logits = self.model.forward(tokens, start)
        self.stats.forward_seconds += time.perf_counter() - began
        return logits

    def count(self, n_new: Tensor) -> None:
        """Count a pass in which rows gained `n_new` `[B]`, and note what the host has to know."""
        self.tally.count(n_new, self.held("variation"))
        wanted = (self._limit - self.made).masked_fill(self._ended, 0)  # [B]
        facts = (wanted.amax(), (wanted > 0).sum(), self.made.sum(), self.tally.is_bad.any().long())
        self._facts.copy_(torch.stack(facts))
