"""What a reducer may look at: the visual tokens of some rows, and the text only on request.

A row is one image, one video, or all visual tokens of one prompt, as the model's stage has it. What
costs something (keys, attention, text) is a function that a method calls only if it needs it.

Shapes: **B** rows, **N** visual tokens, **C** channels, **H** heads, **D** head width, **T** text
tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mmaccel.capabilities import Capable, Option, Words, explain, refuse
from mmaccel.reduction.visual_tokens.selection import count_groups

Queries = Literal["cls", "all", "last", "text"]


class Text(NamedTuple):
    """Text tokens that a method compares visual tokens with."""

    states: Tensor  # [B, T, C], at the stage of the visual tokens
    mask: Tensor  # [B, T] bool
    keys: Tensor | None = None  # [B, T, H, D], of the layer before


Keys = Callable[[int], Tensor]  # layer -> [B, N, H, D]
Attention = Callable[[int, Queries, bool], Tensor]  # layer, queries, per_head -> [B, N] | [B, H, N]


@dataclass(frozen=True, eq=False)
class VisualContext(Capable):
    """The visual tokens of some rows at one stage of a model. Make one with `make_context`."""

    x: Tensor  # [B, N, C] states
    valid: Tensor  # [B, N] bool, False where a row has fewer tokens
    group: Tensor  # [B, N] int64 >= 0, tile or frame; 0 is the overview or the first frame
    row: Tensor  # [B, N] int64 in the group's grid, -1 where unknown
    column: Tensor
    # [B, 2] int64, rows and columns of tiles; tile (r, c) is group 1 + r * columns + c; (0, 0) for
    # an overview alone
    tile_grid: Tensor
    size: Tensor  # [B, N] float32, how many tokens each stands for after earlier merges
    initial: Tensor  # [B] int64, tokens of each row before the method's first layer
    seeds: Tensor  # [B] int64, what a row's random choices are keyed with
    # that receives what is left; the one before it has seen all of x. None at the encoder's exit
    layer: int | None
    depth: int | None  # layers of the stage's tower
    has: frozenset[str]  # words of `mmaccel.capabilities`
    _keys: Keys | None = None
    _attention: Attention | None = None
    _text: Callable[[], Text] | None = None

    slot = "model"

    @property
    def offers(self) -> Words:
        return self.has | {"visual tokens"}

    @property
    def counts(self) -> Tensor:
        """`[B]` int64, how many tokens each row has."""
        return self.valid.sum(1)

    @property
    def known_group(self) -> Tensor:
        """`[B, N]` int64, `group`, and 0 of padding."""
        return self.group.where(self.valid, 0)

    @property
    def group_sizes(self) -> Tensor:
        """`[B, G]` int64, how many tokens each group has. Cost: one host synchronisation."""
        group = self.known_group
        return count_groups(group, self.valid, int(group.max()) + 1 if group.numel() else 1)

    def keys(self, layer: int) -> Tensor:
        """Keys `[B, N, H, D]` in a layer, negative ones counted from the last."""
        self._ask("keys")
        assert self._keys is not None
        return self._keys(layer)

    def attention(self, layer: int, queries: Queries, per_head: bool = False) -> Tensor:
        """Attention that each visual token receives in a layer, `[B, N]` float32, or `[B, H, N]`,
        summed over queries; normalised over all that a query sees, text included. Layers are the
        encoder's at its exit; negative ones are counted from its end.
        """
        self._ask(f"{queries}_attention")
        assert self._attention is not None
        return self._attention(layer, queries, per_head)

    def text(self) -> Text:
        """The text tokens: states `[B, T, C]`, mask `[B, T]`, keys `[B, T, H, D]` or None."""
        self._ask("text")
        assert self._text is not None
        return self._text()

    def _ask(self, word: str) -> None:
        """Refuse what a method asks for without a word of it in its `needs`."""
        refuse(explain(Option("context", frozenset({word})), self))


def make_context(
    x: Tensor,
    valid: Tensor | None = None,
    *,
    group: Tensor | None = None,
    groups: Literal["tiles", "frames"] | None = None,
    row: Tensor | None = None,
    column: Tensor | None = None,
    tile_grid: Tensor | None = None,
    size: Tensor | None = None,
    initial: Tensor | None = None,
    seed: int | Tensor = 0,
    layer: int | None = None,
    depth: int | None = None,
    keys: Keys | None = None,
    attention: Attention | None = None,
    queries: tuple[Queries, ...] = (),
    text: Callable[[], Text] | None = None,
    offers: tuple[str, ...] = (),
) -> VisualContext:
    """A `VisualContext`, with what is left out filled in: one group, and all of a row's tokens.

    `seed` is of all rows, or `[B]` int64 of each; `queries` those that `attention` knows; `offers`
    is ("pixels",) where x are pixels.
    """
    valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if valid is None else valid
    whole = torch.zeros_like(valid, dtype=torch.int64)
    known = {
        "keys": keys,
        "text": text,
        "grid": row if column is not None else None,
        "tiles": tile_grid,
        "frames": group if groups == "frames" else None,
    }
    has = {name for name, value in known.items() if value is not None}
    has |= {f"{name}_attention" for name in queries if attention is not None}
    return VisualContext(
        x,
        valid,
        whole if group is None else group,
        whole - 1 if row is None else row,
        whole - 1 if column is None else column,
        whole.new_zeros(len(x), 2) if tile_grid is None else tile_grid,
        torch.ones_like(valid, dtype=torch.float32) if size is None else size,
        valid.sum(1) if initial is None else initial,
        torch.as_tensor(seed, dtype=torch.int64, device=x.device).expand(len(x)),
        layer,
        depth,
        frozenset(has | set(offers)),
        keys,
        attention,
        text,
    )
