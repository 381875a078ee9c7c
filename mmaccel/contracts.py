"""Contracts: passes, models, prompts, layouts, policies and continuous batching.

Shapes: **B** rows asked for, **G** guidance branches, **R** = G * B rows of a forward pass, **T**
prompt positions, **W** entries of a pass, **P** cache indices of a row, **Q** entries whose logits
are wanted, **L** slots of a canvas, **V** vocabulary. *Slot* i of a row is its i-th generated token
(0-based). *Position* is the position id of a token: slot i of row r has position
``prompt.lengths[r] + i``. *Column* of a canvas is the index in prompt and canvas together; prompts
are right-aligned there, so that a slot has the same column in every row. A *batch slot* is one of
the rows that are decoded at a time.

Continuous batching: G.-I. Yu et al., "Orca: A Distributed Serving System for Transformer-Based
Generative Models", OSDI 2022, section 3 (iteration-level scheduling). A request joins the batch as
soon as another has left it; here an iteration is a pass over a window or a canvas.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import (
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Protocol,
    Self,
    get_args,
    runtime_checkable,
)

import torch
from torch import Tensor

from mmaccel.capabilities import GLOSSARY, Capable
from mmaccel.checks import Checked, check_int, show
from mmaccel.errors import OptionError, ShapeError
from mmaccel.results import BlockCounts, Exactness, Generation, OnStep, StepBytes

LAYER_METHODS = frozenset(
    {
        "eviction", "hidden states", "own attention", "packed entries", "prompt blocks",
        "prompt keys", "repeated prompts", "rounds", "step blocks", "turned keys", "uneven heads",
    }
)  # fmt: skip
"""Words that methods of caches and attention need of a model's layers."""
OF_LAYERS = LAYER_METHODS | {
    "copied entries", "draft canvas", "draft passes", "fused decoder", "layer states",
    "shared prompts", "trees",
}  # fmt: skip
"""Words that only models offer whose layers cache and attend by functions of mmaccel."""

NOT_OF_CANVASES = {  # words that no model offers that fills canvases, and why it does not
    "captured steps": "its canvas is filled pass by pass",
    "chunked prompts": "its passes are over whole canvases",
    "copied entries": "its passes are over whole canvases",
    "fused decoder": "its passes are the model's own",
    "own scheduler": "a policy chooses what is committed",
    "shared prompts": "its passes are over whole canvases",
    "trees": "its slots are filled in any order",
}
OF_CACHED_CANVASES = frozenset({"finished blocks", "kept entries"})
"""Words that only denoisers offer that can keep keys and values."""

_RAGGED = 256  # tokens more than in the shortest prompt, which are worth another split of the work


@dataclass(frozen=True)
class FinishedRow:
    """The result of a row that has ended, possibly before others.

    Attributes:
        row: its number in the prompt.
        tokens: `[n]` int64, the generated tokens.
        passes: passes it took part in.
        accepted: as in `Stats`, of this row.
        total_variation, nats: as in `Stats`, of this row.
    """

    row: int
    tokens: Tensor
    passes: int
    accepted: list[int]
    total_variation: float
    nats: float = 0.0


class Arrivals(NamedTuple):
    """Rows that join a run.

    Attributes:
        prompt: n rows, with as many branches as the run's prompt and at most as many positions T.
            Where the model has inputs of its own for each row (see `get_row_inputs` in
            `mmaccel.samplers.window.scheduler`), they are those of these rows.
        noise: `Noise` of these rows.
    """

    prompt: Prompt
    noise: Any


@dataclass(frozen=True)
class ContinuousBatching:
    """Decodes a few rows of a prompt at a time: when one ends, the next is admitted.

    Args:
        max_num_seqs: largest number of rows decoded at a time, at least 1.
        on_finish: called with every row as soon as it has ended. An exception from it stops the
            run and is raised to the caller.
        arrivals: called between two passes, once no row of the prompt waits, with the number of
            rows that may join (at least 1). Returns that many rows or fewer, or None. Their numbers
            follow those of the rows before. The run ends when all rows have and it returns None.
            Rows are then handed out by `on_finish` alone: the `Generation` has none.
        prefix_tree: a `mmaccel.samplers.prefix_tree.PrefixTree` of prompts that were processed in
            this run and in those before it: rows that begin alike process what follows. None: every
            row processes its whole prompt.

    Raises:
        OptionError: max_num_seqs < 1.
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

    Every entry is *computed*, and its keys and values are *written* to its cache index before
    anything is read. Without the optional fields a pass is a window: row r has the cache indices
    ``start[r] … start[r] + W - 1``, which are its positions, too, and every entry attends to what
    the cache holds up to itself. The step of a next-scale model is a pass of embeddings whose
    entries read all of its scale.

    Attributes:
        tokens: `[R, W]` int64; or `[R, W, D]` floating point, embeddings that the layers take
            as they are, for a causal LM.
        start: `[R]` int64, the first cache index of each row; None where `cache_indices` are given.
        positions: `[R, W]` int64, not negative; None: they follow from the cache indices.
        parents: `[R, W]` int64, a tree: the entry that each entry follows, smaller than its own
            number; -1 for one that follows what the cache holds before `start`. An entry attends to
            those it follows, at the position behind its parent's. None: each follows the one
            before.
        reads: `[R, 1, P]` or `[R, W, P]` bool, the cache indices that each entry attends to; None:
            as above.
        cache_indices: `[R, W]` int64 in 0..P-1; the last index takes entries that are padding.
            None: from `start` on.
        queries: `[R, Q]` int64 in 0..W-1, entries whose logits are wanted; None: all.
        lengths: `[R]` int64, how many tokens each row's prompt has from this pass's first entry on;
            entries behind are padding. A row with more than W goes on in the next pass, and one
            without any has ended before. None: all W entries are its own, and nothing is known.
    """

    tokens: Tensor
    start: Tensor | None = None
    positions: Tensor | None = None
    parents: Tensor | None = None
    reads: Tensor | None = None
    cache_indices: Tensor | None = None
    queries: Tensor | None = None
    lengths: Tensor | None = None

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
        given = {name: value for name, value in vars(self).items() if value is not None}
        chosen = {
            name: value[:1].expand(len(rows), *value.shape[1:])
            if value.stride(0) == 0
            else value[rows]
            for name, value in given.items()
        }
        return replace(self, **chosen)


@dataclass(frozen=True, kw_only=True)
class CanvasPass(Pass):
    """A pass over a canvas: every entry says where it is written and what it attends to."""

    positions: Tensor
    reads: Tensor
    cache_indices: Tensor
    queries: Tensor


@dataclass(frozen=True)
class PrefixGroups:
    """Rows of a run whose prompts are the same.

    Attributes:
        rows: of each group, ascending; every row is in one group.
        lengths: of each group's prefix, which is the prompt without its last token.
    """

    rows: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    @property
    def first(self) -> tuple[int, ...]:
        """The first row of each group."""
        return tuple(rows[0] for rows in self.rows)

    @property
    def n_rows(self) -> int:
        """Rows of all groups."""
        return sum(len(rows) for rows in self.rows)

    @property
    def n_saved(self) -> int:
        """Entries that are not stored, as other rows have them."""
        pairs = zip(self.rows, self.lengths, strict=True)
        return sum((len(rows) - 1) * length for rows, length in pairs)

    def __str__(self) -> str:
        stored = "1 stored prompt" if len(self.rows) == 1 else f"{len(self.rows)} stored prompts"
        return f"{self.n_rows} rows read {stored}"


class Model(Capable, ABC):
    """What models of both loops have in common. A child says what its runs may do by `offers`, and
    by `lack` where that depends on more than its class.

    Attributes:
        kind: what decodes it, "window" or "canvas".
        vocab_size: V.
        max_positions: the most positions of a row; None where there is no limit.
        model: the module that computes; None where there is none.
        n_evicted: cached entries of prompts that methods evicted in the run, and entries that there
            were, over all rows of a layer.
        block_counts: what sparse attention leaves out in the run; None where nothing counts it.
    """

    slot = "model"
    kind: ClassVar[Literal["window", "canvas"]]
    vocab_size: int
    max_positions: int | None = None
    model: Any = None
    n_evicted: tuple[int, int] = (0, 0)
    block_counts: BlockCounts | None = None

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of tokens and logits."""

    @property
    def packed_bytes(self) -> tuple[int, int]:
        """Bytes of the run's keys and values where methods hold some in fewer bits, and what they
        would be otherwise; zeros where none do.
        """
        return 0, 0

    @property
    def step_bytes(self) -> StepBytes | None:
        """What a step of the run reads at its end; None where nothing counts it, and before the
        first pass.
        """
        return None

    @abstractmethod
    def reserve(self, rows: int, positions: int) -> None:
        """Clear the cache and reserve `positions` cache indices for each of `rows` rows.

        Raises:
            OptionError: the model cannot take so many.
        """

    @property
    def activation_format(self) -> str:
        """Number format that its activations are quantised to; empty for others."""
        return ""

    @property
    def same_bits(self) -> bool:
        """Whether the logits of a token had the same bits whatever else was in the passes of this
        run, in their number format.
        """
        return False

    def use_fused(self, fused: Any, compile: Any) -> None:
        """Set whether the next runs may take a fused decoder, and whether that is compiled; see
        `mmaccel.pipelines.runner.engine.Engine`.
        """

    def use_methods(self, methods: Any, branches: int = 1) -> None:
        """From the next `reserve` on, the layers' caches and attention are reduced.

        Args:
            methods: how (`LayerMethods` of `mmaccel.pipelines.layers.methods`), as
                `mmaccel.capabilities.explain` lets pass.
            branches: G, guidance branches of the rows.
        """
        raise NotImplementedError


class TokenModel(Model):
    """Anything that predicts the next token at W positions of R rows in one pass.

    Every row has its own cache of positions. A pass writes positions ``start[r] … start[r]+W-1``,
    and all later positions count as overwritten, so that a rollback is a smaller `start` at the
    next pass. Every row proceeds at its own pace. Logits of entry w score the token that follows
    it.

    A pass may extend beyond the reserved positions, for example in a row that has ended while
    others have not. What it writes there is never read, and the logits of those entries mean
    nothing.

    Attributes:
        runner: a `StepRunner` that carries out the steps of samplers over this model; None runs
            them eagerly.
        recorder: a `StepRecorder` that receives what passes give out; None records nothing.
        takes_runner: whether its passes may be captured: its buffers outlive a run.
        prefill_chunk_size: tokens of prompts that a step of the next runs processes at most; None:
            whole prompts. See `mmaccel.samplers.prompt_chunks`.
        route, route_reason: which forward the run takes, and why not another; for statistics.
        attention_reason: why the model's own attention runs; empty where our kernel does, None
            where there is nothing to choose.
        prefixes, prefix_reason: see `use_prefixes`.
        codes: `[V, D]`, the vector of each token in the latent space of an image tokenizer or an
            audio codec, NaN for a token that is none of its codes; None where no token is one.
        ragged: see `use_ragged`.
    """

    kind = "window"
    offers = frozenset(GLOSSARY) - OF_LAYERS
    runner: Any = None
    recorder: Any = None
    takes_runner: bool = False
    prefill_chunk_size: int | None = None
    route: str = ""
    route_reason: str = ""
    attention_reason: str | None = None
    prefixes: PrefixGroups | None = None
    prefix_reason: str = ""
    codes: Tensor | None = None
    ragged: bool = False

    def lack(self, word: str, part: Any = None) -> str:
        """See `Capable.lack`."""
        if word == "captured steps" and not self.takes_runner:
            return "it takes no step runner"
        if word in self.offers:
            return ""
        return "its layers do not cache and attend by functions of mmaccel"

    @property
    def n_inputs(self) -> int:
        """Ids that passes may hold: those of the vocabulary, and maybe others, such as masks."""
        return self.vocab_size

    def embeddings(self) -> Tensor | None:
        """`[V, D]`, the vectors by which it reads its tokens; None where tokens have none."""
        return None

    @property
    def is_text(self) -> bool:
        """Whether tokens without a layout are those of a text, which repeats itself."""
        return False

    @property
    def takes_whole_prompts(self) -> bool:
        """Whether `prefill` processes prompts with their last tokens. Windows of the first pass
        begin with these all the same; `forward` processes those behind them.
        """
        return False

    @property
    def shared_rounding(self) -> str:
        """Why the logits of a token depend on the others of its pass; empty where they do not."""
        return ""

    @abstractmethod
    def forward(self, entries: Pass) -> Tensor:
        """Run one pass.

        Returns:
            Logits `[R, Q, V]`, floating point, of the entries that are wanted.
        """

    def prefill(self, entries: Pass) -> None:
        """Run one pass like `forward` whose logits are not needed, as over a prompt.

        Its `start` is one number expanded if all rows begin alike.
        """
        self.forward(entries)

    def process_prompt(self) -> int | None:
        """Process a prompt that the model has itself, after `reserve`.

        Returns:
            How many tokens it processed; None for a model whose prompt `prefill` processes.
        """
        return None

    def use_prefixes(self, prefixes: PrefixGroups | None, reason: str = "") -> None:
        """From the next `reserve` on, `prefill` processes the prefix of one row a group, in one
        pass or in pieces, and all rows of the group read it; where there is no obstacle. No row
        then goes further behind its prompt than one with the longest prompt can.

        Args:
            prefixes: the groups; None: every row has entries of its own.
            reason: why there are none, where they were asked for; for statistics.
        """
        self.prefixes = prefixes
        self.prefix_reason = reason

    @property
    def entries_key(self) -> Hashable:
        """What cached entries depend on beside the tokens."""
        raise NotImplementedError

    def copy_entries(self, row: int, first: int, last: int) -> Sequence[tuple[Tensor, Tensor]]:
        """Copies of every layer's keys and values `[H, n, D]`, of a row's entries from one cache
        index on, before another.
        """
        raise NotImplementedError

    def write_entries(
        self, row: int, entries: Sequence[tuple[Tensor, Tensor]], key: Hashable = None
    ) -> None:
        """Let a row begin with every layer's keys and values `[H, n, D]`, or with nothing.

        Args:
            row: its number.
            entries: empty for nothing.
            key: rows that were given entries by the same key read them together, as far as
                rows may; None: the row writes a copy to its own cache.
        """
        raise NotImplementedError

    def use_ragged(self, ragged: bool) -> None:
        """Say whether the rows of the next run differ much in length (`Prompt.is_ragged`). A kernel
        on a GPU then shares its work out by lengths; what it computes is the same.
        """
        self.ragged = ragged

    def use_drafting(self, drafts: Any) -> None:
        """From the next `reserve` on, `forward_draft` attends as a source says; None: no longer."""
        raise NotImplementedError(f"a {type(self).__name__} does not draft for itself")

    def forward_draft(self, entries: Pass, index: int) -> Tensor:
        """As `forward`, logits `[R, 1, V]`, attending to part of the cache; the next `forward`
        writes anew what it has written.

        Args:
            entries: one a row.
            index: drafts of the window before it.
        """
        raise NotImplementedError(f"a {type(self).__name__} does not draft for itself")

    def forward_canvas(self, entries: Pass) -> Tensor:
        """As `forward`, logits `[R, W, V]` of entries that see each other and all that was cached
        before them; the next `forward` writes anew what it has written.
        """
        raise NotImplementedError(f"a {type(self).__name__} does not draft for itself")

    def prompt_width(self, width: int) -> int:
        """The width at which a prompt of `width` tokens is processed, at least `width`."""
        return width

    def make_room(self, spare: int) -> None:
        """From the next `reserve` on, there are `spare` more cache indices a row: a tree has more
        entries than positions.
        """
        raise NotImplementedError

    def commit(self, start: Tensor, path: Tensor) -> None:
        """Say which entries of the last pass, a tree, were accepted; nothing is said of windows.

        Args:
            start: `[R]` int64, of that pass.
            path: `[R, D]` int64, entries of each row in the order of their positions, from the one
                that follows `start` on; shorter paths end in -1. Their keys and values then stand
                at ``start[r] … start[r] + D - 1``.
        """
        raise NotImplementedError


class Denoiser(Model):
    """A model that predicts the tokens of masked positions from all others in one pass.

    A pass gives `positions`, `cache_indices`, `reads` and `queries`. Logits of query q score the
    token at the position of `queries[:, q]` itself, whatever shift the model has. A pass may have
    fewer rows than were reserved: the first ones.

    Attributes:
        vocab_size: V, the mask token included where it is one of the ids.
        mask_token: id that stands for an open slot; None for a model of uniform corruption, whose
            open slots hold random tokens.
        block: positions per block of a block-causal model, counted from a row's first token: an
            entry's logits depend on no later block. None where everything depends on everything.
        supports_kv_cache: whether keys and values can be kept at chosen cache indices and read by
            later passes under a mask per entry. Without it every pass covers all columns in their
            order: C = P, `cache_indices` counts from 0, and `reads` is `[R, 1, P]`.
        kv_cache_reason: why the model runs without a KV cache; empty where it has one.
        max_positions: the most positions of prompt and canvas together.
        any_rows: whether a row of a pass depends on its entries and on what was written at its
            cache indices, and on nothing that belongs to a row of the prompt. Only such a model
            takes `ContinuousBatching`, and its passes leave out rows that have ended.
        is_self_checked: whether the model was already checked to follow `reads` and `block`; others
            are by `attach`, under a policy that caches their blocks.
        n_ids: ids of the model, where they are others than those of canvases; None: they are not.
        shift: 1 if the model's own logits at a position are those of the next one, 0 if its own.
    """

    kind = "canvas"
    offers = frozenset(GLOSSARY) - OF_LAYERS - NOT_OF_CANVASES.keys() - OF_CACHED_CANVASES
    mask_token: int | None
    block: int | None = None
    supports_kv_cache: bool = False
    kv_cache_reason: str = ""
    any_rows: bool = False
    is_self_checked: bool = False
    n_ids: int | None = None
    shift: int = 0

    def lack(self, word: str, part: Any = None) -> str:
        """See `Capable.lack`."""
        if word == "mask token" and self.mask_token is None:
            return "its open slots hold random tokens"
        if word == "finished blocks" and self.block is None:
            return "its tokens attend to everything"
        if word in self.offers or (word in OF_CACHED_CANVASES and self.supports_kv_cache):
            return ""
        why = NOT_OF_CANVASES.get(word) or self.kv_cache_reason
        return why or "every pass computes everything anew"

    @property
    def prompt_limit(self) -> int | None:
        """Where finished blocks of prompts have more entries than this, `prefill` processes them;
        None: never.
        """
        return None

    @abstractmethod
    def forward(self, entries: CanvasPass) -> Tensor:
        """Run one pass; logits `[R, Q, V]`, floating point."""

    @property
    def dtype(self) -> torch.dtype:
        """In which it computes."""
        return torch.float32

    def own_logits(self, tokens: Tensor) -> Tensor | None:
        """The model's logits `[R, N, V]` of whole rows `[R, N]`, in order and without a cache, for
        self-checks; with `shift`, those of the first position are not valid. None: not known.
        """
        return None

    def prefill(self, entries: CanvasPass) -> None:
        """Run one pass over the finished blocks of all rows' prompts, after `reserve`.

        Args:
            entries: with `start` and `lengths`; a row's are in the order of their positions.
        """
        raise NotImplementedError


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
    def columns(self) -> int:
        """Slots of an image row; 0 if tokens form no rows."""

    @property
    def frame(self) -> int:
        """Slots of a frame or image; 0 if there are none."""

    def forced(self, slots: Tensor) -> Tensor | None:
        """Slots `[B, W]` to their required tokens, -1 where free; None if all slots are free."""

    def allowed(self, slots: Tensor) -> Tensor | None:
        """Slots `[B, W]` to a mask broadcastable to `[B, W, V]`, True where a token is allowed.

        None allows all tokens.
        """


@dataclass(frozen=True)
class Prompt:
    """What stands before the first generated token.

    Args:
        tokens: `[R, T]` int64, right-padded (the padding is never attended to). Rows are
            branch-major: all B rows of the conditional branch, then all B rows of the next branch
            in the same order.
        lengths: `[R]` int64, real tokens of each row, at least 1.
        branches: G, guidance branches; 1 without guidance.
        stop_tokens: `[S]` int64 or None; a row ends after the first of these.
        layout: what is known about the slots, or None.
        batching: how many rows are decoded at a time; None decodes all B together.
        is_text: `[R, T]` bool, False for ids that stand for something else, such as a part of an
            image; None: all tokens are text.
        n_shown: tokens at the end of every prompt that the layout's slots continue: the frames
            that a clip begins with, the codes of the frame before.

    Attributes:
        batch: B, rows asked for.
    """

    tokens: Tensor
    lengths: Tensor
    branches: int = 1
    stop_tokens: Tensor | None = None
    layout: Layout | None = None
    batching: ContinuousBatching | None = None
    is_text: Tensor | None = None
    n_shown: int = 0
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
        object.__setattr__(self, "batch", self.tokens.shape[0] // self.branches)

    @cached_property
    def groups(self) -> PrefixGroups:
        """Which rows have the same tokens, in the order of their first rows. Cost: a copy of the
        tokens to the host.
        """
        found: dict[tuple[int, ...], list[int]] = {}
        lengths = self.lengths.tolist()
        for row, tokens in enumerate(self.tokens.tolist()):
            found.setdefault(tuple(tokens[: lengths[row]]), []).append(row)
        return PrefixGroups(
            tuple(tuple(rows) for rows in found.values()), tuple(len(each) - 1 for each in found)
        )

    @cached_property
    def is_ragged(self) -> bool:
        """Whether its rows differ much in how far they are while they are decoded: they do not all
        begin together, or the longest is twice as long as the shortest, by 256 tokens or more.
        """
        batching = self.batching
        if batching is not None and (batching.arrivals or batching.max_num_seqs < self.batch):
            return True
        low = int(self.lengths.min())
        high = int(self.lengths.max())
        return high >= max(2 * low, low + _RAGGED)

    @cached_property
    def text(self) -> tuple[Tensor, Tensor]:
        """Tokens `[R, T']` and lengths `[R]` of what a model of text alone can read.

        The last token of a row is read in any case.
        """
        if self.is_text is None:
            return self.tokens, self.lengths
        index = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        last = self.lengths[:, None] - 1
        reads = (self.is_text & (index < last)) | (index == last)
        lengths = reads.sum(1)
        order = (~reads).long().argsort(dim=1, stable=True)[:, : int(lengths.max())]
        is_real = index[: order.shape[1]] < lengths[:, None]
        return self.tokens.gather(1, order).where(is_real, 0), lengths


class Policy(Protocol):
    """A frozen dataclass whose fields are the configuration."""

    exactness: ClassVar[Exactness]

    def sample(
        self,
        model: TokenModel,
        prompt: Prompt,
        length: int,
        *,
        params: Any,
        noise: Any,
        on_step: OnStep | None = None,
    ) -> Generation:
        """Generate up to `length` tokens for every row of `prompt`.

        Args:
            model: a `TokenModel` for a window policy, a `Denoiser` for a canvas policy.
            prompt: what stands before the first generated token.
            length: largest number of tokens a row, at least 1.
            params: `SamplingParams`.
            noise: `Noise` of the prompt's rows, the only source of randomness.
            on_step: called after every pass, see `mmaccel.results.OnStep`.
        """


@dataclass(frozen=True)
class CanvasProgress:
    """State that `on_step` receives after every pass.

    Attributes:
        tokens: `[B, L]` int64; a copy. Slots that are not committed hold no meaningful token.
        is_committed: `[B, L]` bool.
        lengths: `[B]` int64, slots that hold a token and count.
        previous: `[B]` int64, `lengths` before this pass.
        passes: passes so far.
        nats: `[B]` float64, spent so far; a copy. See `mmaccel.samplers.divergence`.
        rows: the row of the prompt in each of the B batch slots under `ContinuousBatching`; None
            where all rows are decoded together.
    """

    tokens: Tensor
    is_committed: Tensor
    lengths: Tensor
    previous: Tensor
    passes: int
    nats: Tensor
    rows: tuple[int, ...] | None = None


OnCanvasStep = Callable[[CanvasProgress], Tensor | None]
"""Called after every pass. It may return `[B]` int64, the number of slots each row is cut to; None
changes nothing. An exception from it stops the run and reaches the caller."""


class CanvasPolicy(Protocol):
    """A frozen dataclass whose fields are the configuration; `kind` is "canvas"."""

    kind: ClassVar[str]

    @property
    def exactness(self) -> Exactness:
        """The policy's guarantee; a property, as it may depend on the fields."""

    def sample(
        self,
        model: Denoiser,
        prompt: Prompt,
        length: int,
        *,
        params: Any,
        noise: Any,
        on_step: OnCanvasStep | None = None,
    ) -> Generation:
        """Fill `length` slots of every row of `prompt`. Randomness comes from `noise` alone.

        Raises:
            CanvasInterrupt: instead of KeyboardInterrupt, with what was committed.
            OptionError, ShapeError, UnsupportedModelError: before the first pass.
            NumericsError: an open slot has invalid logits.
        """


class CanvasInterrupt(KeyboardInterrupt):
    """An interrupt that carries what was committed before it.

    Attributes:
        generation: of the run so far; `tokens` are the mask token where nothing is committed.
        is_committed: `[B, L]` bool.
    """

    def __init__(self, generation: Generation, is_committed: Tensor) -> None:
        super().__init__("interrupted; the error's `generation` holds what was committed")
        self.generation, self.is_committed = generation, is_committed


def check_window(window: Any, *, adaptive: bool) -> None:
    """Raise OptionError unless `window` is in 1..4096, or "adaptive" where that is allowed."""
    if not (adaptive and isinstance(window, str) and window == "adaptive"):
        other = ', and "adaptive" chooses' if adaptive else ""
        check_int("window", window, 1, 4096, hint=f"16 to 64 suits most{other}")


class Method(Checked, Capable):
    """Base of what a slot of `attach` takes beside a policy; `slot` is the keyword of `attach`."""


def check_method(slot: str, method: object, base: type, example: str) -> Any:
    """The method of a slot.

    Args:
        slot: the keyword of `attach`.
        method: what was given.
        base: the contract of the slot's methods.
        example: of one, as it is written.

    Raises:
        OptionError: anything else; a method of another slot is told its own.
    """
    if isinstance(method, base):
        return method
    remedy = f"give an instance of a method of {slot}"
    if isinstance(method, Method):
        remedy = f"{type(method).__name__} goes into {method.slot}="
    raise OptionError(
        f"{slot}: expected a method such as {example}, received {show(method)}; {remedy}"
    )


def check_policy(policy: Any, kind: str = "window") -> None:
    """Raise OptionError unless `policy` is a policy of `kind`, "window" or "canvas"."""
    has_exactness = getattr(policy, "exactness", None) in get_args(Exactness)
    can_sample = callable(getattr(policy, "sample", None)) and not isinstance(policy, type)
    is_policy = has_exactness and can_sample
    own = getattr(policy, "kind", "window")
    if not is_policy or own != kind:
        example = "Jacobi(window=32)" if kind == "window" else "LosslessUnmask()"
        remedy = f"it is for a {own}, take" if is_policy else "make an instance of"
        what = f"expected a policy such as mmaccel.{example}, received {show(policy)}; {remedy}"
        raise OptionError(f"policy: {what} one of the classes that mmaccel offers for a {kind}")
