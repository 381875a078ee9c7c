"""What a model may have beside the members of a `TokenModel` or a `Denoiser`, as mix-ins; `offers`
says so where a word of `mmaccel.capabilities.GLOSSARY` asks for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmaccel.contracts import CanvasPass, Pass, Prompt
from mmaccel.results import BlockCounts, StepBytes

Branch = Callable[[Tensor, Tensor | None], Tensor]
"""(entries `[R, E, W]`, numbers `[R, m]` of those to compute, None for all) -> `[R, m, W]`."""
Around = Callable[[tuple[int, str], Tensor, Branch], Tensor]
"""(layer and part, entries `[R, E, W]`, branch) -> what the branch adds to all of them."""


@dataclass(frozen=True)
class LayerCounts:
    """What methods have left out of a run's caches and attention; None where nothing counts it.

    Attributes:
        n_evicted: cached entries of prompts that were evicted, and how many there were, in all rows
            of a layer; unless `is_of_prompt`, of all that was cached, in all layers.
        packed_bytes: of the run's keys and values where some are held in fewer bits, and what they
            would be otherwise; zeros where none are.
        step_bytes: what a step reads at the run's end.
    """

    n_evicted: tuple[int, int] = (0, 0)
    packed_bytes: tuple[int, int] = (0, 0)
    step_bytes: StepBytes | None = None
    block_counts: BlockCounts | None = None
    is_of_prompt: bool = True


class ReducedLayers(ABC):
    """Methods of caches and attention ("own attention")."""

    @abstractmethod
    def use_methods(self, methods: Any, branches: int = 1) -> None:
        """From the next `reserve` on, layers are reduced by `LayerMethods` that `explain` lets
        pass, for rows of so many guidance branches.
        """

    @property
    @abstractmethod
    def layer_counts(self) -> LayerCounts:
        """Of the run. Cost: host synchronisations where entries are held in fewer bits."""


class TreePasses(ABC):
    """Passes over a tree ("trees"), for which `RunSetup.spare` cache indices are reserved."""

    @abstractmethod
    def commit(self, start: Tensor, path: Tensor) -> None:
        """Say which entries of the last pass, a tree, were accepted; nothing is said of windows.

        `path` `[R, D]` int64 has each row's entries in order, from the one that follows the pass's
        `start` `[R]` int64 on, -1 behind them. They then stand at ``start[r] … start[r] + D - 1``.
        """


@dataclass(frozen=True)
class PromptPiece:
    """Tokens `[n]` int64 of a row's prompt that a pass processes, from cache index `start` on."""

    row: int
    start: int
    tokens: Tensor


class MixedPasses(ABC):
    """Passes of windows, trees and pieces of prompts of different sizes ("mixed passes")."""

    @abstractmethod
    def forward_mixed(self, entries: Pass, pieces: Sequence[PromptPiece]) -> Tensor:
        """As `forward`, logits `[R, W, V]` of windows; the pieces are processed with them. All keys
        and values are written first: an entry sees what stands before it in its row, pieces
        included.
        """


class CopiedEntries(ABC):
    """Rows that take over cached entries of others ("copied entries")."""

    @property
    @abstractmethod
    def entries_key(self) -> Hashable:
        """What cached entries depend on beside the tokens."""

    @abstractmethod
    def copy_entries(self, row: int, first: int, last: int) -> Sequence[tuple[Tensor, Tensor]]:
        """Copies of every layer's keys and values `[H, n, D]`, of a row's entries from one cache
        index on, before another.
        """

    @abstractmethod
    def write_entries(
        self, row: int, entries: Sequence[tuple[Tensor, Tensor]], key: Hashable = None
    ) -> None:
        """Let a row begin with every layer's keys and values `[H, n, D]`, or, where they are empty,
        with nothing. Rows that were given entries by the same key read them together, as far as
        rows may; None: the row writes a copy to its own cache.
        """


class SelfDrafts(ABC):
    """Drafts of the model itself, over part of its cache ("draft passes")."""

    @abstractmethod
    def forward_draft(self, entries: Pass, index: int) -> Tensor:
        """As `forward`, one entry a row, logits `[R, 1, V]`, attending as `RunSetup.drafts` says,
        after `index` drafts of the window; the next `forward` writes anew what it has written.
        """


class CanvasDrafts(ABC):
    """Drafts of the model itself, which sees masks in both directions ("draft canvas")."""

    @abstractmethod
    def forward_canvas(self, entries: Pass) -> Tensor:
        """As `forward`, logits `[R, W, V]` of entries that see each other and all that was cached
        before them; the next `forward` writes anew what it has written.
        """


class ScalePasses(ABC):
    """Of a `Denoiser` with `lengths`: passes over one scale, whose entries are final ("scales").

    Attributes:
        grids: rows and columns of each scale's entries.
    """

    grids: tuple[tuple[int, int], ...]

    @abstractmethod
    def begin(self, prompt: Prompt) -> None:
        """Rows of a run, before its first pass, after `reserve`."""

    @abstractmethod
    def restart(self, rows: Tensor, prompt: Prompt) -> None:
        """Other rows stand at `rows` `[n]` int64 of the B asked for; `prompt` is that of all."""

    @abstractmethod
    def forward_scale(
        self, scale: int, before: Tensor | None, rows: Tensor | None, around: Around | None
    ) -> tuple[Tensor, int]:
        """Logits `[G * b, n, V]` of all n slots of a scale, in b of the rows asked for, and how
        many entries of a row were computed.

        Args:
            before: tokens `[b, m]` of the scale before; None at the first.
            rows: `[b]` int64, which rows; None: all B.
            around: computes what each part of a layer adds; None: all of it.
        """


class CapturedBuffers(ABC):
    """Buffers that outlive a run, so that later ones replay its captured steps."""

    @property
    def serves_later_runs(self) -> bool:
        """Whether those of the next run do; otherwise its graphs are of that run alone."""
        return True

    @property
    def captures_prompts(self) -> bool:
        return True

    @abstractmethod
    def graph_key(self) -> tuple[Any, Hashable, Hashable]:
        """The module, its state (where its tensors live), and what else a graph holds."""

    @abstractmethod
    def reserve_static(self, rows: int, positions: int) -> dict[str, Any]:
        """`reserve`, in buffers that no caller writes to; returns them by name."""

    @abstractmethod
    def load_static(self, buffers: dict[str, Any]) -> None:
        """Instead of `reserve`: an earlier run's buffers, with this run's inputs in them."""

    @property
    def steps_differ(self) -> bool:
        return False

    def begin_step(self, width: int) -> bool:
        """Called before a step behind the prompt, of `width` entries a row; whether it is captured
        apart.
        """
        return False

    @abstractmethod
    def prompt_width(self, width: int) -> int:
        """The width at which a prompt of `width` tokens is processed, at least `width`."""


class SelectedRows(ABC):
    """Rows that can be prefilled, selected and dropped one by one.

    Any other model keeps all its rows until the run ends, and a pass of all rows prefills a prompt.
    """

    @abstractmethod
    def get_row_inputs(self) -> Any:
        """The model's inputs that have one entry for each row of the next run's prompt."""

    @abstractmethod
    def select_rows(self, row_inputs: Any, rows: Tensor | None) -> None:
        """From now on the model's rows are `rows` `[R]` int64 of `row_inputs`; None: all."""

    @abstractmethod
    def prefill_rows(self, tokens: Tensor, start: Tensor, rows: Tensor) -> None:
        """`prefill` tokens `[n, W]` to rows `[n]` int64, from `start` `[n]` on; maybe in several
        passes.
        """

    @abstractmethod
    def keep_rows(self, rows: Tensor) -> None:
        """From now on the cache holds these of its rows, `[n]` int64; `select_rows` follows. A row
        that stands there again is a place for one that is prefilled next.
        """

    @abstractmethod
    def join_rows(self, row_inputs: Any, others: Any, rows: Tensor, order: Tensor) -> Any:
        """Row inputs of rows `[n]` int64 that stay and of others that join, both from
        `get_row_inputs`, in the order `[R]` int64 of their concatenation.
        """


class FinishedBlocks(ABC):
    """Of a `Denoiser`: finished blocks of prompts that are processed by a pass of their own."""

    @property
    @abstractmethod
    def prompt_limit(self) -> int | None:
        """Where finished blocks have more entries than this, `prefill` processes them; None:
        never.
        """

    @abstractmethod
    def prefill(self, entries: CanvasPass) -> None:
        """Run one pass over the finished blocks of all rows' prompts, after `reserve`, with `start`
        and `lengths`; a row's entries are in the order of their positions.
        """
