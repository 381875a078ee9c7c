"""Passes of a causal LM that are no plain windows: canvases of drafts, and pieces of prompts beside
windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmaccel.contracts import Pass
from mmaccel.model_parts import PromptPiece
from mmaccel.pipelines.hosts.causal_lm.entries import find_positions, open_pass
from mmaccel.pipelines.hosts.layers.attention import WindowPass
from mmaccel.pipelines.hosts.layers.mixed_pass import MixedPass

if TYPE_CHECKING:
    from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow


@torch.no_grad()
def run_mixed(window: CausalLMWindow, entries: Pass, pieces: Sequence[PromptPiece]) -> Tensor:
    """Logits `[R, W, V]` of the windows.

    Windows and pieces attend apart, all else sees one row of all entries. `row_inputs` are those of
    each entry's row. An entry that is not wanted is not computed, and has the logits of its row's
    first one.
    """
    wanted = entries.wanted
    if window.prompt_logits is not None and not pieces:  # known for the first entries
        return window.forward(replace(entries, wanted=None))
    stores = window.run_caches()
    rows, width = entries.tokens.shape
    indices = entries.indices
    stores.prepare(indices, None, window.find_stride(indices.device))
    whole = open_pass(window, entries, indices, sparse=stores.find_chooser())
    row_of_entry = torch.arange(rows, device=indices.device)[:, None].expand_as(indices)
    at = stores.to_positions(find_positions(entries, indices, whole))
    each = entries.tokens, at, row_of_entry
    columns = [[states.flatten()] for states in each]
    place: Tensor | None = None  # [R W], of each entry or the first of its row
    if wanted is not None:
        for layout in stores.layouts:
            layout.choose_entries(wanted)
        columns = [[states.flatten()[wanted]] for states in each]
        order = torch.arange(len(wanted), device=wanted.device)
        found = torch.full_like(indices, -1).view(-1).scatter(0, wanted, order)
        found = found.view(rows, width)
        place = found.where(found >= 0, found[:, :1]).flatten()
    parts: list[tuple[PromptPiece, WindowPass]] = []
    for piece in pieces:
        end = piece.start + len(piece.tokens)
        index = torch.arange(piece.start, end, device=indices.device)
        added = stores.add_row(piece.row, piece.start, end)
        prefix = stores.prefix
        if prefix is not None:
            prefix = prefix.select(index.new_tensor([piece.row]))
        by_kernel = whole.by_kernel
        own = WindowPass(index[:1], whole.windows, added, by_kernel=by_kernel, prefix=prefix)
        of_row = torch.full_like(piece.tokens, piece.row)
        for column, own_column in zip(columns, (piece.tokens, index, of_row), strict=True):
            column.append(own_column)
        parts.append((piece, own))
    this = MixedPass(
        whole.start, whole.windows, whole.stores, whole=whole, pieces=parts, wanted=wanted,
        place=place,
    )  # fmt: skip
    n_windows = len(columns[0][0])
    kept: dict[str, Any] = {}
    if pieces:
        kept = dict.fromkeys(window.facts.last_only, torch.arange(n_windows))
    tokens, positions, of_rows = (torch.cat(column) for column in columns)
    with window.select_inputs(of_rows):
        output = window.run_forward(
            tokens[None],
            window.position_ids(positions[:, None]).mT,
            None,
            this,
            **kept,
        )
    logits: Tensor = output.logits[:, :n_windows, : window.vocab_size]
    logits = logits if place is None else logits[:, place.to(logits.device)]
    states = window.last_states
    if states is not None:
        states = states if place is None else states[:, place.to(states.device)]
        window.last_states = states[:, : rows * width].view(rows, width, -1)
    return logits.view(rows, width, -1)


@torch.no_grad()
def run_canvas(window: CausalLMWindow, entries: Pass) -> Tensor:
    """See `CanvasDrafts`. Cost: a host synchronisation."""
    known = window.prompt_logits
    if known is not None:  # the prompt's last token is in the cache, and stays
        assert entries.start is not None
        entries = Pass(entries.tokens[:, 1:], entries.start + 1)
    end = entries.indices[:, -1:, None] + 1  # [R, 1, 1]
    n_read = min(int(end.max()), window.run_caches().layout.max_length)
    reads = torch.arange(n_read, device=end.device) < end
    logits: Tensor = window.run_pass(replace(entries, reads=reads)).logits
    logits = logits[..., : window.vocab_size]
    return logits if known is None else torch.cat([known[:, None], logits], 1)
