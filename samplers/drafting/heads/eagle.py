"""EAGLE drafts: a head continues the large model's own hidden states.

Y. Li et al., arXiv 2401.15077, arXiv 2406.16858 and arXiv 2503.01840 (more in `eagle_model.py`).
After a pass the head reads the states of the accepted tokens, each with the token that follows it;
then it drafts token by token, its own states in place of those that are not known. Under a tree it
reads every path of a generation at once (`eagle_tree.py`); `mmaccel.DySpec` is the dynamic tree of
EAGLE-2, whose nodes have the largest product of the head's confidences.

Departures: the window's chain is in every tree; under guidance the head is one row for all
branches: it reads the guided states of passes, and those of the first branch of a prompt.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from mmaccel.capabilities import explain, refuse
from mmaccel.checks import show, within
from mmaccel.contracts import Pass
from mmaccel.errors import OptionError
from mmaccel.kernels.truncation import guide
from mmaccel.samplers.drafting.contract import (
    Children,
    Drafter,
    Drafts,
    DraftSource,
    OpenRun,
    PassScores,
    Paths,
)
from mmaccel.samplers.drafting.gap_model import GapModel, Prior, Ranks
from mmaccel.samplers.drafting.heads.eagle_model import FOLDER, EagleModel, HeadCache, load_eagle
from mmaccel.samplers.drafting.heads.eagle_tree import HeadTree
from mmaccel.samplers.drafting.in_turn import draft_in_turn
from mmaccel.samplers.drafting.opened import open_once
from mmaccel.samplers.drafting.shared_ids import read_ids
from mmaccel.samplers.drafting.states import LayerStates, PromptReader
from mmaccel.samplers.trees.entries import TreeEntries
from mmaccel.samplers.window.steps import Held

GAPS: Prior = ((1.5, -2.0), (1.5, -2.0))  # beta and c that rows begin with, guessed


@dataclass(frozen=True)
class HeadSource(DraftSource):
    """Base of sources that draft by a head over the large model's states."""

    needs = frozenset({"layer states"})
    keeps_predictions: ClassVar[bool] = False
    reads_last_scores: ClassVar[bool] = False
    reads_scores: ClassVar[bool] = True

    def load_head(self, model: LayerStates) -> Any:
        raise NotImplementedError

    def weights_file(self) -> Path | None:
        """What the head is read from, and again after a change."""
        return None

    def begin(self, run: OpenRun, head: Any) -> HeadDrafter:
        return EagleDrafter(
            self,
            head,
            **declare_cache(run),
            state=run.steps.declare("state of the head"),
            gaps=GapModel(GAPS, run.steps.declare("gaps of the head's scores")),
        )

    def open(self, run: OpenRun) -> Drafter:
        model: Any = run.model
        refuse(explain(self, model))
        head = open_once(self, model, self.weights_file(), lambda: self.load_head(model))
        drafter = self.begin(run, head)
        model.keep_states(True, drafter.layers, drafter.read_prompt(run))
        return drafter


@dataclass(frozen=True)
class FolderHead(HeadSource):
    folder: str = within(MISSING, hint="give the folder of a head")

    def weights_file(self) -> Path:
        return Path(self.folder) / FOLDER.weights


@dataclass(frozen=True)
class Eagle(FolderHead):
    """An EAGLE head in a folder, in the authors' layouts of EAGLE 1 to 3, continues the large
    model's own states; `mmaccel train-head MODEL OUT --texts FILE` makes one.

    Args:
        folder: holds `config.json` and `model.safetensors`.
        ids: the tokens that it scores, such as `mmaccel.frequent_ids(texts, 8192)`; None: all
            that it can.

    Loses: as a large head beside a small model; on texts unlike those that it was trained on.
    Refused for windows of image tokens; pickled weights are not opened. No published head was at
    hand.
    Figures: `stdlib`, window 6: 4.10 tokens a pass greedy and 1.17 times as fast as `generate`;
    with `DySpec(nodes=60)` and window 10 7.14.
    """

    ids: tuple[int, ...] | None = within(
        None, hint="mmaccel.frequent_ids(texts, n) makes one", repr=False
    )

    has_children = True
    draws_trees = True
    name = "eagle"

    def load_head(self, model: LayerStates) -> EagleModel:
        output = model.output_matrix()
        head = load_eagle(
            self.folder, embedding=model.input_matrix(), output=output, n_layers=model.n_layers
        )
        if self.ids is not None:
            head.trim(read_ids(self.ids, len(output), "Eagle.ids"))
            if not len(head.targets):
                raise OptionError(
                    f"Eagle.ids: expected ids that the head scores, received "
                    f"{show(self.ids)}; leave ids out"
                )
        return head


def declare_cache(run: OpenRun) -> dict[str, Any]:
    state = run.steps
    return {
        "keys": state.declare("keys of the head"),
        "values": state.declare("values of the head"),
        "first": state.declare("first column of the head"),
        "seen": state.declare("states of the last pass"),
    }


@dataclass(eq=False)
class HeadDrafter(Drafter):
    """Drafts in one run of a head over the large model's states, which it keeps in a cache."""

    head: Any
    keys: Held  # as in `HeadCache`
    values: Held
    first: Held
    seen: Held  # [B, W, F], states of the pass before tokens were accepted
    _begun: HeadCache | None = field(default=None, init=False)  # until the first step

    @property
    def layers(self) -> tuple[int, ...]:
        """The large model's layers whose inputs the head reads; none: the last states."""
        raise NotImplementedError

    def read(self, run: OpenRun, states: Tensor, columns: Tensor, cache: HeadCache) -> Any:
        """Write what the head makes of the large model's states `[B, K, F]` at their columns."""
        raise NotImplementedError

    def read_prompt(self, run: OpenRun) -> PromptReader | None:
        """What reads the states of the prompt; None where rows join later, which begin without."""
        if run.scheduler is not None:
            return None

        def read(entries: Pass, states: Tensor) -> None:
            rows = run.prompt.batch
            first = run.rows.origin - run.prompt.lengths[:rows]
            columns = entries.indices[:rows] + first[:, None]
            self._begun = self._cache(run)._replace(first=first)
            self._keep(run, self.read(run, states[:rows], columns, self._begun), columns)

        return read

    def observe(self, run: OpenRun, scores: PassScores, noise: Tensor | None) -> None:
        states = cast(LayerStates, run.model).last_states
        assert states is not None
        guided = guide(states.float(), run.prompt.branches, run.params.guidance_scale)
        if scores.path is not None:
            rows = torch.arange(len(guided), device=guided.device)[:, None]
            guided = guided[rows, scores.path.entries]
        self.seen.hold(guided)

    def accept(self, run: OpenRun, cache: HeadCache) -> Any:
        """Read the last pass's states; those behind what was accepted are written again."""
        after = self.read(run, self.seen.get(), (run.rows.columns - 1).clamp(min=0), cache)
        for held, value in zip((self.keys, self.values, self.first), cache, strict=True):
            held.hold(value)
        self._begun = None
        return after

    def begin_rows(self, run: OpenRun, batch_slots: Tensor) -> None:
        if self.first.value is not None:
            self.first.get()[batch_slots] = run.rows.origin - 1

    def close(self, run: OpenRun) -> None:
        cast(LayerStates, run.model).keep_states(False)

    def _keep(self, run: OpenRun, after: Any, columns: Tensor) -> None:
        """Keep what drafts begin with, of what `read` made of a prompt at `columns` `[B, K]`."""

    def _cache(self, run: OpenRun) -> HeadCache:
        """The cache; where nothing has been read, the last token of the prompt comes first."""
        if self.keys.value is not None:
            return HeadCache(self.keys.get(), self.values.get(), self.first.get())
        if self._begun is not None:
            return self._begun
        cache: HeadCache = self.head.empty_cache(run.prompt.batch, run.rows.tokens.shape[1])
        return cache._replace(first=torch.full_like(cache.first, run.rows.origin - 1))


@dataclass(eq=False)
class EagleDrafter(HeadDrafter):
    """Drafts of an `EagleModel` or a like head; the token of column c + 1 stands at column c."""

    state: Held  # [B, C], of the head, after the last accepted token
    gaps: GapModel  # how likely ranks are to be right, where noise of slots orders them
    _after_prompt: Tensor | None = field(default=None, init=False)  # `state` until the first step
    _tree: HeadTree | None = field(default=None, init=False)  # of the coming pass

    @property
    def layers(self) -> tuple[int, ...]:
        layers: tuple[int, ...] = self.head.aux_layers
        return layers

    def propose(self, run: OpenRun) -> Drafts:
        cache = self._cache(run)
        states = [self._state(cache)[:, None]]
        rows = run.rows

        def find_logits(work: Tensor, k: int) -> Tensor:
            run.stats.draft_passes += 1
            if k > 0:
                before = rows.columns[:, k - 1 : k].clamp(min=1)
                token = work.gather(1, before)
                states.append(self.head(token, states[-1], before - 1, cache))
            # all branches of a guided run say the same
            return self.head.logits(states[-1]).repeat(run.prompt.branches, 1, 1)

        drafts = draft_in_turn(run, find_logits)
        self._tree = None
        if run.policy.tree is not None and drafts.tokens is not None and run.width > 1:
            self._tree = HeadTree(
                self.head,  # an `EagleModel`: no other source grows trees
                cache,
                rows.columns[:, :1] - 1,
                drafts.tokens[:, :-1],
                torch.cat(states, 1),
                depth=run.width - 1,
            )
        return drafts

    def children(self, run: OpenRun, paths: Paths, noise: Tensor, *, k: int) -> Children | None:
        """The head's likeliest tokens with its confidence, in the order that noise prefers."""
        if self._tree is None:
            return None
        scores = self._score(run, paths).log_softmax(-1)
        slots = run.rows.slots[:, :1] + paths.depths
        k = min(k, scores.shape[2])
        if noise.shape[2] == 1:
            best = scores.topk(k, -1)
            return Children(best.indices, best.values)
        rows = torch.arange(len(scores), device=scores.device)[:, None]
        best = (scores + noise[rows, paths.depths]).topk(k, -1)
        self.gaps.expect(Ranks(best.values, best.indices, paths, run.rows.is_over(slots)))
        return Children(best.indices, self.gaps.log_chances(best.values, paths.depths))

    def distributions(self, run: OpenRun, tokens: Tensor, parents: Tensor, first: int) -> Tensor:
        paths = TreeEntries(tokens, parents, run.width).paths()
        paths = Paths(paths.tokens[:, first:], paths.depths[:, first:])
        return self._score(run, paths).softmax(-1)

    def accepted(self, run: OpenRun, n_new: Tensor) -> None:
        cache = self._cache(run)
        state = self._state(cache)
        after = self.accept(run, cache)
        index = (n_new - 1).clamp(min=0)
        self.state.hold(_choose(after, index, n_new[:, None] > 0, state))
        self.gaps.accepted(run, n_new)

    def begin_rows(self, run: OpenRun, batch_slots: Tensor) -> None:
        super().begin_rows(run, batch_slots)
        self.gaps.begin_rows(batch_slots)
        if self.state.value is not None:
            self.state.get()[batch_slots] = 0

    def _score(self, run: OpenRun, paths: Paths) -> Tensor:
        assert self._tree is not None
        # all branches of a guided run say the same
        logits = self.head.logits(self._tree.read(paths)).repeat(run.prompt.branches, 1, 1)
        rows = run.rows
        slots = rows.slots[:, :1] + paths.depths
        params = run.params
        score = params.apply if params.temperature else params.to_processed_scores
        return score(
            logits,
            run.prompt.branches,
            rows.tokens,
            slots + rows.origin,
            slots,
            run.prompt.layout,
        )

    def read(self, run: OpenRun, states: Tensor, columns: Tensor, cache: HeadCache) -> Tensor:
        """States `[B, K, C]` after entries with the large model's states `[B, K, F]`."""
        tokens = run.rows.tokens
        # an entry holds the token of the next column
        after = (columns + 1).clamp(max=tokens.shape[1] - 1)
        entered = tokens.gather(1, after).clamp(0, run.vocab_size - 1)
        columns = columns.clamp(max=tokens.shape[1] - 1)
        states_after: Tensor = self.head(entered, self.head.enter(states), columns, cache)
        return states_after

    def _keep(self, run: OpenRun, after: Tensor, columns: Tensor) -> None:
        last = run.rows.origin - 2  # its token is the last one of the prompt
        index = (last - columns[:, 0]).clamp(0, after.shape[1] - 1)
        is_here = (columns == last).any(1, keepdim=True)
        state = self._state(self._cache(run))
        self._after_prompt = _choose(after, index, is_here, state)

    def _state(self, cache: HeadCache) -> Tensor:
        state = self._after_prompt if self.state.value is None else self.state.value
        if state is not None:
            return state
        return cache.keys.new_zeros(len(cache.first), self.head.width)


def _choose(after: Tensor, index: Tensor, is_new: Tensor, state: Tensor) -> Tensor:
    """The states `[B, K, C]` at `index` `[B]` where `is_new` `[B, 1]`, else `state` `[B, C]`."""
    rows = torch.arange(len(after), device=after.device)
    return torch.where(is_new, after[rows, index], state)
