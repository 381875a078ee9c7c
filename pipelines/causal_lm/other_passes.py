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
from mmaccel.pipelines.causal_lm.entries import find_positions, open_pass
from mmaccel.pipelines.layers.attention import WindowPass
from mmaccel.pipelines.layers.mixed_pass import MixedPass

if TYPE_CHECKING:
    from mmaccel.pipelines.causal_lm.model import CausalLMWindow


@torch.no_grad()
def run_mixed(window: CausalLMWindow, entries: Pass, pieces: Sequence[PromptPiece]) -> Tensor:
    """Logits `[R, W, V]` of the windows.

    Windows and pieces attend apart, all else sees one row of all entries. `row_inputs` are those of
    each entry's row.
    """
    stores = window.run_caches()
    rows, width = entries.tokens.shape
    indices = entries.indices
    stores.prepare(indices, None, window.find_stride(indices.device))
    whole = open_pass(window, entries, indices, sparse=stores.find_chooser())
    tokens = [entries.tokens.flatten()]
    positions = [find_positions(entries, indices, whole).flatten()]
    parts: list[tuple[PromptPiece, WindowPass]] = []
    row_of_entry = [row for row in range(rows) for _ in range(width)]
    for piece in pieces:
        end = piece.start + len(piece.tokens)
        index = torch.arange(piece.start, end, device=indices.device)
        added = stores.add_row(piece.row, piece.start, end)
        prefix = stores.prefix
        if prefix is not None:
            prefix = prefix.select(index.new_tensor([piece.row]))
        by_kernel = whole.by_kernel
        own = WindowPass(index[:1], whole.windows, added, by_kernel=by_kernel, prefix=prefix)
        tokens.append(piece.tokens)
        positions.append(index)
        parts.append((piece, own))
        row_of_entry += [piece.row] * len(piece.tokens)
    this = MixedPass(whole.start, whole.windows, whole.stores, whole=whole, pieces=parts)
    n_windows = rows * width
    kept: dict[str, Any] = dict.fromkeys(window.facts.last_only, torch.arange(n_windows))
    with window.select_inputs(entries.tokens.new_tensor(row_of_entry)):
        output = window.run_forward(
            torch.cat(tokens)[None],
            window.position_ids(torch.cat(positions)[:, None]).mT,
            None,
            this,
            **kept,
        )
    states = window.last_states
    if states is not None:
        window.last_states = states[:, :n_windows].view(rows, width, -1)
    logits: Tensor = output.logits[:, :n_windows, : window.vocab_size]
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
