"""Coarse drafts on the host: rows one by one, and of a slot only what its draft needs.

`CoarseDrafts` describes the same as operations on all slots of all rows. Here a row's slots are two
ranges, those that the last pass has seen and the new ones behind them, so that nothing is gathered.
Slots before the first one whose neighbours have changed keep their drafts, and nothing is computed
of them; candidates are looked for among the scores of those that are left, before a sweep and not
after the pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mmaccel.kernels.sort_numpy import largest_numpy
from mmaccel.samplers.acceptance import one_hot

if TYPE_CHECKING:
    from mmaccel.samplers.drafting.coarse import CoarseDrafts
    from mmaccel.samplers.window.run import WindowRun

_NEVER = float("-inf")


def redraft_rows(
    coarse: CoarseDrafts, run: WindowRun, drafts: Tensor, noise: Tensor, p_draft: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """`CoarseDrafts.redraft`, and with `p_draft` `CoarseDrafts.redraft_with_law`."""
    names = ("scores", "neighbours", "states", "prompts", "first", "last")
    scores, seen, states, prompts, first, last = (run.held(f"coarse {name}") for name in names)
    if scores is None or not drafts.shape[1]:
        return drafts, p_draft
    assert seen is not None and states is not None and prompts is not None
    assert first is not None and last is not None
    buffer, layout, forced = run.buffer, run.prompt.layout, run.forced()
    slots, origin, ended = buffer.slots[:, :-1], buffer.origin, run.ended()
    allowed = None if layout is None else layout.allowed(slots)
    if allowed is not None:
        allowed = allowed.expand(*slots.shape, run.vocab_size)
        noise = torch.where(allowed, noise, _NEVER)
    table, tokens, scale = (
        coarse.table(run),
        buffer.tokens.numpy(),
        1.0 / (run.params.temperature or 1.0),
    )
    drafts, p_draft = drafts.clone(), None if p_draft is None else p_draft.clone()
    for b, (n_made, filled) in enumerate(zip(buffer.n_generated.tolist(), buffer.filled.tolist())):
        if not n_made or ended[b]:  # before the row's first pass, or after its end
            continue
        first_slot = int(first[b])
        moved, end = n_made - first_slot, filled - origin - first_slot  # in the last pass's window
        n_slots = min(drafts.shape[1], run.length - n_made)
        n_seen = min(end - moved, n_slots)
        if not coarse.model.drafts_new_slots:
            n_slots = n_seen
        work, neighbours = _read_tokens(coarse, run, b), table[n_made : n_made + n_slots].numpy()
        ids_seen = seen[b, moved : moved + n_seen]
        changed = (work.take(neighbours[:n_seen]) != ids_seen.numpy()).any(1)
        start = int(changed.argmax()) if changed.any() else n_seen
        if start == n_slots:
            continue
        n_old, n_new = n_seen - start, n_slots - n_seen
        here, old = slice(start, n_slots), slice(moved + start, moved + n_seen)

        known = states[b, old]
        if n_new:
            known = torch.cat([known, states[b, end - 1].expand(n_new, -1)])
        distances = torch.arange(1 - n_old, n_new + 1).clamp_(min=0)
        base = coarse.model.base(slots[b, here], distances, known, prompts[b])
        stale, stale_noise = scores[b, old], noise[b, start:n_seen]
        find = _find_best if p_draft is None else _find_likely
        n_corrected, values, ids = find(stale, stale + stale_noise, coarse.candidates)
        law = None
        if p_draft is not None and run.params.temperature:
            law = torch.cat([stale, stale.new_empty(n_new, run.vocab_size)])
        column = origin + n_made
        drafted = coarse.row_sweep.run(
            work, scale, n_corrected, np.arange(column + start, column + n_slots),
            neighbours[here], np.arange(start, n_slots) < n_seen,
            np.zeros(n_slots - start, bool) if forced is None else forced[b, here].numpy() >= 0,
            ids_seen[start:].numpy(), base.numpy(), coarse.hidden(ids_seen[start:], base[:n_old]).numpy(),
            ids.numpy(), values.numpy(), last[b].numpy(),
            (coarse.model.gate(distances)[:, 0] * scale).numpy(), noise[b, here].numpy(),
            None if law is None else law.numpy(),
        )  # fmt: skip
        made = work[column + start : column + n_slots]
        tokens[b, column + start : column + n_slots] = drafts.numpy()[b, here] = made
        if p_draft is not None and drafted:
            at = start + torch.tensor(drafted)
            if law is None:
                p_draft[b, at] = one_hot(drafts[b : b + 1, at], run.vocab_size)[0]
                continue
            if allowed is not None:
                law[n_old:].masked_fill_(~allowed[b, n_seen:n_slots], _NEVER)
            p_draft[b, at] = law[drafted].softmax(-1)
    return drafts, p_draft


def find_seen(coarse: CoarseDrafts, run: WindowRun) -> Tensor:
    """`[B, W, N]` int64, the ids of all neighbours of the window as its tokens stand."""
    table, (batch, width) = coarse.table(run).numpy(), run.buffer.slots.shape
    seen = np.empty((batch, width, table.shape[1]), np.int64)
    for b, first in enumerate(run.buffer.n_generated.tolist()):
        _read_tokens(coarse, run, b).take(table[first : first + width], out=seen[b], mode="clip")
    return torch.from_numpy(seen)


def _read_tokens(coarse: CoarseDrafts, run: WindowRun, b: int) -> np.ndarray:
    """`[N + 1]` int64, the tokens of a row; V for padding and in the last column."""
    tokens, n_ids = run.buffer.tokens[b].numpy(), coarse.config.vocab_size
    work = np.full(len(tokens) + 1, n_ids)
    unsigned = np.uint64  # in which padding, -1, is the largest number
    np.minimum(tokens.view(unsigned), unsigned(n_ids), out=work[:-1].view(unsigned))
    return work


def _find_best(scores: Tensor, perturbed: Tensor, n: int) -> tuple[int, Tensor, Tensor]:
    """The `n` best perturbed scores of slots and their ids, all of which are corrected."""
    n = min(n, scores.shape[-1])
    return n, *largest_numpy(perturbed, n)


def _find_likely(scores: Tensor, perturbed: Tensor, n: int) -> tuple[int, Tensor, Tensor]:
    """The perturbed scores of the `n` most likely ids, which are corrected, and of the best other."""
    n = min(n, scores.shape[-1] - 1)
    _, likely = largest_numpy(scores, n)
    values = perturbed.gather(-1, likely)
    rest = perturbed.scatter_(-1, likely, _NEVER).numpy().argmax(-1)
    others = torch.from_numpy(rest)[:, None]
    return n, torch.cat([values, perturbed.gather(-1, others)], -1), torch.cat([likely, others], -1)
