"""A pass is repeated once where an invalid draft may have spoiled it.

Attention multiplies the values that a mask hides by 0, which leaves NaN: keys and values of a draft
that is thrown away make the slots before it invalid. Copies of each row's last token overwrite them
in a second pass. The row is really invalid if that changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmaccel.samplers.checks import invalid_logits

if TYPE_CHECKING:
    from mmaccel.samplers.window.run import WindowRun


def check_retry(run: WindowRun) -> None:
    """Raise NumericsError where the last pass need not be repeated: a row is really invalid.

    That pass had no drafts, or was such a repetition already, or its first token followed a prompt
    that the model itself processed.
    """
    is_bad = run.rows.bad_rows()
    is_final = run.is_retry or run.width == 1
    if not is_final and run.calls.has_own_prompt:
        is_final = bool((is_bad & (run.buffer.n_generated == 0)).any())
    if is_final:
        rows = range(len(is_bad)) if run.scheduler is None else run.scheduler.rows
        bad = zip(rows, is_bad.tolist())
        raise invalid_logits(tuple(row for row, is_one in bad if is_one))
