"""`count_new_drafts` on a CPU, whose tensors may be read."""

from __future__ import annotations

from torch import Tensor


def count_new_drafts(n_generated: Tensor, filled: Tensor, *, origin: int, n_drafts: int) -> int:
    n_predicted = int((filled.numpy() - n_generated.numpy()).min()) - origin
    return n_drafts - min(max(n_predicted, 0), n_drafts)
