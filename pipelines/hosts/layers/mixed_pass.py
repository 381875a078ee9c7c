"""The attention of a pass over windows and pieces of prompts, which are one row to all else.

SARATHI: A. Agrawal et al., arXiv 2308.16369, section 4: linear layers process all tokens together,
each request attends for itself. Windows attend as in a pass of their own, each piece over a view of
its row. Entries that are left out attend as copies of their row's first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.model_parts import PromptPiece
from mmaccel.pipelines.hosts.layers.attention import WindowPass


@dataclass(kw_only=True)
class MixedPass(WindowPass):
    """A `WindowPass` whose entries are one row: those of `whole`, then those of each piece."""

    whole: WindowPass  # over the windows
    pieces: Sequence[tuple[PromptPiece, WindowPass]] = ()  # each with the pass over it
    wanted: Tensor | None = None  # as of `Pass`
    place: Tensor | None = None  # [R W] int64, of each entry of `whole` among the wanted ones

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *,
        scale: float, softcap: float | None = None, hidden: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """As `WindowPass.attend`, of queries `[1, Hq, T, D]` of all entries: `[1, Hq, T, D]`."""
        rows = len(self.whole.start)
        sizes = [len(piece.tokens) for piece, _ in self.pieces]
        n_windows = query.shape[2] - sum(sizes)
        windows, *of_pieces = query[0].split([n_windows, *sizes], 1)  # [Hq, n, D] each
        if self.place is not None:  # the windows as they are, of copies where entries are left out
            windows = windows[:, self.place.to(query.device)]
        by_row = windows.unflatten(1, (rows, -1)).transpose(0, 1)  # [R, Hq, W, D]
        out = self.whole.attend(layer, by_row, key, value, scale=scale, softcap=softcap)
        out = out.transpose(0, 1).flatten(1, 2)  # [Hq, R W, D]
        outputs = [out if self.wanted is None else out[:, self.wanted.to(query.device)]]
        stored = self.stores[layer].held()
        for (piece, this), queries in zip(self.pieces, of_pieces, strict=True):
            row = slice(piece.row, piece.row + 1)
            length = this.stores[layer].layout.visible_length
            keys, values = (states[row, :, :length] for states in stored)
            out = this.attend(layer, queries[None], keys, values, scale=scale, softcap=softcap)
            outputs.append(out[0])
        return torch.cat(outputs, 1)[None]
