"""Bugs of coarse drafts, each planted into the real draft source by replacing a small function.

`OF_DRAFTS` make other drafts than the definition says, or write them to wrong places; `OF_LAWS`
record another distribution than that of the drafts, and so does `OF_ROUNDS` in parallel rounds;
`OF_ROWS` let rows depend on each other.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel.kernels.coarse_rounds import Redrafted, find_hidden
from mmaccel.samplers.drafting import coarse_drafter
from mmaccel.samplers.drafting.coarse_drafter import CoarseDrafter
from mmaccel.samplers.drafting.coarse_model import CoarseConfig
from mmaccel.samplers.window.run import WindowRun

Patch = pytest.MonkeyPatch


def cross_row_ends(patch: Patch) -> None:
    """The neighbour on the left of a row's first slot is the last one of the row above."""

    def wrong(config: CoarseConfig, slots: Tensor) -> tuple[Tensor, Tensor]:
        _, rows, columns = torch.tensor(config.neighbours).unbind(1)
        found = slots[..., None] - rows * config.columns + columns
        return found, found >= 0

    patch.setattr(CoarseConfig, "find_neighbours", wrong)


def take_contexts_of_another_row(patch: Patch) -> None:
    """A row is corrected by what another row of the batch saw."""
    _alter_slots(
        patch,
        lambda run, slots: slots._replace(
            seen=slots.seen.roll(1, 0), hidden_seen=slots.hidden_seen.roll(1, 0)
        ),
    )


def take_scores_of_another_row(patch: Patch) -> None:
    """A row's stale scores are those of another row of the batch, its noise included."""
    _alter_slots(
        patch,
        lambda run, slots: slots._replace(ids=slots.ids.roll(1, 0), values=slots.values.roll(1, 0)),
    )


def correct_the_first_drafts(patch: Patch) -> None:
    """A row that was just admitted is corrected by what the last row in its batch slot saw."""
    _alter_slots(
        patch,
        lambda run, slots: slots._replace(is_fixed=run.rows.is_over(run.rows.slots[:, :-1])),
    )


def count_noise_twice(patch: Patch) -> None:
    """Scores of seen slots have their noise twice."""
    observe = CoarseDrafter.observe

    def wrong(self: Any, run: Any, scores: Any, noise: Tensor) -> None:
        observe(self, run, scores._replace(window=scores.window + noise), noise)

    patch.setattr(CoarseDrafter, "observe", wrong)


def leave_noise_out_of_new_slots(patch: Patch) -> None:
    _alter_sweep(patch, lambda run, slots: slots._replace(noise=slots.noise - _noise(run)))


def shift_columns(patch: Patch) -> None:
    """Corrected drafts are written one slot further left, the first over an accepted token."""
    _alter_slots(patch, lambda run, slots: slots._replace(columns=slots.columns - 1))


def verify_other_drafts(patch: Patch) -> None:
    """The model processes the drafts without their correction."""
    correct = CoarseDrafter.correct

    def wrong(self: Any, run: WindowRun, *arguments: Any) -> Any:
        kept = run.rows.tokens.clone()
        corrected = correct(self, run, *arguments)
        run.rows.tokens.copy_(kept)
        return corrected

    patch.setattr(CoarseDrafter, "correct", wrong)


def record_uncorrected_distribution(patch: Patch) -> None:
    """The distribution of a draft is that before its correction."""
    correct = CoarseDrafter.correct

    def wrong(self: Any, run: Any, drafts: Tensor, noise: Tensor, p_draft: Any = None) -> Any:
        return correct(self, run, drafts, noise, p_draft)[0], p_draft

    patch.setattr(CoarseDrafter, "correct", wrong)


def record_distribution_of_other_contexts(patch: Patch) -> None:
    """The drafts are corrected for what the pass saw, their distribution for what it made."""
    redraft = CoarseDrafter.make_drafts

    def wrong(self: Any, run: WindowRun, slots: Any, work: Tensor, n: int) -> Redrafted:
        found = redraft(self, run, slots, work, n)
        now = coarse_drafter._gather(self.pad_tokens(run), slots.neighbours).roll(1, 1)
        slots.hidden_seen.copy_(find_hidden(self.opened.weights, now, slots.base))
        return found

    patch.setattr(CoarseDrafter, "make_drafts", wrong)


def record_the_next_round(patch: Patch) -> None:
    """The distribution is that of a draft on the last round's drafts, not on those before it."""
    sweep = CoarseDrafter.make_drafts

    def wrong(self: Any, run: WindowRun, slots: Any, work: Tensor, n: int) -> Redrafted:
        found = sweep(self, run, slots, work, n)
        return found._replace(read=coarse_drafter._gather(work, slots.neighbours))

    patch.setattr(CoarseDrafter, "make_drafts", wrong)


def correct_law_of_kept_drafts(patch: Patch) -> None:
    """Drafts of seen slots stay as they are; the corrected distribution is recorded."""
    _alter_sweep(patch, lambda run, slots: slots._replace(is_fixed=slots.is_fixed | slots.is_seen))


def choose_candidates_with_noise(patch: Patch) -> None:
    """The corrected candidates are those whose noise is largest, too."""
    observe = CoarseDrafter.observe

    def wrong(self: Any, run: Any, scores: Any, noise: Tensor) -> None:
        observe(self, run, scores, noise)
        n = min(self.opened.candidates, scores.window.shape[-1] - 1)
        found = (scores.window + noise).topk(n + 1, -1)
        self._record(run, found.values, found.indices, scores)

    patch.setattr(CoarseDrafter, "observe", wrong)


def forget_the_others(patch: Patch) -> None:
    """No draft comes from outside the candidates; the distribution says that some do."""
    record = CoarseDrafter._record

    def wrong(self: Any, run: Any, values: Tensor, ids: Tensor, scores: Any) -> None:
        values = values.clone()
        values[..., -1] = float("-inf")
        record(self, run, values, ids, scores)

    patch.setattr(CoarseDrafter, "_record", wrong)


def _alter_slots(patch: Patch, change: Any) -> None:
    find = CoarseDrafter.sweep_slots

    def wrong(self: Any, run: WindowRun, *arguments: Any, **options: Any) -> Any:
        found = find(self, run, *arguments, **options)
        return None if found is None else change(run, found)

    patch.setattr(CoarseDrafter, "sweep_slots", wrong)


def _alter_sweep(patch: Patch, change: Any) -> None:
    sweep = CoarseDrafter.make_drafts

    def wrong(self: Any, run: WindowRun, slots: Any, work: Tensor, n: int) -> Redrafted:
        return sweep(self, run, change(run, slots), work, n)

    patch.setattr(CoarseDrafter, "make_drafts", wrong)


def _noise(run: WindowRun) -> Tensor:
    return run.noise.frozen(run.rows.slots[:, :-1], run.vocab_size, run.params.temperature)


OF_DRAFTS = (
    cross_row_ends, take_contexts_of_another_row, take_scores_of_another_row, count_noise_twice,
    leave_noise_out_of_new_slots, shift_columns, verify_other_drafts,
)  # fmt: skip
OF_LAWS = (
    record_uncorrected_distribution, record_distribution_of_other_contexts,
    correct_law_of_kept_drafts,
    take_scores_of_another_row, choose_candidates_with_noise, forget_the_others,
)  # fmt: skip
OF_ROUNDS = (record_the_next_round,)  # laws, too; there is no bug where a sweep is complete
OF_ROWS = (take_contexts_of_another_row, take_scores_of_another_row, correct_the_first_drafts)
