"""The contract of sparse attention: at every pass a method chooses the blocks that a layer reads.

A method is a frozen dataclass with `choose`, which sees a layer in blocks (`LayerBlocks`). A
`BlockScorer` summarises blocks of cached keys, and the blocks whose summaries score highest are
read, beside those of the window. The executor (`pipelines.hosts.layers.sparse`) keeps the
summaries, makes them anew where a window is rolled back, and holds a `LastChoice` of each layer.

All methods are relaxed, and what a pass attends to depends on all queries of its window: a policy
on top is measured, not proven, unless the blocks that are read are all that there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.capabilities import Exclusions, Words
from mmaccel.checks import check_answer, check_kind, within
from mmaccel.kernels.block_scores import Kind
from mmaccel.kernels.choose_blocks import choose_highest
from mmaccel.policies import Method
from mmaccel.results import Exactness


@dataclass
class LastChoice:
    """What a layer's method keeps for the next pass of the run; in captured steps NaN (or False)
    before the first choice.
    """

    probe: Tensor | None = None  # [R, C], what the choice was made for
    chosen: Tensor | None = None  # [R, H, N] bool, the blocks that were chosen
    totals: Tensor | None = None  # [R, C], sums over the passes so far, which layers compare

    def select(self, rows: Tensor) -> None:
        """Forget all rows but these, `[n]` int64, in their order."""
        for name, value in vars(self).items():
            if value is not None:
                setattr(self, name, value[rows.to(value.device)])

    def settle(self, before: LastChoice) -> None:
        """Keep values in the tensors that there were: captured steps know their addresses."""
        for name, value in vars(self).items():
            held = getattr(before, name)
            if value is not None and (held is None or held.shape != value.shape):
                setattr(self, name, value.clone())  # a cache that has grown
            elif held is not None and value is not held:
                held.copy_(value)
                setattr(self, name, held)

    def forget(self) -> None:
        """Begin anew, in the same tensors."""
        for value in vars(self).values():
            if value is not None:
                value.fill_(float("nan") if value.is_floating_point() else 0)


@dataclass(frozen=True)
class LayerBlocks:
    """A layer at a pass, in blocks of P positions.

    Shapes: **R** rows, **H** key heads, **G** query heads a key head, **W** window, **S** cache
    indices, **N** blocks, **D** head width, **C** numbers of a summary.

    Attributes:
        layer: its number, counted without layers with a sliding window, which attend as ever.
        queries: `[R, H, G W, D]`, of all query heads that read a key head; G by G.
        keys: `[R, H, S, D]`, what the layer holds, the pass's own included.
        summaries: `[R, H, N, C]`; None of methods that have none.
        size, width, scale: P, W, and what scores are multiplied by.
        is_real: `[R, S]` bool, entries that hold something.
        is_own, n_own: `[R, N]` bool, blocks that the pass writes in; how many at most.
        start: `[R]` int64, cache index of each row's first query.
        begins: `[R]` int64, the same of the run's first pass: the prompt stands before it.
        is_first: whether the layer has not chosen before in the run; False unless `reads_back`.
        reads_back: whether tensors may be read on the host, as those of captured steps may not.
        last: what the layer's method has kept.
        lasts: that of layers that have chosen, by number; those before this one did in this pass.
    """

    layer: int
    queries: Tensor
    keys: Tensor
    summaries: Tensor | None
    size: int
    is_real: Tensor
    is_own: Tensor
    start: Tensor
    begins: Tensor
    width: int
    n_own: int
    scale: float
    is_first: bool = False
    reads_back: bool = True
    last: LastChoice = field(default_factory=LastChoice)
    lasts: Mapping[int, LastChoice] = field(default_factory=dict)

    @cached_property
    def filled(self) -> Tensor:
        """`[R, N]` int64."""
        return self.by_block(self.is_real, 0).sum(2)

    @cached_property
    def holds(self) -> Tensor:
        """`[R, N]` bool."""
        return self.filled > 0

    @cached_property
    def counts(self) -> Tensor:
        """`[R]` int64, how many blocks hold something."""
        return self.holds.sum(1)

    @cached_property
    def is_kept(self) -> Tensor:
        """`[R, 1, N]` bool: the first block, and those of the pass."""
        is_first = torch.arange(self.holds.shape[1], device=self.holds.device) == 0
        return ((self.is_own & self.holds) | is_first)[:, None]

    def by_block(self, values: Tensor, fill: float) -> Tensor:
        """What stands at cache indices, `[..., S]`, as `[..., N, P]`, filled up at the end."""
        surplus = self.is_own.shape[1] * self.size - values.shape[-1]
        return pad(values, (0, surplus), value=fill).unflatten(-1, (-1, self.size))

    def highest(self, scores: Tensor, budget: float, budgets: Tensor | None = None) -> Tensor:
        """`[R, H, N]` bool: the blocks with the highest scores, and those that are kept.

        Args:
            scores: `[R, H, N]`; those of blocks that hold nothing do not count.
            budget: the fraction of a row's blocks, those that are kept included; `budgets` `[R]`
                has that of each row where they differ, at most `budget`.
        """
        scores = scores.masked_fill(~self.holds[:, None], float("-inf"))
        scores = scores.masked_fill(self.is_kept, float("inf"))
        n_blocks = self.counts * (budget if budgets is None else budgets)
        n_blocks = n_blocks.ceil().long()[:, None, None]
        most = int((scores.shape[2] * budget) + 1)
        return choose_highest(scores, n_blocks, min(most, scores.shape[2])) | self.is_kept


@dataclass(frozen=True)
class AttentionMethod(Method, ABC):
    """Base of all methods that choose blocks of keys.

    Args:
        budget: the fraction of a row's blocks that a pass attends to, in (0, 1]; 1 changes nothing.
        block: P, entries of a block.
        first_layer: layers before it attend to everything.
    """

    budget: float = within(
        0.1,
        0,
        1,
        "give the fraction of blocks of a pass; 1 attends to all",
        above_low=True,
    )
    block: int = within(16, 1, 1024, "16 suits most models")
    first_layer: int = within(2, hint="2 suits most models")

    exactness: ClassVar[Exactness] = "relaxed"
    slot = "attention"
    shares_layers: ClassVar[bool] = False
    """Whether layers read what another has chosen: then all must hold the same entries."""
    # whether it chooses for the queries of a prompt; later passes then attend to everything
    chooses_prompts: ClassVar[bool] = False
    # where `block_scores` and `choose_blocks` do what `choose` does: the kind of the summaries; not
    # inherited, as a child may score otherwise
    summary: ClassVar[Kind | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "summary" not in vars(cls):
            cls.summary = None

    @property
    def needs(self) -> Words:
        return frozenset(
            {"own attention", "prompt blocks" if self.chooses_prompts else "step blocks"}
        )

    @property
    def excludes(self) -> Exclusions:
        own_entries = "lets each row read entries of its own"
        reasons = {
            "attentions": "leaves entries out",
            "copied entries": own_entries,
            "draft canvas": "chooses for a chain of tokens",
            "draft passes": "chooses what passes read",
        }
        if not self.chooses_prompts:
            reasons |= {"shared prompts": own_entries, "trees": "chooses for a chain of tokens"}
        if self.shares_layers:
            reasons |= {"eviction": "reads in a layer what another has chosen; take Quest"}
        if self.chooses_prompts:
            reasons |= {"chunked prompts": "chooses for all queries of a prompt at once"}
        return reasons

    @property
    def share(self) -> float | None:
        """Of a method with a `summary` that reads a share of each query's attention: p."""
        return None

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def is_whole(self) -> bool:
        """Whether all blocks are read whatever they hold."""
        return self.budget >= 1

    def most(self, n_blocks: int, n_own: int) -> int:
        """How many of `n_blocks` a head reads at most, those included that the pass writes in."""
        return n_blocks

    def source(self, layer: int) -> int:
        """The layer, this one or one before it, whose choice a layer reads."""
        return layer

    def reads_all(self, layer: int) -> bool:
        """Whether a layer reads everything, although it may choose for others."""
        return layer < self.first_layer

    def summarise(self, keys: Tensor, is_real: Tensor) -> Tensor | None:
        """Summaries `[R, H, N, C]` of blocks of keys `[R, H, N, P, D]`; None where there are none.
        `is_real` `[R, 1, N, P, 1]` is False for entries that hold nothing yet.
        """
        return None

    @abstractmethod
    def choose(self, blocks: LayerBlocks) -> Tensor:
        """`[R, 1 or H, N]` bool, the blocks to attend to."""


@dataclass(frozen=True)
class BlockScorer(AttentionMethod):
    """Base of methods that read the blocks whose summaries have the highest scores."""

    @abstractmethod
    def summarise(self, keys: Tensor, is_real: Tensor) -> Tensor:
        """See `AttentionMethod.summarise`."""

    def score(self, queries: Tensor, summaries: Tensor) -> Tensor:
        """`[R, H, N]` of queries `[R, H, G W, D]` and summaries `[R, H, N, C]`: the largest
        product.
        """
        return (queries @ summaries.mT).amax(2)

    def choose(self, blocks: LayerBlocks) -> Tensor:
        summaries = check_kind(f"{self.name}.summarise", blocks.summaries, Tensor)
        scores = self.score(blocks.queries, summaries)
        counts = blocks.holds[:, None] if blocks.is_first else None
        shape = summaries.shape[:3]
        check_answer(f"{self.name}.score", scores, shape, "float", counts=counts)
        return blocks.highest(scores, self.budget)

    def most(self, n_blocks: int, n_own: int) -> int:
        return count_highest(n_blocks, n_own, self.budget)


def count_highest(n_blocks: int, n_own: int, budget: float) -> int:
    """How many blocks `LayerBlocks.highest` chooses at most; one more, as float32 rounds up."""
    return min(max(int(n_blocks * budget) + 2, n_own + 1), n_blocks)


@dataclass(frozen=True)
class PromptBlocks:
    """A layer while it processes prompts, in tiles of P queries and blocks of P keys.

    Tile t holds the queries that stand where block t holds keys. **T** entries of a prompt, **N**
    tiles; the rest as in `LayerBlocks`.

    Attributes:
        queries: `[R, H, G, N P, D]`, zero where there is no entry.
        keys: `[R, H, N P, D]`, zero where there is no entry.
        lengths: `[R]` int64, entries of each row's prompt.
    """

    layer: int
    queries: Tensor
    keys: Tensor
    lengths: Tensor
    size: int
    scale: float

    @cached_property
    def n_blocks(self) -> int:
        return self.keys.shape[2] // self.size

    @cached_property
    def is_real(self) -> Tensor:
        """`[R, N P]` bool, entries of the prompts."""
        return torch.arange(self.keys.shape[2], device=self.keys.device) < self.lengths[:, None]

    @cached_property
    def is_before(self) -> Tensor:
        """`[N, N]` bool, whether a tile (first axis) may see a block: not those behind it."""
        number = torch.arange(self.n_blocks, device=self.keys.device)
        return number <= number[:, None]

    @cached_property
    def is_kept(self) -> Tensor:
        """`[N, N]` bool, blocks that a tile sees in any case: the first, and its own."""
        number = torch.arange(self.n_blocks, device=self.keys.device)
        return (number == 0) | (number == number[:, None])

    @cached_property
    def mean_products(self) -> Tensor:
        """`[R, H, N, N]`, the largest product of a tile's mean query with a block's mean key."""
        n_real = self.is_real.unflatten(1, (-1, self.size)).sum(2).clamp(min=1)  # [R, N]
        keys = self.keys.unflatten(2, (-1, self.size)).sum(3) / n_real[:, None, :, None]
        queries = self.queries.unflatten(3, (-1, self.size)).sum(4)
        queries = queries / n_real[:, None, None, :, None]
        return (queries @ keys[:, :, None].mT).amax(2)

    def highest(self, scores: Tensor, budget: float) -> Tensor:
        """`[..., N, N]` bool of scores of this shape: of each tile the fraction `budget` of the
        blocks with the highest scores, the kept included.
        """
        scores = scores.masked_fill(~self.is_before, float("-inf"))
        scores = scores.masked_fill(self.is_kept, float("inf"))
        number = torch.arange(1, self.n_blocks + 1, device=scores.device)
        wanted = (number * budget).ceil().long()[:, None]  # [N, 1]
        most = min(int(self.n_blocks * budget) + 1, self.n_blocks)
        return choose_highest(scores, wanted, most) & self.is_before | self.is_kept


@dataclass(frozen=True)
class PromptMethod(AttentionMethod):
    """Base of methods that choose which blocks of a prompt its own queries see; later ones see all.

    Args:
        budget: the fraction of the blocks before it that a tile of queries sees, in (0, 1].
        block: P, keys of a block and queries of a tile.
        first_layer: layers before it attend to everything.
    """

    block: int = 64

    chooses_prompts: ClassVar[bool] = True

    def choose(self, blocks: LayerBlocks) -> Tensor:
        """All that hold something, `[R, 1, N]` bool."""
        return blocks.holds[:, None]

    @abstractmethod
    def choose_prompt(self, prompt: PromptBlocks) -> Tensor:
        """`[R, 1 or H, N, N]` bool, the blocks (last axis) that each tile sees."""
