"""Coarse drafts on the host: rows one by one, and of a slot only what its draft needs.

The same drafts as `CoarseDrafts` makes of all slots of all rows at once; what a row's sweep is
about is in `mmaccel.kernels.coarse_sweep_numpy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmaccel.kernels.coarse_sweep_numpy import RowPass, read_tokens
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
    is_fixed = torch.zeros_like(slots, dtype=torch.bool) if forced is None else forced >= 0
    allowed = None if layout is None else layout.allowed(slots)
    if allowed is not None:
        allowed = allowed.expand(*slots.shape, run.vocab_size)
        noise = torch.where(allowed, noise, _NEVER)
    temperature = run.params.temperature
    law = None
    if p_draft is not None:
        p_draft, law = p_draft.clone(), torch.empty(p_draft.shape[1:])
    arrays = (seen.numpy(), states, scores.numpy(), last.numpy(), prompts.numpy())
    tokens, table, found = buffer.tokens.numpy(), coarse.table(run).numpy(), drafts.clone()
    firsts, fillings = first[:, 0].tolist(), buffer.filled.tolist()
    for b, n_made in enumerate(buffer.n_generated.tolist()):
        if not n_made or ended[b]:  # before the row's first pass, or after its end
            continue
        width, column = fillings[b] - origin - firsts[b], origin + n_made
        moved, n_slots = n_made - firsts[b], min(slots.shape[1], run.length - n_made)
        if not coarse.model.drafts_new_slots:
            n_slots = min(n_slots, width - moved)
        work = read_tokens(tokens[b], coarse.config.vocab_size)
        drafted = coarse.row_sweep.redraft(
            work, column, table[n_made : n_made + n_slots], n_made,
            RowPass(*(value[b] for value in arrays)), moved, width, noise[b].numpy(),
            is_fixed[b].numpy(), 1.0 / (temperature or 1.0), coarse.candidates,
            None if law is None else law.numpy(),
        )  # fmt: skip
        if not drafted:
            continue
        made = work[column : column + n_slots]
        tokens[b, column : column + n_slots] = found.numpy()[b, :n_slots] = made
        if p_draft is None or law is None:
            continue
        if temperature == 0:
            p_draft[b, drafted] = one_hot(found[b : b + 1, drafted], run.vocab_size)[0]
            continue
        if allowed is not None and width - moved < n_slots:
            law[width - moved :].masked_fill_(~allowed[b, width - moved :], _NEVER)
        p_draft[b, drafted] = law[drafted].softmax(-1)
    return found, p_draft


def find_seen(coarse: CoarseDrafts, run: WindowRun) -> Tensor:
    """`[B, W, N]` int64, the ids of all neighbours of the window as its tokens stand."""
    tokens, table, width = run.buffer.tokens.numpy(), coarse.table(run).numpy(), run.width
    rows = (
        read_tokens(tokens[b], coarse.config.vocab_size).take(table[first : first + width])
        for b, first in enumerate(run.buffer.n_generated.tolist())
    )
    return torch.stack([torch.from_numpy(row) for row in rows])
