"""Published sampler bugs, each planted into the real samplers by replacing one small function.

Where a bug was seen: `SJD` T. Teng's release, `SCD` the coupled one, `PAC` the tree one, `Lumina-2`
that model's own sampler; the rest are the classics of any loop with a cache and a generator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel.contracts import Pass
from mmaccel.kernels import acceptance
from mmaccel.kernels.truncation import truncate
from mmaccel.kernels.window_inputs import WindowInputs, window_inputs
from mmaccel.samplers.acceptance import count_leading, residual
from mmaccel.samplers.noise import Fresh, Noise
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window import draft_record, fresh_drafts, speculative_jacobi
from mmaccel.samplers.window import rows as run_rows
from mmaccel.samplers.window.draft_record import DraftRecord
from mmaccel.samplers.window.run import WindowRun
from tests.fixtures.toy_models import ToyLanguage

Patch = pytest.MonkeyPatch
GROUP = 4  # rows that advance together where a bug needs a small batch


def keep_stale_distribution(patch: Patch) -> None:
    """SCD: a draft after the first rejection keeps its distribution of an earlier pass."""
    _alter_draft_distribution(patch, lambda stays, accepted: stays)


def verify_surplus_twice(patch: Patch) -> None:
    """SJD at batch > 1: rows advance together; drafts accepted beyond that are verified again."""
    advance_together(patch)
    _alter_draft_distribution(patch, lambda stays, accepted: accepted)


def advance_together(patch: Patch) -> None:
    """No bug by itself: all rows of a group advance by the least of their accepted tokens."""
    accept = WindowRun.accept

    def least(run: WindowRun, tokens: Tensor, kept: Tensor, *others: Any) -> None:
        together = count_leading(kept).view(-1, GROUP).amin(1, keepdim=True).expand(-1, GROUP)
        index = torch.arange(kept.shape[1])
        accept(run, tokens, index < together.reshape(-1, 1), *others)

    patch.setattr(WindowRun, "accept", least)


def _alter_draft_distribution(patch: Patch, is_stale: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Give the predicted drafts that `is_stale` names their distribution of the last pass."""
    drafts_of = DraftRecord._propose
    rule = speculative_jacobi.exact_rule
    last: dict[str, Any] = {}

    def spy(p_target: Tensor, p_draft: Tensor, drafts: Tensor, coins: Tensor) -> Any:
        kept, spent = rule(p_target, p_draft, drafts, coins)
        index = torch.arange(kept.shape[1])[None]
        last["accepted"] = index < count_leading(kept)[:, None]
        return kept, spent

    def wrong(record: DraftRecord, uniforms: Tensor) -> Any:
        run = record._run
        drafts, p_draft = drafts_of(record, uniforms)
        if record.first is not None and last["drafts"].shape[1]:
            index = run.rows.slots[:, :-1] - last["first"]
            inside = (index < last["drafts"].shape[1]) & run.rows.is_predicted()
            index = index.clamp(max=last["drafts"].shape[1] - 1)
            stays = inside & (last["drafts"].gather(1, index) == drafts)
            stale = is_stale(stays, inside & last["accepted"].gather(1, index))
            old = last["distribution"].gather(1, index[..., None].expand_as(p_draft))
            p_draft = torch.where(stale[..., None], old, p_draft)
        last.update(first=run.rows.slots[:, :1], drafts=drafts, distribution=p_draft)
        return drafts, p_draft

    patch.setattr(speculative_jacobi, "exact_rule", spy)
    patch.setattr(DraftRecord, "_propose", wrong)


def redraw_from_target(patch: Patch) -> None:
    """Lumina-2: after a rejection the token comes from p instead of (p - q)+."""
    for module in (acceptance, fresh_drafts):
        patch.setattr(module, "residual", lambda p_target, p_draft: p_target)


def filter_residual_again(patch: Patch, **options: Any) -> None:
    """SJD: the residual goes through temperature and truncation once more."""
    again = SamplingParams(**options)

    def twice(p_target: Tensor, p_draft: Tensor) -> Tensor:
        rest = residual(p_target, p_draft).log()
        return truncate(rest, again.temperature, again.top_k, again.top_p, again.min_p).softmax(-1)

    for module in (acceptance, fresh_drafts):
        patch.setattr(module, "residual", twice)


def look_ahead(patch: Patch) -> None:
    """A slot is accepted only where the next one would be accepted too."""
    _alter_rule(patch, True, lambda kept, following, again: kept & following)


def choose_longest_path(patch: Patch) -> None:
    """PAC's tree, in one slot: of two tries at a coin, the one that lets the longer path live."""

    def longest(kept: Tensor, following: Tensor, again: Callable[[], Tensor]) -> Tensor:
        return torch.where(following, kept | again(), kept)

    _alter_rule(patch, False, longest)


def _alter_rule(patch: Patch, at_end: bool, change: Callable[..., Tensor]) -> None:
    """Of what is kept, what is kept of the next slots (`at_end` behind the last), and another try
    at the coins.
    """
    exact_rule = speculative_jacobi.exact_rule

    def rule(p_target: Tensor, p_draft: Tensor, drafts: Tensor, coins: Tensor) -> Any:
        kept, spent = exact_rule(p_target, p_draft, drafts, coins)
        following = torch.cat([kept[:, 1:], torch.full_like(kept[:, :1], at_end)], 1)

        def again() -> Tensor:
            return exact_rule(p_target, p_draft, drafts, coins.frac().mul(7.3).frac())[0]

        return change(kept, following[:, : kept.shape[1]], again), spent

    patch.setattr(speculative_jacobi, "exact_rule", rule)


def share_noise(patch: Patch) -> None:
    """SCD: one Gumbel vector for several positions."""
    gumbel = Noise.gumbel

    def same(noise: Noise, slots: Tensor, *others: Any, **named: Any) -> Tensor:
        return gumbel(noise, torch.zeros_like(slots), *others, **named)

    patch.setattr(Noise, "gumbel", same)


def share_coins(patch: Patch) -> None:
    """One acceptance coin for all slots of a pass."""
    _alter_coins(patch, lambda slots, step: (torch.zeros_like(slots), step))


def reuse_coins(patch: Patch) -> None:
    """A slot meets the same coin at every pass."""
    _alter_coins(patch, lambda slots, step: (slots, 0))


def _alter_coins(patch: Patch, change: Callable[[Tensor, int], tuple[Tensor, int]]) -> None:
    fresh = Noise.fresh

    def wrong(noise: Noise, slots: Tensor, step: int) -> Fresh:
        return fresh(noise, slots, step)._replace(coins=fresh(noise, *change(slots, step)).coins)

    patch.setattr(Noise, "fresh", wrong)


def use_one_branch(patch: Patch) -> None:
    """Every guidance branch processes the conditional branch's last prompt token."""

    def inputs(*given: Any, **options: Any) -> WindowInputs:
        tokens, n_generated, filled, last, *others = given
        conditional = last[: len(tokens)].repeat(len(last) // len(tokens), 1)
        return window_inputs(tokens, n_generated, filled, conditional, *others, **options)

    patch.setattr(run_rows, "window_inputs", inputs)


def record_uniform_distribution(patch: Patch) -> None:
    """A draft given outright (a copy of its neighbour) is verified as if drawn uniformly."""

    def flat(tokens: Tensor, vocab_size: int) -> Tensor:
        return torch.full((*tokens.shape, vocab_size), 1 / vocab_size)

    for module in (draft_record, fresh_drafts):
        patch.setattr(module, "one_hot", flat)


def read_distributions_askew(patch: Patch) -> None:
    """The distribution of the slot on the left is recorded for a predicted draft."""
    hold = DraftRecord.hold

    def askew(record: DraftRecord, p_target: Tensor) -> None:
        hold(record, p_target)
        record._first_held.hold(record._run.rows.slots[:, :1] + 1)

    patch.setattr(DraftRecord, "hold", askew)


class AppendingCache(ToyLanguage):
    """A cache that is not rolled back: what was rejected is still seen."""

    def reserve(self, rows: int, positions: int) -> None:
        super().reserve(rows, 8 * positions)
        self.written = torch.zeros(rows, dtype=torch.int64)

    def forward(self, entries: Pass) -> Tensor:
        # The prompt's pass and the first after it are right; from then on entries are appended.
        at = entries.start if self.passes < 2 else self.written
        assert at is not None
        self.written = at + entries.tokens.shape[1]
        return super().forward(Pass(entries.tokens, at))
