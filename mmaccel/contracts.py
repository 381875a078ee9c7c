"""Contracts: passes, models, prompts, layouts, policies and continuous batching.

Shapes: **B** rows asked for, **G** guidance branches, **R** = G * B rows of a forward pass, **T**
prompt positions, **W** entries of a pass, **P** cache indices of a row, **Q** entries whose logits
are wanted, **L** slots of a canvas, **V** vocabulary. *Slot* i of a row is its i-th generated token
(0-based), whose *position* (id) is ``prompt.lengths[r] + i``. *Column* of a canvas is the index in
prompt and canvas together; prompts are right-aligned there, so that a slot has the same column in
every row. A *batch slot* is one of the rows that are decoded at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import (
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Protocol,
    Self,
    runtime_checkable,
)

import torch
from torch import Tensor

from mmaccel.capabilities import GLOSSARY, Capable
from mmaccel.checks import check_int
from mmaccel.errors import ShapeError

LAYER_METHODS = frozenset(
    {
        "eviction", "hidden states", "own attention", "packed entries", "prompt blocks",
        "prompt keys", "repeated prompts", "rounds", "step blocks", "turned keys", "uneven heads",
    }
)  # fmt: skip
"""Words that methods of caches and attention need of a model's layers."""
OF_LAYERS = LAYER_METHODS | {
    "copied entries", "draft canvas", "draft passes", "fused decoder", "layer states",
    "mixed passes", "shared prompts", "trees",
}  # fmt: skip
"""Words that only models offer whose layers cache and attend by functions of mmaccel."""

NOT_OF_CANVASES = {  # words that no model offers that fills canvases, and why it does not
    "captured steps": "its canvas is filled pass by pass",
    "chunked prompts": "its passes are over whole canvases",
    "copied entries": "its passes are over whole canvases",
    "fused decoder": "its passes are the model's own",
    "mixed passes": "its passes are over whole canvases",
    "own scheduler": "a policy chooses what is committed",
    "scales": "its slots are of one scale",
    "shared prompts": "its passes are over whole canvases",
    "trees": "its slots are filled in any order",
}
OF_CACHED_CANVASES = frozenset({"finished blocks", "kept entries"})
"""Words that only denoisers offer that can keep keys and values."""

_RAGGED = 256  # tokens more than in the shortest prompt, which are worth another split of the work


@dataclass(frozen=True)
class FinishedRow:
    """A row that has ended, possibly before others; `row` is its number, `tokens` `[n]` int64."""

    row: int
    tokens: Tensor
    passes: int
    accepted: list[int]
    total_variation: float
    nats: float = 0.0


class PromptCost(NamedTuple):
    """Tokens of a prompt that a model has processed itself, over all rows, in so many passes."""

    tokens: int
    passes: int


class Arrivals(NamedTuple):
    """Rows that join a run, and their noise: n rows with as many branches as the run's prompt and
    at most as many positions T. Inputs for each row (`mmaccel.model_parts.SelectedRows`) are
    theirs.
    """

    prompt: Prompt
    noise: Any


@dataclass(frozen=True)
class ContinuousBatching:
    """Decodes a few rows of a prompt at a time: when one ends, the next is admitted.

    Args:
        max_num_seqs: largest number of rows decoded at a time, at least 1.
        on_finish: called with every row as soon as it has ended. What it raises stops the run.
        arrivals: called between two passes, once no row of the prompt waits, with the number of
            rows that may join (at least 1). Returns that many rows or fewer, numbered on, or None;
            the run ends when all rows have and it returns None. Rows are then handed out by
            `on_finish` alone: the `Generation` has none.
        prefix_tree: a `mmaccel.samplers.prefix_tree.PrefixTree` of earlier prompts: rows that begin
            alike process what follows. None: every row processes its whole prompt.
    """

    max_num_seqs: int
    on_finish: Callable[[FinishedRow], None] | None = None
    arrivals: Callable[[int], Arrivals | None] | None = None
    prefix_tree: Any = None

    def __post_init__(self) -> None:
        check_int("max_num_seqs", self.max_num_seqs, 1, hint="try 8")


@dataclass(frozen=True)
class Pass:
    """What one forward pass computes, where it is written, and what it attends to.

    Every entry's keys and values are *written* to its cache index before anything is read. Without
    the optional fields a pass is a window: row r has the cache indices ``start[r] … start[r] + W -
    1``, which are its positions, too, and every entry attends to what the cache holds up to itself.

    Attributes:
        tokens: `[R, W]` int64; or `[R, W, D]` floating point, embeddings that the layers take as
            they are, for a causal LM.
        start: `[R]` int64, the first cache index of each row; None where `cache_indices` are given.
        positions: `[R, W]` int64, not negative; None: they follow from the cache indices.
        parents: `[R, W]` int64, a tree: the entry that each entry follows, smaller than its own
            number; -1 for one that follows what the cache holds before `start`. An entry attends to
            those it follows, at the position behind its parent's. None: each follows the one
            before.
        reads: `[R, 1, P]` or `[R, W, P]` bool, the cache indices that entries attend to; None: as
            above.
        cache_indices: `[R, W]` int64 in 0..P-1; the last index takes entries that are padding.
            None: from `start` on.
        queries: `[R, Q]` int64 in 0..W-1, entries whose logits are wanted; None: all.
        lengths: `[R]` int64, tokens of each row's prompt from this pass's first entry on; entries
            behind are padding. A row with more than W goes on in the next pass, and one without any
            has ended before. None: all W entries are its own, and nothing is known.
        opens: whether every row begins at cache index 0, so that entries see this pass alone.
        wanted: `[T]` int64, numbers of the R W entries that others follow or that are asked for,
            each row's first among them; what the rest hold may be anything. None: all. For
            `mmaccel.model_parts.MixedPasses` alone, which leave the rest out.
    """

    tokens: Tensor
    start: Tensor | None = None
    positions: Tensor | None = None
    parents: Tensor | None = None
    reads: Tensor | None = None
    cache_indices: Tensor | None = None
    queries: Tensor | None = None
    lengths: Tensor | None = None
    opens: bool = False
    wanted: Tensor | None = None

    @property
    def indices(self) -> Tensor:
        """`[R, W]` int64, cache indices of the entries."""
        if self.cache_indices is not None:
            return self.cache_indices
        assert self.start is not None
        width = self.tokens.shape[1]
        return self.start[:, None] + torch.arange(width, device=self.start.device)

    def select(self, rows: Tensor) -> Self:
        """The same pass over these rows alone, `[n]` int64. One number expanded stays expanded."""
        given = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        chosen: dict[str, Any] = {
            name: value[:1].expand(len(rows), *value.shape[1:])
            if value.stride(0) == 0
            else value[rows]
            for name, value in given.items()
        }
        return replace(self, **chosen)


@dataclass(frozen=True, kw_only=True)
class CanvasPass(Pass):
    """Every entry says where it is written and what it attends to."""

    positions: Tensor
    reads: Tensor
    cache_indices: Tensor
    queries: Tensor


@dataclass(frozen=True)
class PrefixGroups:
    """Rows of a run whose prompts are the same: `rows` of each group, ascending, every row in one;
    `lengths` of each group's prefix, which is the prompt without its last token.
    """

    rows: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    @property
    def first(self) -> tuple[int, ...]:
        return tuple(rows[0] for rows in self.rows)

    @property
    def n_rows(self) -> int:
        return sum(len(rows) for rows in self.rows)

    @property
    def n_saved(self) -> int:
        """Entries that are not stored, as other rows have them."""
        pairs = zip(self.rows, self.lengths, strict=True)
        return sum((len(rows) - 1) * length for rows, length in pairs)

    def __str__(self) -> str:
        stored = "1 stored prompt" if len(self.rows) == 1 else f"{len(self.rows)} stored prompts"
        return f"{self.n_rows} rows read {stored}"


@dataclass(frozen=True)
class Route:
    """How the passes of a model's run were computed, for statistics.

    Attributes:
        attention: why the model's own attention ran; empty where our kernel did, None where there
            is nothing to choose.
        activations: number format that activations are quantised to; empty for others.
        same_bits: whether the logits of a token had the same bits whatever else was in the passes
            of the run, in their number format.
        shared_rounding: why the logits of a token depend on the others of its pass; empty where
            they do not.
    """

    name: str = ""
    reason: str = ""
    attention: str | None = None
    activations: str = ""
    same_bits: bool = False
    shared_rounding: str = ""


@dataclass
class RunSetup:
    """How the next runs over a token model are carried out; a model reads what it has a use for.

    Attributes:
        runner: a `StepRunner` that carries out the steps of samplers; None runs them eagerly.
        recorder: a `StepRecorder` that receives what passes give out; None records nothing.
        prefill_chunk_size: tokens of prompts that a step processes at most; None: whole prompts.
        prefixes: rows whose prompts are the same: `prefill` processes the prefix of one row a
            group, and all read it. No row then goes further behind its prompt than one with the
            longest prompt can. None: every row has entries of its own; `prefix_reason` says why,
            where they were asked for.
        ragged: whether rows differ much in length (`Prompt.is_ragged`). A kernel on a GPU then
            shares its work out by lengths; what it computes is the same.
        spare: cache indices a row beside those of positions: a tree has more entries.
        drafts: a `SelfDrafting`, by which the model drafts for itself; None: it does not.
        fused, compile: of `mmaccel.pipelines.hosts.runner.engine.Engine`.
    """

    runner: Any = None
    recorder: Any = None
    prefill_chunk_size: int | None = None
    prefixes: PrefixGroups | None = None
    prefix_reason: str = ""
    ragged: bool = False
    spare: int = 0
    drafts: Any = None
    fused: Any = False
    compile: Any = False


class Model(Capable, ABC):
    """What models of both loops have in common. A child says what its runs may do by `offers`, and
    by `lack` where that depends on more than its class; the rest is in `mmaccel.model_parts`.

    Attributes:
        kind: what decodes it, "window" or "canvas".
        vocab_size: V.
        max_positions: the most positions of a row, prompt included; None where there is no limit.
        model: the module that computes; None where there is none.
        known_format: the number format of earlier runs' passes, which later ones have, too; empty
            before the first; None: each run finds its own.
    """

    slot = "model"
    kind: ClassVar[Literal["window", "canvas"]]
    vocab_size: int
    max_positions: int | None = None
    model: Any = None
    known_format: str | None = None

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    def route(self) -> Route:
        return Route()

    @abstractmethod
    def reserve(self, rows: int, positions: int) -> None:
        """Clear the cache and reserve `positions` indices for each of `rows`, or OptionError."""


class TokenModel(Model):
    """Anything that predicts the next token at W positions of R rows in one pass.

    Every row has its own cache of positions. A pass writes positions ``start[r] … start[r]+W-1``,
    and all later positions count as overwritten, so that a rollback is a smaller `start` at the
    next pass. Logits of entry w score the token that follows it. What a pass writes beyond the
    reserved positions, as in a row that has ended, is never read, and the logits of those entries
    mean nothing.
    """

    kind = "window"
    offers = frozenset(GLOSSARY) - OF_LAYERS - {"captured steps"}

    def lack(self, word: str, part: Any = None) -> str:
        if word in self.offers:
            return ""
        if word == "captured steps":
            return "it takes no step runner"
        return "its layers do not cache and attend by functions of mmaccel"

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have a setup of their own, without the step runner."""
        return vars(self) | {"setup": replace(self.setup, runner=None)}

    @cached_property
    def setup(self) -> RunSetup:
        return RunSetup()

    @property
    def n_inputs(self) -> int:
        """Ids that passes may hold: those of the vocabulary, and maybe others, such as masks."""
        return self.vocab_size

    @property
    def is_text(self) -> bool:
        """Whether tokens without a layout are those of a text, which repeats itself."""
        return False

    @property
    def takes_whole_prompts(self) -> bool:
        """Whether `prefill` processes prompts with their last tokens, with which windows still
        begin.
        """
        return False

    def vectors(self, kind: str) -> Tensor | None:
        """Vectors of its tokens, `[V, D]`; None where tokens have none.

        Args:
            kind: "embeddings", by which it reads them, or "codes": in the latent space of an image
                tokenizer or an audio codec, NaN for a token that is none of its codes.
        """
        return None

    @abstractmethod
    def forward(self, entries: Pass) -> Tensor:
        """Run one pass; logits `[R, Q, V]`, floating point, of the entries that are wanted."""

    def prefill(self, entries: Pass) -> None:
        """Run one pass like `forward` whose logits are not needed, as over a prompt; `start` is one
        number expanded if all rows begin alike.
        """
        self.forward(entries)

    def process_prompt(self) -> PromptCost | None:
        """Process a prompt that the model has itself, after `reserve`, in passes of
        `RunSetup.prefill_chunk_size` tokens where that goes; None: `prefill` does it.
        """
        return None


class Denoiser(Model):
    """A model that predicts the tokens of masked positions from all others in one pass.

    A pass gives `positions`, `cache_indices`, `reads` and `queries`. Logits of query q are the
    model's own at the entry `queries[:, q]`: with `shift` 1 that is the one before the slot. A pass
    may have fewer rows than were reserved: the first ones.

    Attributes:
        vocab_size: V, the mask token included where it is one of the ids; `n_ids` where the model
            has others than canvases.
        mask_token: id that stands for an open slot; None for a model of uniform corruption, whose
            open slots hold random tokens.
        block: positions per block of a block-causal model, counted from a row's first token: an
            entry's logits depend on no later block. None where everything depends on everything.
        lengths: slots of each block, for blocks of unequal lengths, such as the scales of an image,
            together the slots of a canvas: a slot's logits depend on the blocks before alone.
        supports_kv_cache: whether keys and values can be kept at chosen cache indices and read by
            later passes under a mask per entry; `kv_cache_reason` says why not. Without it every
            pass covers all columns in order: `cache_indices` counts from 0, and `reads` is `[R, 1,
            P]`.
        any_rows: whether a row of a pass depends on its entries and its cache alone. Only such a
            model takes `ContinuousBatching`, and its passes leave out rows that have ended.
        is_self_checked: whether the model was already checked to follow `reads` and `block`; others
            are by `attach`, under a policy that caches their blocks.
        shift: 1 if the logits at a position are those of the next one, 0 if its own.
    """

    kind = "canvas"
    offers = frozenset(GLOSSARY) - OF_LAYERS - NOT_OF_CANVASES.keys() - OF_CACHED_CANVASES
    mask_token: int | None
    block: int | None = None
    lengths: tuple[int, ...] | None = None
    supports_kv_cache: bool = False
    kv_cache_reason: str = ""
    any_rows: bool = False
    is_self_checked: bool = False
    n_ids: int | None = None
    shift: int = 0

    def lack(self, word: str, part: Any = None) -> str:
        if word == "mask token" and self.mask_token is None:
            return "its open slots hold random tokens"
        if word == "finished blocks" and self.block is None:
            return "its tokens attend to everything"
        if word in self.offers or (word in OF_CACHED_CANVASES and self.supports_kv_cache):
            return ""
        why = NOT_OF_CANVASES.get(word) or self.kv_cache_reason
        return why or "every pass computes everything anew"

    @abstractmethod
    def forward(self, entries: CanvasPass) -> Tensor:
        """Run one pass; logits `[R, Q, V]`, floating point."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def own_logits(self, tokens: Tensor) -> Tensor | None:
        """The model's logits `[R, N, V]` of whole rows `[R, N]`, without a cache; None: unknown."""
        return None


@runtime_checkable
class VisualTokenizer(Protocol):
    """Turns images into token grids and back."""

    vocab_size: int
    grid: tuple[int, int]

    def encode(self, images: Tensor) -> Tensor:
        """Images `[B, C, H, W]` float in 0..1 to tokens `[B, h*w]` int64, raster order."""

    def decode(self, tokens: Tensor) -> Tensor:
        """Tokens `[B, h*w]` int64 to images `[B, C, H, W]` float in 0..1."""


@runtime_checkable
class Layout(Protocol):
    """What is known in advance about the tokens at each slot."""

    @property
    def columns(self) -> int: ...

    @property
    def frame(self) -> int:
        """Slots of a frame or image; 0 if there are none."""

    def forced(self, slots: Tensor) -> Tensor | None:
        """Slots `[B, W]` to their required tokens, -1 where free; None if all slots are free."""

    def allowed(self, slots: Tensor) -> Tensor | None:
        """Slots `[B, W]` to a mask broadcastable to `[B, W, V]`, True where a token is allowed.

        None allows all tokens.
        """


@runtime_checkable
class GuidedLayout(Layout, Protocol):
    """A layout whose slots are guided by different shares."""

    def guidance_share(self, slots: Tensor) -> Tensor:
        """Slots `[B, W]` to `[B, W]` float32: the guidance scale s counts as 1 + share (s - 1)."""


@dataclass(frozen=True)
class Prompt:
    """What stands before the first generated token.

    Args:
        tokens: `[R, T]` int64, right-padded (the padding is never attended to). Rows are
            branch-major: all B rows of the conditional branch, then all of the next branch in the
            same order.
        lengths: `[R]` int64, real tokens of each row, at least 1.
        branches: G, guidance branches; 1 without guidance.
        stop_tokens: `[S]` int64; a row ends after the first of these.
        batching: how many rows are decoded at a time; None decodes all B together.
        is_text: `[R, T]` bool, False for ids of something else, such as an image; None: all are
            text.
        n_shown: tokens at the end of every prompt that the layout's slots continue: the frames that
            a clip begins with, the codes of the frame before.
        slots: `[B]` int64, at least 1: slots of each row of a canvas, where some have fewer than
            were asked for; passes leave out the others.
    """

    tokens: Tensor
    lengths: Tensor
    branches: int = 1
    stop_tokens: Tensor | None = None
    layout: Layout | None = None
    batching: ContinuousBatching | None = None
    is_text: Tensor | None = None
    n_shown: int = 0
    slots: Tensor | None = None
    batch: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2 or self.tokens.dtype != torch.int64 or self.tokens.shape[0] < 1:
            raise ShapeError(
                f"prompt tokens: expected int64 [R, T] with R >= 1, received {self.tokens.dtype} "
                f"{list(self.tokens.shape)}; stack the rows and pad them on the right"
            )
        if self.lengths.shape != self.tokens.shape[:1]:
            raise ShapeError(
                f"prompt lengths: expected [{self.tokens.shape[0]}], received "
                f"{list(self.lengths.shape)}; give one length per row"
            )
        if self.branches < 1 or self.tokens.shape[0] % self.branches:
            raise ShapeError(
                f"prompt rows: expected a multiple of {self.branches} branches, received "
                f"{self.tokens.shape[0]} rows; give every branch the same number of rows"
            )
        low = int(self.lengths.min())
        high = int(self.lengths.max())
        if low < 1 or high > self.tokens.shape[1]:
            raise ShapeError(
                f"prompt lengths: expected 1..{self.tokens.shape[1]}, received {low}..{high}; "
                "begin every row with at least one token"
            )
        batch = self.tokens.shape[0] // self.branches
        object.__setattr__(self, "batch", batch)
        if self.slots is not None and (self.slots.shape != (batch,) or int(self.slots.min()) < 1):
            raise ShapeError(
                f"prompt slots: expected [{batch}] of 1 and more, received "
                f"{list(self.slots.shape)}; give one number per row"
            )

    @cached_property
    def groups(self) -> PrefixGroups:
        """Which rows have the same tokens, in order. Cost: a copy of the tokens to the host."""
        rows_by_tokens: dict[tuple[int, ...], list[int]] = {}
        lengths = self.lengths.tolist()
        for row, tokens in enumerate(self.tokens.tolist()):
            rows_by_tokens.setdefault(tuple(tokens[: lengths[row]]), []).append(row)
        return PrefixGroups(
            tuple(tuple(rows) for rows in rows_by_tokens.values()),
            tuple(len(each) - 1 for each in rows_by_tokens),
        )

    @cached_property
    def is_ragged(self) -> bool:
        """Whether rows differ much in how far they are: they do not all begin together, or the
        longest is twice as long as the shortest, by 256 tokens or more.
        """
        batching = self.batching
        if batching is not None and (batching.arrivals or batching.max_num_seqs < self.batch):
            return True
        low = int(self.lengths.min())
        high = int(self.lengths.max())
        return high >= max(2 * low, low + _RAGGED)

    @cached_property
    def text(self) -> tuple[Tensor, Tensor]:
        """Tokens `[R, T']` and lengths `[R]` of its text, and each row's last token in any case."""
        if self.is_text is None:
            return self.tokens, self.lengths
        index = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        last = self.lengths[:, None] - 1
        reads = (self.is_text & (index < last)) | (index == last)
        lengths = reads.sum(1)
        order = (~reads).long().argsort(dim=1, stable=True)[:, : int(lengths.max())]
        is_real = index[: order.shape[1]] < lengths[:, None]
        return self.tokens.gather(1, order).where(is_real, 0), lengths
