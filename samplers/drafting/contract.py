"""The contract between the window loop and what drafts for it.

A `DraftSource` is configuration, a policy's field `drafts`; it opens a `Drafter`, which has the
state of one run. The loop calls it in this order in every step:

    choose_width    how many slots the pass covers
    propose         drafts, of the slots that no pass has predicted or of all
    correct         all drafts of the window, once they stand in the token buffer
    observe         what the forward pass said of the window, before tokens are accepted
    accepted        how many tokens each row has gained

A source without a state implements `DraftSource.propose` alone. What a step hands to the next one
is a `Held` tensor that the drafter declares (`run.steps.declare`), so that steps may be captured as
CUDA graphs and rows may be dropped. The distribution of a proposed token is one-hot unless the
drafter says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mmaccel.capabilities import Capable, Exclusions, Words
from mmaccel.checks import Checked, check_answer, check_kind
from mmaccel.contracts import Layout, TokenModel
from mmaccel.errors import ShapeError

if TYPE_CHECKING:
    # `rows` and `passes` are there from the first pass on, all else from the beginning
    from mmaccel.samplers.window.run import WindowRun as OpenRun
else:
    OpenRun = Any


class Drafts(NamedTuple):
    """Drafts of the K draft slots of a window: either `tokens` or `scores` to draw them from."""

    tokens: Tensor | None = None  # [B, K] int64
    scores: Tensor | None = None  # [B, 1 or K, V], unnormalised log-probabilities
    # [B, K, V], from which `tokens` were drawn with noise that nothing else reads; None: certain
    distribution: Tensor | None = None


class Nodes(NamedTuple):
    """N drafts beside the chain of W - 1 drafts, at most W - 1 on a node's path, itself included.

    Entry 0 of a pass is the last known token, 1 to W - 1 are the chain's drafts, W + i is node i.
    """

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64, the entry that a node follows, smaller than its own number
    wanted: Tensor | None = None  # [n] int64, which of the B N nodes are computed; None: all

    @classmethod
    def of_branches(cls, forks: Tensor, tokens: Tensor, width: int) -> Nodes:
        """N branches of drafts `[B, n, L]` that leave entries `forks` `[B, n]` of the chain."""
        rows, n, length = tokens.shape
        # node (b, l) follows node (b, l - 1): the entry before its own, W + b L + l - 1
        before = torch.arange(n * length, device=tokens.device).view(n, length) + width - 1
        parents = before.repeat(rows, 1, 1)
        parents[..., 0] = forks
        return cls(tokens.flatten(1), parents.flatten(1))


class Paths(NamedTuple):
    """What n entries of a tree follow, from the last known token on."""

    tokens: Tensor  # [B, n, W-1] int64, drafts by slot; those from an entry's depth on mean nothing
    depths: Tensor  # [B, n] int64, drafts on its path: also the draft slot of its children


class Children(NamedTuple):
    """Drafts that may follow entries of a tree, the likeliest first."""

    tokens: Tensor  # [B, n, k] int64, different ones for each entry
    log_probs: Tensor  # [B, n, k], of being the right token, if the entry is right


class PassPath(NamedTuple):
    """Which entries of a tree stand for the slots of a window, after a pass."""

    entries: Tensor  # [B, W] int64
    is_branch: Tensor  # [B, W] bool, those that are no entries of the window's own chain
    tokens: Tensor  # [B, N] int64, the token buffer as those entries read it


class PassScores(NamedTuple):
    # [B, W, V], the scores that noise is added to: those of the target distribution. At temperature
    # 0, where that names one token alone, those before temperature and filters.
    window: Tensor
    last: Tensor  # [B, V], of the last slot, before temperature and filters
    path: PassPath | None = None  # of a tree's pass


@dataclass(frozen=True)
class Frontier:
    """What is known where the drafts of a window begin."""

    token_buffer: Tensor  # [B, N] int64: prompt (left-padded with -1), tokens and drafts so far
    origin: int  # column of slot 0 in `token_buffer`
    filled: Tensor  # [B] int64, first column of `token_buffer` that no pass has predicted
    slots: Tensor  # [B, K] int64, the drafts' slots
    # [B, V], of the right-most slot of the last pass, or of the last accepted one where all drafts
    # are new; None before the first pass, and for a source that does not read them
    last_scores: Tensor | None
    layout: Layout | None
    vocab_size: int
    impossible: Tensor | None = None  # [S] int64, ids that no slot can have, as far as known
    # [B] bool, rows before their first pass, whose `last_scores` are those of another row; None if
    # all rows began together
    is_first: Tensor | None = None
    n_shown: int = 0  # as in `mmaccel.contracts.Prompt`

    @property
    def columns(self) -> Tensor:
        """`[B, K]` int64, the drafts' columns in `token_buffer`."""
        return self.slots + self.origin


NO_GRAPHS: Exclusions = {"captured steps": "synchronises with the host"}


class DraftSource(Checked, Capable):
    """Frozen dataclasses with `propose`, or with `open` if they keep something between passes."""

    slot = "drafts"
    # `propose` never synchronises with the host, so that steps may be captured as CUDA graphs; its
    # drafts are then not checked
    is_capturable: ClassVar[bool] = False
    # drafts depend on the noise of other slots, so that no distribution of them is known, or on
    # other rows, so that tokens would differ from batch to batch under a policy of fresh noise
    only_bitwise: ClassVar[bool] = False
    chooses_widths: ClassVar[bool] = False  # `choose_width` narrows passes by what they cost
    learns_guesses: ClassVar[bool] = False  # from what passes say of slots that are not accepted
    # what the last pass predicted for a slot stays its draft; else all drafts are proposed anew
    keeps_predictions: ClassVar[bool] = True
    reads_last_scores: ClassVar[bool] = True  # `Frontier.last_scores`
    reads_scores: ClassVar[bool] = False  # `observe` reads the scores of every pass
    has_branches: ClassVar[bool] = False  # `branch` makes branches of one length for a tree
    has_children: ClassVar[bool] = False  # `children` makes the drafts after given ones
    corrects: ClassVar[bool] = False  # `correct` changes drafts; it and `observe` read noise
    needs_layers: ClassVar[bool] = False  # the run's own model drafts, by its layers
    name: ClassVar[str] = ""  # in statistics and policies; empty for one without a short name

    @property
    def needs(self) -> Words:
        asked = {
            "corrections": self.corrects,
            "guesses": self.learns_guesses,
            "fixed noise": self.only_bitwise,
        }
        return frozenset(word for word, is_so in asked.items() if is_so)

    @property
    def excludes(self) -> Exclusions:
        excluded = {} if self.is_capturable else dict(NO_GRAPHS)
        if self.other_model is not None:
            excluded |= {"copied entries": "has a model that processes whole prompts"}
        if self.needs_layers:
            excluded |= {"mixed passes": "drafts behind prompts that are in the cache"}
        return excluded

    @property
    def other_model(self) -> TokenModel | None:
        """What drafts, if it is a model of its own, whose cache one run at a time has."""
        return None

    @property
    def draws_trees(self) -> bool:
        """Whether the drafter's `distributions` says what follows the entries of a tree."""
        return False

    def propose(self, frontier: Frontier) -> Drafts:
        """Drafts `[B, K]` of the window's slots, or scores `[B, 1 or K, V]` to draw them from."""
        raise NotImplementedError

    def open(self, run: OpenRun) -> Drafter:
        """What drafts in one run, which has its prompt and its model, and no token buffer yet."""
        return Drafter(self)

    def check_layout(self, layout: Layout | None) -> None:
        """Raise OptionError for a layout that lacks what this source needs."""


@dataclass(eq=False)
class Drafter:
    """Drafts of one run; `run.rows` is the token buffer and the window over it.

    `noise` is the frozen noise of draft slots, `[B, W-1, V]`; zeros `[B, W-1, 1]` at temperature 0.
    """

    source: DraftSource
    note: str = field(default="", kw_only=True)  # a remark for the statistics of the run

    @property
    def weights(self) -> object | None:
        """What captured steps read besides the run's tensors; its graphs end with it."""
        return None

    def choose_width(self, run: OpenRun, most: int) -> int:
        """Slots of the next pass, at most `most`; asked before the window lies over them. Only of a
        source with `only_bitwise`: under other policies tokens depend on widths.
        """
        return most

    def propose(self, run: OpenRun) -> Drafts:
        return self.source.propose(run.frontier())

    def correct(
        self, run: OpenRun, drafts: Tensor, noise: Tensor, distribution: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The window's drafts `[B, W-1]` int64, corrected also in the run's token buffer, and the
        distribution `[B, W-1, V]` from which they were drawn; None if nobody asks for it.
        """
        return drafts, distribution

    def branch(
        self, run: OpenRun, drafts: Tensor, noise: Tensor, *, n_branches: int, length: int
    ) -> Nodes | None:
        """N branches of L <= W - 1 drafts that leave the chain `[B, W-1]`; None without."""
        return None

    def children(self, run: OpenRun, paths: Paths, noise: Tensor, *, k: int) -> Children | None:
        """What may follow entries of a tree, at most k each; None for a pass without a tree."""
        return None

    def distributions(self, run: OpenRun, tokens: Tensor, parents: Tensor, first: int) -> Tensor:
        """Probabilities `[B, E - first, V]` of what follows the entries of a tree from `first` on.

        Asked once for each generation of nodes. Drafts are drawn from them with noise that they do
        not depend on: that of later slots. `tokens` are `[B, E]` int64, of which the window's first
        is not read, and `parents` as in `mmaccel.contracts.Pass`.
        """
        raise NotImplementedError

    def observe(self, run: OpenRun, scores: PassScores, noise: Tensor | None) -> None:
        """Read a pass before its tokens are accepted. `noise`: of all W slots, or None."""

    def accepted(self, run: OpenRun, n_new: Tensor) -> None:
        """Read how many tokens each row gained in this pass, `[B]` int64."""

    def timed(self, run: OpenRun, seconds: float) -> None:
        """Read how long a step took, from the choice of its width until the host knew its end."""

    def close(self, run: OpenRun) -> None:
        """End the run: give back what `DraftSource.open` has asked of its model."""

    def begin_rows(self, run: OpenRun, batch_slots: Tensor) -> None:
        """Forget the rows that stood in these batch slots, `[n]` int64."""


def check_proposed(
    source: DraftSource, proposed: Any, frontier_shape: tuple[int, int, int], refuses_nan: bool
) -> None:
    """Raise ShapeError unless a source proposes what `Drafts` describes, NumericsError for NaN if
    it `refuses_nan` (behind what is accepted scores may be NaN). Cost: a host synchronisation,
    unless the source is captured.
    """
    rows, drafts, size = frontier_shape
    name = f"{type(source).__name__}.propose"
    hint = "return Drafts(tokens=…) or Drafts(scores=…)"
    check_kind(name, proposed, Drafts, hint)
    reads = not source.is_capturable
    if proposed.tokens is None:
        counts = True if reads and refuses_nan else None
        check_answer(name, proposed.scores, (rows, drafts, size), "float", hint, counts=counts)
        return
    if proposed.scores is not None:
        raise ShapeError(f"{name}: expected tokens or scores, received both; {hint}")
    hint = "propose a token for every slot of frontier.slots; padding, which is -1, is none"
    within = (0, size - 1) if reads else None
    check_answer(name, proposed.tokens, (rows, drafts), "int64", hint, within=within)
