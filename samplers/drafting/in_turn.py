"""Drafts that are drawn one after the other, each from scores that follow from those before."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmaccel.samplers.acceptance import draw
from mmaccel.samplers.drafting.contract import Drafts, OpenRun


def draft_in_turn(run: OpenRun, find_logits: Callable[[Tensor, int], Tensor]) -> Drafts:
    """All drafts of a window, by the slots' frozen noise where the policy has it; else drawn with
    noise that nothing else reads, and their distributions recorded.

    `find_logits` gives raw logits `[R, 1, V]` of draft k, from the buffer `[B, N]` with those
    before.
    """
    rows = run.rows
    prompt = run.prompt
    is_certain = run.policy.freezes_noise
    work = rows.tokens.clone()  # the token buffer with the drafts so far
    noise = run.frozen_noise() if is_certain else None
    distributions = [work.new_zeros(len(work), 0, run.vocab_size, dtype=torch.float32)]
    for k in range(run.width - 1):
        column = rows.columns[:, k : k + 1]
        slots = rows.slots[:, k : k + 1]
        logits = find_logits(work, k)
        scores = run.params.apply(logits, prompt.branches, work, column, slots, prompt.layout)
        if noise is not None:
            token = (scores + noise[:, k : k + 1]).argmax(-1)
        else:
            distributions.append(scores.softmax(-1))
            token = draw(distributions[-1], run.noise.fresh(slots, run.rows.passes).drafts)
        work.scatter_(1, column, token)
    tokens = work.gather(1, rows.columns[:, :-1])
    return Drafts(tokens, distribution=None if is_certain else torch.cat(distributions, 1))


def draft_at_once(run: OpenRun, logits: Tensor) -> Drafts:
    """Drafts of a window from one pass's logits `[R, W-1, V]`, which depend on no other draft."""
    return draft_in_turn(run, lambda work, k: logits[:, k : k + 1])
