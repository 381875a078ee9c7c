"""What a window run asks of its drafter before a pass, and what it does about an invalid draft.

A pass is repeated once where an invalid draft may have spoiled it. Attention multiplies the values
that a mask hides by 0, which leaves NaN: keys and values of a draft that is thrown away make the
slots before it invalid. Copies of each row's last token overwrite them in a second pass. The row is
really invalid if that changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmaccel.samplers.checks import invalid_logits
from mmaccel.samplers.drafting.contract import Drafts, Frontier, check_proposed
from mmaccel.samplers.drafting.copying import last_known

if TYPE_CHECKING:
    from mmaccel.samplers.window.run import RunParts, WindowRun


def propose_drafts(run: WindowRun) -> Drafts:
    """Drafts of the window `[B, W-1]`; in a pass that repeats one copies of each row's last token.

    Raises:
        ShapeError: a source proposes something else than `Drafts` describes.
    """
    source = run.drafter.source
    if not source.keeps_predictions:
        run.buffer.forget_drafts()
    if run.is_retry:
        return Drafts(last_known(make_frontier(run)))
    found = run.drafter.propose(run)
    if run.width > 1:
        shape = (len(run.buffer.tokens), run.width - 1, run.vocab_size)
        refuses_nan = not run.policy.freezes_noise or run.stats.passes == 0
        check_proposed(source, found, shape, refuses_nan)
    return found


def make_frontier(run: RunParts) -> Frontier:
    """What is known where the window's drafts begin."""
    buffer = run.buffer
    return Frontier(
        buffer.tokens,
        buffer.origin,
        buffer.filled,
        buffer.slots[:, :-1],
        run.scores.last_scores.value,
        run.prompt.layout,
        run.vocab_size,
        run.impossible,
        None if run.scheduler is None else buffer.n_generated == 0,
        run.prompt.n_shown,
    )


def check_retry(run: WindowRun) -> None:
    """Raise NumericsError where the last pass need not be repeated: a row is really invalid.

    That pass had no drafts, or was such a repetition already, or its first token followed a prompt
    that the model itself processed.
    """
    is_bad = run.rows.bad_rows()
    is_final = run.is_retry or run.width == 1
    if not is_final and run.calls.knows_first:
        is_final = bool((is_bad & (run.buffer.n_generated == 0)).any())
    if is_final:
        rows = range(len(is_bad)) if run.scheduler is None else run.scheduler.rows
        bad = zip(rows, is_bad.tolist())
        raise invalid_logits(tuple(row for row, is_one in bad if is_one))
