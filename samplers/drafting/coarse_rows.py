"""`CoarseDrafter` on the host: of each row the slots that need it (`coarse_rounds_numpy`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmaccel.kernels.coarse_rounds_numpy import RowPass, RowWindow, read_tokens
from mmaccel.samplers.acceptance import one_hot
from mmaccel.samplers.drafting.contract import OpenRun, PassScores

if TYPE_CHECKING:
    from mmaccel.samplers.drafting.coarse_drafter import CoarseDrafter

_NEVER = float("-inf")


def redraft(
    coarse: CoarseDrafter,
    run: OpenRun,
    drafts: Tensor,
    noise: Tensor,
    p_draft: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """`CoarseDrafter.correct`. Holds in `CoarseState.coming` what `record` will record."""
    n_ids = coarse.opened.config.vocab_size
    rows = [read_tokens(tokens, n_ids) for tokens in run.rows.tokens.numpy()]
    table = coarse.opened.table(run).numpy()
    firsts = run.rows.n_generated.tolist()
    has_seen = coarse.state.scores.value is not None and not run.is_retry
    if has_seen and drafts.shape[1]:
        drafts, p_draft = _redraft(coarse, run, rows, table, drafts, noise, p_draft)
    seen = [torch.from_numpy(row.take(table[k : k + run.width])) for row, k in zip(rows, firsts)]
    coarse.state.coming.hold(seen[0][None] if len(seen) == 1 else torch.stack(seen))
    return drafts, p_draft


def record(coarse: CoarseDrafter, run: OpenRun, scores: PassScores) -> None:
    """`CoarseDrafter.observe`; candidates are found when needed."""
    held = coarse.state
    model = coarse.opened.model
    states = coarse.guided_states(run)
    prompts = held.prompts.value
    if prompts is None:
        held.prompts.hold(model.of_prompt(states[:, 0]))
    elif 0 in run.rows.n_generated.tolist():  # rows that were admitted later
        is_first = run.rows.n_generated[:, None] == 0
        held.prompts.hold(torch.where(is_first, model.of_prompt(states[:, 0]), prompts))
    held.scores.hold(scores.window)
    coarse.hold_pass(run, held.coming.get(), states, scores.last)


def _redraft(
    coarse: CoarseDrafter,
    run: OpenRun,
    rows: list[Any],
    table: Any,
    drafts: Tensor,
    noise: Tensor,
    p_draft: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    opened = coarse.opened
    slots = run.rows.slots[:, :-1]
    layout = run.prompt.layout
    allowed = None if layout is None else layout.allowed(slots)
    if allowed is not None:
        allowed = allowed.expand(*slots.shape, run.vocab_size)
        noise = torch.where(allowed, noise, _NEVER)
    temperature = run.params.temperature
    windows = _list_windows(coarse, run, rows, table, noise)
    if not windows:
        return drafts, p_draft
    numbers = torch.tensor([*windows], dtype=torch.int64)
    scale = 1.0 / (temperature or 1.0)
    redrafted = opened.rounds_on_rows.redraft(
        [*windows.values()],
        scale,
        opened.candidates,
        opened.count_rounds(slots.shape[1]),
        records=p_draft is not None,
    )
    if not len(redrafted.at):
        return drafts, p_draft

    drafts = drafts.clone()
    tokens = run.rows.tokens
    for b, window in windows.items():
        of_window = slice(window.column, window.column + len(window.neighbours))
        drafts[b, : len(window.neighbours)] = torch.from_numpy(window.work[of_window])
        tokens[b, of_window] = drafts[b, : len(window.neighbours)]
    if p_draft is None:
        return drafts, None
    p_draft = p_draft.clone()
    at_rows = numbers[torch.from_numpy(redrafted.rows)]
    at = torch.from_numpy(redrafted.at)
    if temperature == 0:
        p_draft[at_rows, at] = one_hot(drafts[at_rows, at][None], run.vocab_size)[0]
        return drafts, p_draft
    scores = torch.from_numpy(redrafted.scores)
    if allowed is not None:
        widths = torch.tensor(
            [window.width - window.moved for window in windows.values()], dtype=torch.int64
        )
        is_new = (at >= widths[torch.from_numpy(redrafted.rows)])[:, None]
        scores = scores.masked_fill(is_new & ~allowed[at_rows, at], _NEVER)
    p_draft[at_rows, at] = scores.softmax(-1)
    return drafts, p_draft


def _list_windows(
    coarse: CoarseDrafter, run: OpenRun, rows: list[Any], table: Any, noise: Tensor
) -> dict[int, RowWindow]:
    """Windows by row, without rows before their first pass and after their end."""
    held = coarse.state
    forced = run.rows.forced()
    ended = run.rows.ended.tolist()
    filled = run.rows.filled.tolist()
    seen = held.neighbours.get().numpy()
    scores = held.scores.get().numpy()
    last = held.last.get().numpy()
    prompts = held.prompts.get().numpy()
    states = held.states.get()
    firsts = held.first.get()[:, 0].tolist()
    windows = {}
    for b, n_made in enumerate(run.rows.n_generated.tolist()):
        if not n_made or ended[b]:
            continue
        width = filled[b] - run.rows.origin - firsts[b]  # of the last pass
        moved = n_made - firsts[b]
        n_slots = min(run.width - 1, run.length - n_made)
        if not coarse.opened.model.drafts_new_slots:
            n_slots = min(n_slots, width - moved)
        windows[b] = RowWindow(
            rows[b],
            run.rows.origin + n_made,
            table[n_made : n_made + n_slots],
            n_made,
            RowPass(seen[b], states[b], scores[b], last[b], prompts[b]),
            moved,
            width,
            noise[b].numpy(),
            None if forced is None else forced[b].numpy() >= 0,
        )
    return windows
