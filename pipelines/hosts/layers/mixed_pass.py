"""The attention of a pass whose rows have different numbers of entries, which are one row to all
else: windows, or what is wanted of them, and pieces of prompts.

SARATHI: A. Agrawal et al., arXiv 2308.16369, section 4: linear layers process the tokens of all
together, and each request attends for itself. Windows attend as in a pass of their own, over views
of all rows; each piece attends over a view of its row. Entries that are left out attend as copies
of their row's first one.
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
    """A `WindowPass` whose entries are one row: those of `whole`, then those of each piece.

    Attributes:
        whole: the pass over windows.
        pieces: the pieces, each with the pass over it.
        wanted: see `Pass`.
        place: `[R W]` int64, of each entry of `whole` among those that are wanted; None: all are.
    """

    whole: WindowPass
    pieces: Sequence[tuple[PromptPiece, WindowPass]] = ()
    wanted: Tensor | None = None
    place: Tensor | None = None

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *,
        scale: float, softcap: float | None = None, hidden: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """As `WindowPass.attend`, of queries `[1, Hq, T, D]` of all entries: `[1, Hq, T, D]`."""
        rows = len(self.whole.start)
        sizes = [len(piece.tokens) for piece, _ in self.pieces]
        windows, *asking = query[0].split([query.shape[2] - sum(sizes), *sizes], 1)  # [Hq, n, D]
        if self.place is not None:
            windows = windows[:, self.place.to(query.device)]
        by_row = windows.unflatten(1, (rows, -1)).transpose(0, 1)  # [R, Hq, W, D]
        out = self.whole.attend(layer, by_row, key, value, scale=scale, softcap=softcap)
        own = out.transpose(0, 1).flatten(1, 2)
        made = [own if self.wanted is None else own[:, self.wanted.to(query.device)]]
        held = self.stores[layer].held()
        for (piece, this), queries in zip(self.pieces, asking, strict=True):
            row = slice(piece.row, piece.row + 1)
            length = this.stores[layer].layout.visible_length
            keys, values = (states[row, :, :length] for states in held)
            out = this.attend(layer, queries[None], keys, values, scale=scale, softcap=softcap)
            made.append(out[0])
        return torch.cat(made, 1)[None]
