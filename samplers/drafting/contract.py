"""The contract between the window loop and what drafts for it.

A `DraftSource` is configuration: a frozen dataclass that a policy carries in its field `drafts`. At
the beginning of a run it opens a `Drafter`, which has the state of that run. The loop calls it in
this order in every step:

    choose_width    how many slots the pass covers
    propose         drafts, of the slots that no pass has predicted or of all
    correct         all drafts of the window, once they stand in the token buffer
    observe         what the forward pass said of the window, before tokens are accepted
    accepted        how many tokens each row has gained

A source without a state implements `DraftSource.propose` alone. What a step hands to the next one
is a `Held` tensor that the drafter declares (`run.steps.declare`), so that steps may be captured as
CUDA graphs and rows may be dropped.

Policies that are exact in distribution record the distribution from which a draft was really drawn;
that of a proposed token is one-hot unless the drafter says otherwise.
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
    """Drafts of the K draft slots of a window: either `tokens` or `scores` to draw them from.

    Where the source keeps predictions, only those of slots that no pass has predicted are used.

    Attributes:
        tokens: `[B, K]` int64.
        scores: `[B, 1 or K, V]`, unnormalised log-probabilities.
        distribution: `[B, K, V]`, from which `tokens` were drawn with noise that nothing else
            reads; None where they are certain.
    """

    tokens: Tensor | None = None
    scores: Tensor | None = None
    distribution: Tensor | None = None


class Nodes(NamedTuple):
    """N drafts beside the chain of W - 1 drafts: a tree, together with it.

    Entry 0 of a pass is the last known token, entries 1 to W - 1 are the chain's drafts, and entry
    W + i is node i.

    Attributes:
        tokens: `[B, N]` int64.
        parents: `[B, N]` int64, the entry that a node follows, smaller than its own number. No node
            has more than W - 1 drafts on its path, itself included.
        wanted: `[n]` int64, numbers of those of the B N nodes that are computed; None: all.
    """

    tokens: Tensor
    parents: Tensor
    wanted: Tensor | None = None

    @classmethod
    def of_branches(cls, forks: Tensor, tokens: Tensor, width: int) -> Nodes:
        """The nodes of n branches of L drafts, one branch after the other.

        Args:
            forks: `[B, n]` int64, the entry of the chain that a branch leaves.
            tokens: `[B, n, L]` int64.
            width: W.
        """
        rows, n, length = tokens.shape
        before = torch.arange(n * length, device=tokens.device).view(n, length) + width - 1
        parents = before.repeat(rows, 1, 1)
        parents[..., 0] = forks
        return cls(tokens.flatten(1), parents.flatten(1))


class Paths(NamedTuple):
    """What n entries of a tree follow, from the last known token on.

    Attributes:
        tokens: `[B, n, W-1]` int64, the drafts of the window's slots as an entry reads them; those
            from its depth on are not looked at.
        depths: `[B, n]` int64, how many drafts there are on its path. The draft slot of its
            children has this number.
    """

    tokens: Tensor
    depths: Tensor


class Children(NamedTuple):
    """Drafts that may follow entries of a tree, the likeliest first.

    Attributes:
        tokens: `[B, n, k]` int64, different ones for each entry.
        log_probs: `[B, n, k]`, of being the right token, if the entry is right.
    """

    tokens: Tensor
    log_probs: Tensor


class PassPath(NamedTuple):
    """Which entries of a tree stand for the slots of a window, after a pass.

    Attributes:
        entries: `[B, W]` int64.
        is_branch: `[B, W]` bool, those that are no entries of the window's own chain.
        tokens: `[B, N]` int64, the token buffer as those entries read it.
    """

    entries: Tensor
    is_branch: Tensor
    tokens: Tensor


class PassScores(NamedTuple):
    """What a forward pass said of a window.

    Attributes:
        window: `[B, W, V]`, the scores that noise is added to: those of the target distribution.
            At temperature 0, where they name one token alone, those before temperature and filters.
        last: `[B, V]`, of the last slot, before temperature and filters.
        path: of a tree's pass; None where the pass was over the window alone.
    """

    window: Tensor
    last: Tensor
    path: PassPath | None = None


@dataclass(frozen=True)
class Frontier:
    """What is known where the drafts of a window begin.

    Attributes:
        token_buffer: `[B, N]` int64, prompt (left-padded with -1), tokens and drafts so far.
        origin: column of slot 0 in `token_buffer`.
        filled: `[B]` int64, first column of `token_buffer` that no pass has predicted.
        slots: `[B, K]` int64, the drafts' slots.
        last_scores: `[B, V]`, scores of the right-most slot of the last pass, or of the last one
            that was accepted where all drafts are new; None before the first pass, and for a source
            that does not read them.
        layout: what is known about the slots.
        vocab_size: V.
        impossible: `[S]` int64, ids that no slot can have; None if none are known.
        is_first: `[B]` bool, rows before their first pass, whose last scores are those of another
            row; None if all rows began together.
        n_shown: see `mmaccel.contracts.Prompt`.
    """

    token_buffer: Tensor
    origin: int
    filled: Tensor
    slots: Tensor
    last_scores: Tensor | None
    layout: Layout | None
    vocab_size: int
    impossible: Tensor | None = None
    is_first: Tensor | None = None
    n_shown: int = 0

    @property
    def columns(self) -> Tensor:
        """`[B, K]` int64, the drafts' columns in `token_buffer`."""
        return self.slots + self.origin


NO_GRAPHS: Exclusions = {"captured steps": "synchronises with the host"}


class DraftSource(Checked, Capable):
    """Base of draft sources; a child is a frozen dataclass.

    A child implements `propose`, or `open` if it keeps something from one pass to the next. The
    class variables say what it asks of the loop.

    Attributes:
        is_capturable: whether its steps may be captured as CUDA graphs; then its drafts are not
            checked.
        only_bitwise: whether drafts depend on the noise of other slots, so that no distribution of
            them is known, or on other rows, so that tokens would differ from batch to batch under a
            policy that is exact in distribution.
        chooses_widths: whether the drafter's `choose_width` narrows passes by what they cost.
        learns_guesses: whether what passes say of slots that are not accepted shapes the drafts of
            others.
        keeps_predictions: whether what the last pass has predicted for a slot stays its draft;
            otherwise all drafts of a window are proposed anew.
        reads_last_scores: whether `Frontier.last_scores` is read.
        reads_scores: whether the drafter's `observe` reads the scores of every pass.
        has_branches: whether the drafter's `branch` makes branches of one length for a tree.
        has_children: whether the drafter's `children` makes the drafts after given ones.
        corrects: whether the drafter's `correct` may change drafts, and both it and `observe` read
            the slots' frozen noise.
        needs_layers: whether the run's own model drafts, by layers that attend to part of their
            cache; only some models have such layers.
        name: what statistics and policies call it; empty for one that has no short name.
    """

    slot = "drafts"
    is_capturable: ClassVar[bool] = False
    only_bitwise: ClassVar[bool] = False
    chooses_widths: ClassVar[bool] = False
    learns_guesses: ClassVar[bool] = False
    keeps_predictions: ClassVar[bool] = True
    reads_last_scores: ClassVar[bool] = True
    reads_scores: ClassVar[bool] = False
    has_branches: ClassVar[bool] = False
    has_children: ClassVar[bool] = False
    corrects: ClassVar[bool] = False
    needs_layers: ClassVar[bool] = False
    name: ClassVar[str] = ""

    @property
    def needs(self) -> Words:
        """See `mmaccel.capabilities.Capable`."""
        asked = {
            "corrections": self.corrects,
            "guesses": self.learns_guesses,
            "fixed noise": self.only_bitwise,
        }
        return frozenset(word for word, is_so in asked.items() if is_so)

    @property
    def excludes(self) -> Exclusions:
        """See `mmaccel.capabilities.Capable`."""
        found = {} if self.is_capturable else dict(NO_GRAPHS)
        if self.other_model is not None:
            found |= {"copied entries": "has a model that processes whole prompts"}
        if self.needs_layers:
            found |= {"mixed passes": "drafts behind prompts that are in the cache"}
        return found

    @property
    def other_model(self) -> TokenModel | None:
        """What drafts, if it is a model of its own, whose cache one run at a time has."""
        return None

    @property
    def draws_trees(self) -> bool:
        """Whether the drafter's `distributions` says what follows the entries of a tree."""
        return False

    def propose(self, frontier: Frontier) -> Drafts:
        """Drafts `[B, K]` of the window's slots, or scores `[B, 1 or K, V]` to draw them from.

        Args:
            frontier: what is known.
        """
        raise NotImplementedError

    def open(self, run: OpenRun) -> Drafter:
        """What drafts in one run.

        Args:
            run: before its first pass; it has its prompt and its model, and no token buffer yet.
        """
        return Drafter(self)

    def check_layout(self, layout: Layout | None) -> None:
        """Raise OptionError for a layout that lacks what this source needs."""


@dataclass(eq=False)
class Drafter:
    """Drafts of one run. A child has the state that passes hand to each other.

    Args:
        source: what it is drafting by; its class variables hold for this drafter.
        note: a remark for the statistics of the run; empty for none.
    """

    source: DraftSource
    note: str = field(default="", kw_only=True)

    @property
    def weights(self) -> object | None:
        """What captured steps read besides the run's tensors; its graphs end with it."""
        return None

    def choose_width(self, run: OpenRun, most: int) -> int:
        """How many slots the next pass covers; asked before the window lies over them.

        Only for a source that goes with bitwise policies alone (`only_bitwise`): under others
        tokens depend on widths.

        Args:
            run: between two passes.
            most: at most so many.
        """
        return most

    def propose(self, run: OpenRun) -> Drafts:
        """Drafts of the window's slots; see `Drafts`."""
        return self.source.propose(run.frontier())

    def correct(
        self, run: OpenRun, drafts: Tensor, noise: Tensor, distribution: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The window's drafts, corrected.

        Args:
            run: whose token buffer holds the drafts, and then the corrected ones.
            drafts: `[B, W-1]` int64.
            noise: frozen noise of the draft slots, `[B, W-1, V]`; zeros `[B, W-1, 1]` at
                temperature 0.
            distribution: `[B, W-1, V]`, from which `drafts` were drawn; None if nobody asks.

        Returns:
            `[B, W-1]` int64, and the distribution from which these were drawn.
        """
        return drafts, distribution

    def branch(
        self, run: OpenRun, drafts: Tensor, noise: Tensor, *, n_branches: int, length: int
    ) -> Nodes | None:
        """Branches of one length that leave the chain; None for a pass without.

        Args:
            run: whose token buffer holds the window's drafts.
            drafts: `[B, W-1]` int64.
            noise: as in `correct`.
            n_branches: N, how many a row gets.
            length: L, drafts of each, at most W - 1.
        """
        return None

    def children(self, run: OpenRun, paths: Paths, noise: Tensor, *, k: int) -> Children | None:
        """What may follow entries of a tree; None for a pass without.

        Args:
            run: whose token buffer holds the window's drafts.
            paths: of the entries.
            noise: as in `correct`.
            k: the most children of an entry; the drafter may know fewer.
        """
        return None

    def distributions(self, run: OpenRun, tokens: Tensor, parents: Tensor, first: int) -> Tensor:
        """What may follow the entries of a tree from one on, `[B, E - first, V]`: probabilities.

        Drafts are drawn from them with noise that they do not depend on: that of later slots.

        Args:
            run: whose token buffer holds the window's drafts.
            tokens: `[B, E]` int64, what the entries hold; the window's first one is not read.
            parents: `[B, E]` int64, see `mmaccel.contracts.Pass`.
            first: a node; asked once for each generation of nodes, in their order.
        """
        raise NotImplementedError

    def observe(self, run: OpenRun, scores: PassScores, noise: Tensor | None) -> None:
        """Read what a pass said, before any of its tokens is accepted.

        Args:
            run: after its forward pass.
            scores: of the window.
            noise: as in `correct`, of all W slots; None for a source that corrects nothing.
        """

    def accepted(self, run: OpenRun, n_new: Tensor) -> None:
        """Read how many tokens each row gained in this pass, `[B]` int64."""

    def timed(self, run: OpenRun, seconds: float) -> None:
        """Read how long a step took, from the choice of its width until the host knew its end."""

    def close(self, run: OpenRun) -> None:
        """End the run: give back what `DraftSource.open` has asked of its model."""

    def begin_rows(self, run: OpenRun, batch_slots: Tensor) -> None:
        """Forget the rows that stood in these batch slots, `[n]` int64."""


def check_proposed(
    source: DraftSource, found: Any, frontier_shape: tuple[int, int, int], refuses_nan: bool
) -> None:
    """Raise ShapeError unless a source proposes what `Drafts` describes.

    Args:
        source: that proposed it.
        found: what it proposed.
        frontier_shape: B, K and V.
        refuses_nan: whether scores are looked at; those of a pass may be NaN behind what is
            accepted.

    Raises:
        NumericsError: scores that are NaN.

    Cost: a host synchronisation, unless the source is captured.
    """
    rows, drafts, size = frontier_shape
    name = f"{type(source).__name__}.propose"
    hint = "return Drafts(tokens=…) or Drafts(scores=…)"
    check_kind(name, found, Drafts, hint)
    reads = not source.is_capturable
    if found.tokens is None:
        counts = True if reads and refuses_nan else None
        check_answer(name, found.scores, (rows, drafts, size), "float", hint, counts=counts)
        return
    if found.scores is not None:
        raise ShapeError(f"{name}: expected tokens or scores, received both; {hint}")
    hint = "propose a token for every slot of frontier.slots; padding, which is -1, is none"
    within = (0, size - 1) if reads else None
    check_answer(name, found.tokens, (rows, drafts), "int64", hint, within=within)
