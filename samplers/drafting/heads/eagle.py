"""EAGLE drafts: a head continues the large model's own hidden states.

See `mmaccel.samplers.drafting.heads.eagle_model` for the papers and the layouts of published heads.

After a pass the head reads the states of the accepted tokens, each with the token that follows it;
before the next one it drafts token by token, and reads its own states in place of those that are
not known.

Under a tree the head reads every path of a generation at once (`eagle_tree.py`), and the shapes of
`mmaccel.samplers.trees` choose: `mmaccel.DySpec` has the dynamic tree of EAGLE-2, whose nodes are
those with the largest product of the head's confidences.

Departures: the window's chain is in every tree; under guidance the head is one row for all
branches: it reads the guided states of passes, and those of the first branch of a prompt.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor

from mmaccel.capabilities import explain, refuse
from mmaccel.checks import show, within
from mmaccel.contracts import Pass
from mmaccel.errors import OptionError
from mmaccel.kernels.truncation import guide
from mmaccel.samplers.drafting.coarse import opened_for
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
from mmaccel.samplers.drafting.shared_ids import read_ids
from mmaccel.samplers.drafting.states import LayerStates, PromptReader
from mmaccel.samplers.trees.entries import TreeEntries
from mmaccel.samplers.window.step_state import Held

GAPS: Prior = ((1.5, -2.0), (1.5, -2.0))  # beta and c that rows begin with, guessed


class StateHead(Protocol):
    """A head that continues hidden states; `EagleModel` is one.

    Attributes:
        width: C, of its states.
        aux_layers: the large model's layers whose inputs it reads; empty: the last states.
    """

    @property
    def width(self) -> int: ...

    @property
    def aux_layers(self) -> tuple[int, ...]: ...

    def empty_cache(self, rows: int, columns: int) -> HeadCache:
        """A cache without entries."""

    def enter(self, features: Tensor) -> Tensor:
        """States `[B, K, C]` of the large model's `[B, K, F]`."""

    def __call__(self, tokens: Tensor, states: Tensor, columns: Tensor, cache: HeadCache) -> Tensor:
        """States `[B, K, C]` after entries; see `EagleModel.forward`."""

    def logits(self, states: Tensor) -> Tensor:
        """Logits `[..., V]` float32 of states `[..., C]`."""


@dataclass(frozen=True)
class HeadSource(DraftSource):
    """Base of sources that draft by a head over the large model's states.

    A child implements `load_head`.
    """

    needs = frozenset({"layer states"})
    keeps_predictions: ClassVar[bool] = False
    reads_last_scores: ClassVar[bool] = False
    reads_scores: ClassVar[bool] = True

    def load_head(self, model: LayerStates) -> StateHead:
        """The head over a model."""
        raise NotImplementedError

    def file_time(self) -> float:
        """When the head's file was written; a head is loaded again after a change."""
        return 0.0

    def open(self, run: OpenRun) -> Drafter:
        """See `DraftSource.open`.

        Raises:
            OptionError: see `load_head`.
            UnsupportedModelError: see `load_head`.
        """
        model = check_states(run, self)
        head = open_once(self, model)
        drafter = EagleDrafter(
            self,
            head,
            state=run.state.declare("state of the head"),
            keys=run.state.declare("keys of the head"),
            values=run.state.declare("values of the head"),
            first=run.state.declare("first column of the head"),
            seen=run.state.declare("states of the last pass"),
            gaps=GapModel(GAPS, run.state.declare("gaps of the head's scores")),
        )
        model.keep_states(True, head.aux_layers, drafter.read_prompt(run))
        return drafter


def check_states(run: OpenRun, source: DraftSource) -> LayerStates:
    """The model of a run; raises UnsupportedModelError unless a head may read its states."""
    model: Any = run.model
    refuse(explain(source, model))
    states: LayerStates = model
    return states


def open_once(source: Any, model: LayerStates) -> Any:
    """What a source loads for a model: once, and again when its file has changed."""
    output = model.output_matrix()
    key = (source, output.data_ptr(), output.dtype, output.device, source.file_time())
    opened = opened_for(model)
    if key not in opened:
        for old in [key for key in opened if isinstance(key[0], type(source))]:
            del opened[old]
        opened[key] = source.load_head(model)
    return opened[key]


@dataclass(frozen=True)
class Eagle(HeadSource):
    """A draft source: an EAGLE head in a folder.

    Args:
        folder: holds `config.json` and `model.safetensors`.
        ids: the tokens that it scores, such as `mmaccel.frequent_ids(texts, 8192)`; the rest of its
            output matrix is not read. None: all that it can. See
            `mmaccel.samplers.drafting.shared_ids`.
    """

    folder: str = within(MISSING, hint="give the folder of a head")
    ids: tuple[int, ...] | None = within(
        None, hint="mmaccel.frequent_ids(texts, n) makes one", repr=False
    )

    has_children = True
    draws_trees = True
    name = "eagle"

    def file_time(self) -> float:
        """See `HeadSource.file_time`."""
        return find_file_time(self.folder)

    def load_head(self, model: LayerStates) -> EagleModel:
        """See `HeadSource.load_head`."""
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


def find_file_time(folder: str) -> float:
    """When the weights in a folder were written; 0 where there are none."""
    file = Path(folder) / FOLDER.weights
    return file.stat().st_mtime if file.is_file() else 0.0


@dataclass(eq=False)
class EagleDrafter(Drafter):
    """Drafts of a head in one run. An entry with the token of column c + 1 stands at column c.

    Args:
        head: the head.
        state: `[B, C]`, that the head has made of the last accepted token.
        keys, values, first: see `HeadCache`.
        seen: `[B, W, F]`, states of the pass before tokens were accepted.
        gaps: how likely ranks are to be right, where noise of slots orders them.
    """

    head: StateHead
    state: Held
    keys: Held
    values: Held
    first: Held
    seen: Held
    gaps: GapModel
    _begun: tuple[HeadCache, Tensor] | None = None  # behind the prompt, until the first step
    _tree: HeadTree | None = None  # of the coming pass

    def read_prompt(self, run: OpenRun) -> PromptReader | None:
        """What reads the states of the prompt; None where rows join later, which begin without."""
        if run.scheduler is not None:
            return None

        def read(entries: Pass, states: Tensor) -> None:
            origin = run.buffer.origin
            rows = run.prompt.batch
            lengths = run.prompt.lengths[:rows]
            columns = entries.indices[:rows] + (origin - lengths)[:, None]
            cache, state = self._begin(run) if self._begun is None else self._begun
            cache = cache._replace(first=origin - lengths)
            after = self._read(run, states[:rows], columns, cache)
            last = origin - 2  # its token is the last one of the prompt
            index = (last - columns[:, 0]).clamp(0, after.shape[1] - 1)
            is_here = (columns == last).any(1, keepdim=True)
            self._begun = cache, _choose(after, index, is_here, state)

        return read

    def propose(self, run: OpenRun) -> Drafts:
        cache, state = self._last(run)
        states = [state[:, None]]
        buffer = run.buffer

        def find_logits(work: Tensor, k: int) -> Tensor:
            run.stats.draft_passes += 1
            if k > 0:
                before = buffer.columns[:, k - 1 : k].clamp(min=1)
                token = work.gather(1, before)
                states.append(self.head(token, states[-1], before - 1, cache))
            # all branches of a guided run say the same
            return self.head.logits(states[-1]).repeat(run.prompt.branches, 1, 1)

        found = draft_in_turn(run, find_logits)
        self._tree = None
        if run.policy.tree is not None and found.tokens is not None and run.width > 1:
            self._tree = HeadTree(
                cast(EagleModel, self.head),  # no other source grows trees
                cache,
                buffer.columns[:, :1] - 1,
                found.tokens[:, :-1],
                torch.cat(states, 1),
                depth=run.width - 1,
            )
        return found

    def children(self, run: OpenRun, paths: Paths, noise: Tensor, *, k: int) -> Children | None:
        """See `Drafter.children`: the head's likeliest tokens, with its confidence.

        With noise of the slots they are in the order in which it prefers them.
        """
        if self._tree is None:
            return None
        scores = self._score(run, paths).log_softmax(-1)
        slots = run.buffer.slots[:, :1] + paths.depths
        k = min(k, scores.shape[2])
        if noise.shape[2] == 1:
            best = scores.topk(k, -1)
            return Children(best.indices, best.values)
        rows = torch.arange(len(scores), device=scores.device)[:, None]
        best = (scores + noise[rows, paths.depths]).topk(k, -1)
        self.gaps.expect(Ranks(best.values, best.indices, paths, run.rows.is_over(slots)))
        return Children(best.indices, self.gaps.log_chances(best.values, paths.depths))

    def distributions(self, run: OpenRun, tokens: Tensor, parents: Tensor, first: int) -> Tensor:
        """See `Drafter.distributions`."""
        paths = TreeEntries(tokens, parents, run.width).paths()
        paths = Paths(paths.tokens[:, first:], paths.depths[:, first:])
        return self._score(run, paths).softmax(-1)

    def observe(self, run: OpenRun, scores: PassScores, noise: Tensor | None) -> None:
        states = cast(LayerStates, run.model).last_states
        assert states is not None
        found = guide(states.float(), run.prompt.branches, run.params.guidance_scale)
        if scores.path is not None:
            rows = torch.arange(len(found), device=found.device)[:, None]
            found = found[rows, scores.path.entries]
        self.seen.hold(found)

    def accepted(self, run: OpenRun, n_new: Tensor) -> None:
        cache, state = self._last(run)
        columns = (run.buffer.columns - 1).clamp(min=0)  # [B, W]
        after = self._read(run, self.seen.get(), columns, cache)
        index = (n_new - 1).clamp(min=0)
        self.state.hold(_choose(after, index, n_new[:, None] > 0, state))
        self.keys.hold(cache.keys)
        self.values.hold(cache.values)
        self.first.hold(cache.first)
        self._begun = None
        self.gaps.accepted(run, n_new)

    def begin_rows(self, run: OpenRun, batch_slots: Tensor) -> None:
        self.gaps.begin_rows(batch_slots)
        state = self.state.value
        if state is not None:
            state[batch_slots] = 0
            self.first.get()[batch_slots] = run.buffer.origin - 1

    def close(self, run: OpenRun) -> None:
        cast(LayerStates, run.model).keep_states(False)

    def _score(self, run: OpenRun, paths: Paths) -> Tensor:
        """Scores `[B, n, V]` of what may follow paths; at temperature 0 before filters, too."""
        assert self._tree is not None
        # all branches of a guided run say the same
        logits = self.head.logits(self._tree.read(paths)).repeat(run.prompt.branches, 1, 1)
        buffer = run.buffer
        slots = buffer.slots[:, :1] + paths.depths
        params = run.params
        score = params.apply if params.temperature else params.to_processed_scores
        return score(
            logits,
            run.prompt.branches,
            buffer.tokens,
            slots + buffer.origin,
            slots,
            run.prompt.layout,
        )

    def _read(self, run: OpenRun, states: Tensor, columns: Tensor, cache: HeadCache) -> Tensor:
        """States `[B, K, C]` after entries with the large model's states `[B, K, F]`."""
        buffer = run.buffer.tokens
        after = (columns + 1).clamp(max=buffer.shape[1] - 1)
        tokens = buffer.gather(1, after).clamp(0, run.vocab_size - 1)
        columns = columns.clamp(max=buffer.shape[1] - 1)
        return self.head(tokens, self.head.enter(states), columns, cache)

    def _last(self, run: OpenRun) -> tuple[HeadCache, Tensor]:
        """The cache, and the state of the last accepted token `[B, C]`."""
        state = self.state.value
        if state is not None:
            return HeadCache(self.keys.get(), self.values.get(), self.first.get()), state
        return self._begin(run) if self._begun is None else self._begun

    def _begin(self, run: OpenRun) -> tuple[HeadCache, Tensor]:
        """As `_last`, where nothing has been read: the last token of the prompt comes first."""
        rows = run.prompt.batch
        cache = self.head.empty_cache(rows, run.buffer.tokens.shape[1])
        first = torch.full_like(cache.first, run.buffer.origin - 1)
        state = cache.keys.new_zeros(rows, self.head.width)
        return cache._replace(first=first), state


def _choose(after: Tensor, index: Tensor, is_new: Tensor, state: Tensor) -> Tensor:
    """The states `[B, K, C]` at `index` `[B]` where `is_new` `[B, 1]`, else `state` `[B, C]`."""
    rows = torch.arange(len(after), device=after.device)
    return torch.where(is_new, after[rows, index], state)
