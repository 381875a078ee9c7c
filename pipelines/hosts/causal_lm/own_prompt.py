"""A prompt that the model's own prefill processes, and from whose keys and values a window goes on.

Prompts that are more than ids under left padding (embeddings, an earlier cache, masks with holes,
token types) go through transformers' prefill; the window takes over keys and values of the attended
columns, and the logits after the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmaccel.pipelines.hosts.layers.observing import Observer
from mmaccel.pipelines.hosts.layers.sparse import SparseBlocks

if TYPE_CHECKING:
    from mmaccel.pipelines.hosts.prompt_cuts.revival import RevivingCuts


@dataclass(frozen=True)
class Cut:
    """From a layer on, the pass had fewer columns."""

    first: int  # layer
    mask: Tensor  # [R, T'] bool, columns that are attended to, the prompt's last ones
    columns: Tensor  # [R, T'] int64, which of the prompt's these are
    has_holes: bool = False  # whether the layers' caches are the whole prompt's, not shorter ones

    def cache_indices(self, prompt: Tensor) -> Tensor:
        """The cache index `[R, T']` of each column, of a prompt whose mask is `[R, T]`."""
        if self.has_holes:  # what padding writes is written anew before it is read
            return count_columns(prompt).gather(1, self.columns)
        return count_columns(self.mask)


@dataclass(frozen=True)
class PromptStates:
    """What a model's own pass over a prompt left."""

    # keys and values [R, H, n, D] of each layer, of the last n columns: all T, or those that a
    # sliding window sees, or that a cut left
    layers: Sequence[tuple[Tensor, Tensor]]
    logits: Tensor  # [R, V], after the last column
    n_processed: int  # tokens, over all rows
    n_passes: int = 1
    cuts: Sequence[Cut] = ()  # by their layers, ascending
    steps: RevivingCuts | None = None  # what later passes do in their layers
    observer: Observer | None = None  # what an eviction will look at


@dataclass(frozen=True)
class OwnPrompt:
    """A prompt of R rows and T columns."""

    mask: Tensor  # [R, T] bool, columns that are attended to, at least one in every row
    next_position: Tensor  # [R] int64, position id of the first generated token
    # runs the pass, of which a selector may choose the blocks; or passes of so many tokens at most
    process: Callable[[SparseBlocks | None, int | None], PromptStates]
    inputs: dict[str, Tensor] = field(default_factory=dict)  # [R, 1], of every generated token
    is_cut: bool = False  # whether some layers may cache fewer columns than others
    has_steps: bool = False  # whether later passes do something in the model's layers
    whole_reason: str = ""  # why it cannot come in chunks

    @cached_property
    def is_plain(self) -> bool:
        """Whether generated tokens go on at the positions of their cache indices, as ids alone."""
        return not self.inputs and torch.equal(self.next_position, self.lengths)

    @property
    def capture_obstacle(self) -> str:
        """Why passes behind it cannot be captured; empty where they can."""
        if not self.is_plain:
            return "token types, or positions that do not count the tokens"
        return "layers that cache fewer tokens than others" if self.is_cut else ""

    @property
    def fused_obstacle(self) -> str:
        """Why passes behind it need the model's own forward; empty where they do not."""
        if self.inputs:
            return "the prompt needs inputs of its own in every layer"
        return "tokens are revived in the model's own layers" if self.has_steps else ""

    @property
    def lengths(self) -> Tensor:
        """`[R]` int64, columns that are attended to."""
        return self.mask.sum(1)

    def cache_indices(self) -> Tensor:
        """The cache index `[R, T]` int64 of every column."""
        return count_columns(self.mask)


def count_columns(mask: Tensor) -> Tensor:
    """The cache index of every column `[R, T]` of those that are attended to. Others share the
    index of the first generated token, which overwrites them before it is read.
    """
    return torch.where(mask, mask.cumsum(1) - 1, mask.sum(1, keepdim=True))


def read_layers(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """`PromptStates.layers` of transformers' `DynamicCache` or `StaticCache`."""
    layers = []
    for layer in cache.layers:
        length = int(layer.get_seq_length())  # a static layer has room for more, a sliding one less
        layers.append((layer.keys[:, :, :length], layer.values[:, :, :length]))
    return layers
