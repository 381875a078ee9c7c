"""Passes of a causal LM that are no plain windows: canvases of drafts; prompts beside windows."""

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
    """Logits `[R, W, V]` of windows, in a pass that also processes pieces of prompts. All but
    attention sees one row of all entries; `row_inputs` are those of each entry's row. An entry that
    is not wanted is not computed, and has the logits of its row's first one.
    """
    if window.prompt_logits is not None and not pieces:  # known for the first entries
        return window.forward(replace(entries, wanted=None))
    stores = window.run_caches()
    rows, width = entries.tokens.shape
    indices = entries.indices
    stores.prepare(indices, None, window.find_stride(indices.device))
    whole = open_pass(window, entries, indices, sparse=stores.find_chooser())
    row_of_entry = torch.arange(rows, device=indices.device)[:, None].expand_as(indices)
    positions = stores.to_positions(find_positions(entries, indices, whole))
    columns = [[states.flatten()] for states in (entries.tokens, positions, row_of_entry)]
    wanted = entries.wanted  # of the R W entries, row by row; None: all
    place: Tensor | None = None  # [R W], of each entry among the wanted ones, or its row's first
    if wanted is not None:
        for layout in stores.layouts:
            layout.choose_entries(wanted)
        columns = [[states[wanted]] for (states,) in columns]
        order = torch.arange(len(wanted), device=wanted.device)
        places = torch.full_like(indices, -1).view(-1).scatter(0, wanted, order).view(rows, width)
        place = places.where(places >= 0, places[:, :1]).flatten()
    piece_passes: list[tuple[PromptPiece, WindowPass]] = []
    for piece in pieces:
        end = piece.start + len(piece.tokens)
        index = torch.arange(piece.start, end, device=indices.device)
        prefix = stores.prefix
        if prefix is not None:
            prefix = prefix.select(index.new_tensor([piece.row]))
        piece_pass = WindowPass(
            index[:1],
            whole.windows,
            stores.add_row(piece.row, piece.start, end),
            by_kernel=whole.by_kernel,
            prefix=prefix,
        )
        piece_passes.append((piece, piece_pass))
        of_row = torch.full_like(piece.tokens, piece.row)
        for column, of_piece in zip(columns, (piece.tokens, index, of_row), strict=True):
            column.append(of_piece)
    this = MixedPass(
        whole.start, whole.windows, whole.stores, whole=whole, pieces=piece_passes, wanted=wanted,
        place=place,
    )  # fmt: skip
    n_of_windows = len(columns[0][0])
    options: dict[str, Any] = {}
    if pieces:  # whose logits nobody reads
        options = dict.fromkeys(window.facts.last_only, torch.arange(n_of_windows))
    tokens, at, of_rows = (torch.cat(column) for column in columns)
    with window.select_inputs(of_rows):
        position_ids = window.position_ids(at[:, None]).mT
        output = window.run_forward(tokens[None], position_ids, None, this, **options)
    logits: Tensor = output.logits[:, :n_of_windows, : window.vocab_size]
    states = window.last_states
    if place is not None:
        logits = logits[:, place.to(logits.device)]
        states = None if states is None else states[:, place.to(states.device)]
    if states is not None:
        window.last_states = states[:, : rows * width].view(rows, width, -1)
    return logits.view(rows, width, -1)


@torch.no_grad()
def run_canvas(window: CausalLMWindow, entries: Pass) -> Tensor:
    """Logits `[R, W, V]` of entries that see each other. Cost: a host synchronisation."""
    first = window.prompt_logits  # of the prompt's last token, whose entry stays as it is
    if first is not None:
        assert entries.start is not None
        entries = Pass(entries.tokens[:, 1:], entries.start + 1)
    end = entries.indices[:, -1:, None] + 1  # [R, 1, 1]
    n_read = min(int(end.max()), window.run_caches().layout.max_length)
    reads = torch.arange(n_read, device=end.device) < end
    logits: Tensor = window.run_pass(replace(entries, reads=reads)).logits
    logits = logits[..., : window.vocab_size]
    return logits if first is None else torch.cat([first[:, None], logits], 1)
