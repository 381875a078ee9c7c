"""`accept_prefix` on a CPU, row by row in plain numbers: faster than small operations of torch."""

from __future__ import annotations

from math import isfinite

from torch import Tensor

from mmaccel.kernels.accept_prefix import RowState


def accept_prefix(
    new: Tensor,
    kept: Tensor,
    peak: Tensor,
    variation: Tensor | None,
    state: RowState,
    limit: Tensor,
    stops: Tensor | None,
    *,
    origin: int,
    counts: bool,
) -> None:
    width = new.shape[1]
    most = int(limit)
    n_accepted = [1 + (row + [False]).index(False) for row in kept.tolist()]
    written = state.tokens.numpy()
    new_tokens = new.numpy()
    peaks = peak.detach().numpy()
    n_generated = state.n_generated.numpy()
    filled = state.filled.numpy()
    ended = state.ended.numpy()
    is_bad = state.is_bad.numpy()
    gained = state.n_new.numpy()
    stop_tokens = () if stops is None else stops.tolist()
    for row, n_new in enumerate(n_accepted):
        first = origin + int(n_generated[row])
        filled[row] = first + width
        if ended[row]:
            written[row, first : first + width] = gained[row] = 0
            continue
        written[row, first : first + width] = new_tokens[row]
        n_new = min(n_new, most - int(n_generated[row]))
        scores = peaks[row, :n_new].tolist()
        for k, token in enumerate(new_tokens[row, :n_new].tolist()):
            if not isfinite(scores[k]):
                is_bad[row] = True
                n_new = k
                break
            if token in stop_tokens:
                ended[row] = True
                n_new = k + 1
                break
        gained[row] = n_new
        n_generated[row] += n_new
        ended[row] |= n_generated[row] >= most
    if counts:
        count_pass(state, variation, limit)


def count_pass(state: RowState, variation: Tensor | None, limit: Tensor) -> None:
    most = int(limit)
    n_new = state.n_new.tolist()
    gains = state.gains.numpy()
    passes = state.passes.numpy()
    spent = state.spent.numpy()
    for row, n in enumerate(n_new):
        gains[min(passes[row], len(gains) - 1), row] = n
        passes[row] += 1
        if variation is not None:
            spent[row] += variation[row, :n].numpy().sum(dtype="float64")
    n_generated = state.n_generated.tolist()
    missing = [0 if end else most - n for n, end in zip(n_generated, state.ended.tolist())]
    bad = any(n > 0 and is_one for n, is_one in zip(missing, state.is_bad.tolist()))
    state.summary.numpy()[:] = max(missing), sum(n > 0 for n in missing), sum(n_generated), bad
