"""The entries of a causal LM's pass, as its layers know them: under masks, or by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from mmaccel.contracts import Pass
from mmaccel.pipelines.hosts.layers.attention import WindowPass, find_ancestors
from mmaccel.pipelines.hosts.layers.masks import make_masks

if TYPE_CHECKING:
    from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow


def open_pass(window: CausalLMWindow, entries: Pass, indices: Tensor, **fields: Any) -> WindowPass:
    """A pass with `indices` `[R, W]` whose layers attend by a function of ours."""
    stores = window.run_caches()
    prefix = stores.prefix
    if prefix is not None and stores.layout.selected_rows is not None:
        prefix = prefix.select(stores.layout.selected_rows)
    if fields.get("watcher") is None:
        fields["watcher"] = stores.rounds
    return WindowPass(
        indices[:, 0].contiguous() if entries.start is None else entries.start,
        stores.windows,
        stores.layers,
        by_kernel=not window.attention_reason,
        ragged=window.setup.ragged,
        num_splits=1 if is_exact(window) else None,
        choices=window.choices,
        tree=None if entries.parents is None else find_ancestors(entries.parents),
        reads=entries.reads,
        prefix=prefix,
        **fields,
    )


def is_exact(window: CausalLMWindow) -> bool:
    decoder = window.forwards.decoder
    return decoder is not None and decoder.same_bits


def make_pass_masks(window: CausalLMWindow, entries: Pass, indices: Tensor) -> Any:
    """The masks of a pass with `indices` `[R, W]`, as the model's forward takes them."""
    start = entries.start
    is_expanded = start is not None and start.stride(0) == 0  # one number for all rows
    queries = indices[:1] if is_expanded else indices
    length = window.run_caches().layout.visible_length
    rows = len(entries.tokens)
    return make_masks(queries, rows, length, window.facts.windows, window.model.dtype)


def find_positions(entries: Pass, indices: Tensor, this: WindowPass | None) -> Tensor:
    """Positions `[R, W]` int64 of entries with `indices` `[R, W]`."""
    if entries.positions is not None:
        return entries.positions
    if this is not None and this.tree is not None:
        # an entry stands as far behind the first as it has ancestors: those of one depth share
        return this.start[:, None] + this.tree.sum(-1) - 1
    return indices
