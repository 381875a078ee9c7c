"""Coarse drafts: between two passes a small model drafts the window anew from left to right.

Parareal (J.-L. Lions, Y. Maday, G. Turinici, "Résolution d'EDP par un schéma en temps pararéel", C.
R. Acad. Sci. 332, 2001) with tokens for time. With the noise fixed, the token of slot j is y_j =
argmax_v (log p_j(v | y_<j) + g_j(v)). A pass evaluates all slots on a guess; scores are stale where
the guess on their left has changed since. A coarse model C, run slot after slot, says what that
changes:

    seen slot:    argmax of stale score + C's scores on the tokens now - C's scores on those seen
    unseen slot:  argmax of gate * scores of the last slot seen + C's scores on the tokens now + g_j

Policies that are exact in distribution record the distribution that the corrected scores describe.

Departures: C corrects the large model's last hidden state instead of its scores, sees the slot's
stale state, and is trained for that, so that the correction has no weight alpha; only the best
`candidates` of the stale scores are corrected.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Self, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.kernels.coarse_rounds import (
    Redrafted,
    SweepSlots,
    coarse_rounds,
    find_hidden,
    share_of,
)
from mmaccel.kernels.coarse_rounds_numpy import Rounds
from mmaccel.kernels.truncation import guide
from mmaccel.samplers.acceptance import one_hot
from mmaccel.samplers.drafting import coarse_rows
from mmaccel.samplers.drafting.coarse_branches import (
    GAPS,
    find_children,
    find_distributions,
    grow_branches,
)
from mmaccel.samplers.drafting.contract import (
    Children,
    Drafter,
    Drafts,
    DraftSource,
    Nodes,
    OpenRun,
    PassScores,
    Paths,
)
from mmaccel.samplers.drafting.gap_model import GapModel
from mmaccel.samplers.drafting.neighbour import Neighbour
from mmaccel.samplers.drafting.states import StateModel
from mmaccel.samplers.trees.entries import TreeEntries

if TYPE_CHECKING:
    from mmaccel.samplers.drafting.coarse_model import CoarseModel
    from mmaccel.samplers.drafting.online import OnlineModel
    from mmaccel.samplers.window.steps import Held

_TABLES = 64  # of neighbours, by lengths of prompt and run
_NEW_SLOTS = Neighbour()  # drafts slots that C has not seen, before it corrects them


class OpenedCoarse:
    """A coarse model C that was opened for a token model; fields as in `Coarse`."""

    def __init__(
        self, model: CoarseModel | OnlineModel, candidates: int = 16, rounds: int | None = None
    ) -> None:
        self.model = model
        self.config = model.config
        self.candidates = candidates
        self.rounds = rounds
        self._tables: tuple[dict[tuple[int, int], Tensor], ...] = ({}, {})  # eager, captured
        with torch.no_grad():
            self.weights = model.sweep_weights()

    @cached_property
    def rounds_on_rows(self) -> Rounds:
        return Rounds(self.weights, self.model.slot_weights())

    def count_rounds(self, n_slots: int) -> int:
        """Rounds of a window: as many as slots are a sweep from left to right."""
        return n_slots if self.rounds is None else min(self.rounds, n_slots)

    def table(self, run: OpenRun) -> Tensor:
        """Columns `[slots, N]` int64 of every slot's neighbours in `CoarseDrafter.pad_tokens`."""
        origin = run.rows.origin
        n_columns = run.rows.tokens.shape[1]
        tables = self._tables[run.runner.is_static]
        table = tables.get((origin, n_columns))
        if table is None:
            index = torch.arange(n_columns - origin, device=run.rows.tokens.device)
            neighbours, exists = self.config.find_neighbours(index)
            columns = neighbours + origin
            # a neighbour that is none is in the last column, which holds no token
            table = torch.where(exists & (columns >= 0), columns, n_columns)
            if len(tables) >= _TABLES and not run.runner.is_static:
                tables.clear()  # prompts and runs of many lengths
            tables[origin, n_columns] = table  # those that captured graphs read stay
        return table


@dataclass(frozen=True)
class CoarseState:
    values: Held  # [B, W, M], the best stale scores of every slot, noise included
    ids: Held  # [B, W, M] int64, their tokens
    scores: Held  # [B, W, V], all stale scores
    neighbours: Held  # [B, W, N] int64, the ids that the pass saw
    states: Held  # [B, W, D], of the pass
    prompts: Held  # [B, D], states of slot 0; on the host [B, H], what C makes of them
    first: Held  # [B, 1] int64, the first slot of the pass
    end: Held  # [B, 1] int64, its last slot
    last: Held  # [B, V], scores of the last slot
    coming: Held  # [B, W, N] int64, on the host the ids that the coming pass will see


@dataclass(eq=False)
class CoarseDrafter(Drafter):
    opened: OpenedCoarse
    freezes_noise: bool  # nobody asks for the distribution of drafts
    state: CoarseState
    on_host: bool  # few rows are drafted on a CPU, see `coarse_rows`
    gaps: GapModel  # how likely ranks are to be right, where a pass verifies a tree

    @classmethod
    def begin(cls, source: DraftSource, run: OpenRun, opened: OpenedCoarse) -> Self:
        """A drafter of a run whose model, a `StateModel`, keeps its states from now on."""
        cast(StateModel, run.model).keep_states(True)
        state = run.steps.declare_fields(CoarseState)
        is_tree = run.policy.tree is not None  # whose branches are swept all at once
        on_host = not is_tree and run.backend.choose(False, True)
        gaps = GapModel(GAPS, run.steps.declare("gaps of coarse scores"))
        return cls(source, opened, run.policy.freezes_noise, state, on_host, gaps)

    def close(self, run: OpenRun) -> None:
        cast(StateModel, run.model).keep_states(False)

    @property
    def weights(self) -> object:
        return self.opened

    def propose(self, run: OpenRun) -> Drafts:
        return _NEW_SLOTS.propose(run.frontier())

    @torch.no_grad()
    def correct(
        self, run: OpenRun, drafts: Tensor, noise: Tensor, distribution: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Given the slots on its left, a draft is distributed as the softmax of its corrected
        scores: the noise of a slot has no part in any slot before it.
        """
        if self.on_host:
            return coarse_rows.redraft(self, run, drafts, noise, distribution)
        slots = self.sweep_slots(run, noise)
        if slots is None:
            return drafts, distribution
        n_corrected = slots.ids.shape[-1]
        if distribution is not None:
            n_corrected -= 1  # without the best of all others
        corrected, now = self.make_drafts(run, slots, self.pad_tokens(run), n_corrected)
        run.rows.tokens.scatter_(1, slots.columns, corrected)
        if distribution is None:
            return corrected, None
        is_kept = slots.is_fixed | (slots.is_seen & (now == slots.seen).all(-1))
        if run.params.temperature == 0:
            p_corrected = one_hot(corrected, run.vocab_size)
        else:
            index = torch.arange(drafts.shape[1], device=drafts.device).expand_as(drafts)
            p_corrected = self.find_scores(run, slots, now, index).softmax(-1)
        return corrected, torch.where(is_kept[..., None], distribution, p_corrected)

    def branch(
        self, run: OpenRun, drafts: Tensor, noise: Tensor, *, n_branches: int, length: int
    ) -> Nodes | None:
        return grow_branches(self, run, drafts, noise, n=n_branches, length=length)

    def children(self, run: OpenRun, paths: Paths, noise: Tensor, *, k: int) -> Children | None:
        """Cost: as a sweep's of as many slots, but all at once."""
        return find_children(self, run, paths, noise, k)

    def distributions(self, run: OpenRun, tokens: Tensor, parents: Tensor, first: int) -> Tensor:
        paths = TreeEntries(tokens, parents, run.width).paths()
        return find_distributions(
            self, run, Paths(paths.tokens[:, first:], paths.depths[:, first:])
        )

    def observe(self, run: OpenRun, scores: PassScores, noise: Tensor | None) -> None:
        """Candidates are the best stale scores; where distributions are asked for the most likely
        tokens, the last being the best of all others, whose scores are not corrected.
        """
        assert noise is not None
        if self.on_host:
            coarse_rows.record(self, run, scores)
            return
        perturbed = scores.window + noise
        n_ids = perturbed.shape[-1]
        if self.freezes_noise:
            best = perturbed.topk(min(self.opened.candidates, n_ids), -1)
            self._record(run, best.values, best.indices, scores)
            return
        likely = scores.window.topk(min(self.opened.candidates, n_ids - 1), -1).indices
        rest = perturbed.scatter(-1, likely, float("-inf")).max(-1, keepdim=True)
        values = torch.cat([perturbed.gather(-1, likely), rest.values], -1)
        self.state.scores.hold(scores.window)  # probabilities of zero would forget theirs
        self._record(run, values, torch.cat([likely, rest.indices], -1), scores)

    @torch.no_grad()
    def accepted(self, run: OpenRun, n_new: Tensor) -> None:
        self.gaps.accepted(run, n_new)

    def begin_rows(self, run: OpenRun, batch_slots: Tensor) -> None:
        """What a pass said is not read before a row's first one."""
        self.gaps.begin_rows(batch_slots)

    def find_scores(self, run: OpenRun, slots: SweepSlots, now: Tensor, index: Tensor) -> Tensor:
        """Corrected scores `[B, n, V]` without noise of draft slots `index`; `now` `[B, n, N]`."""
        ids = slots.ids[..., :-1]
        rows = torch.arange(len(ids), device=ids.device)[:, None]
        moved, fresh = self.find_changes(run, slots, ids, now)
        stale = self._stale_scores(run)[rows, index]
        seen = stale.scatter(2, ids, stale.gather(2, ids) + moved)
        fresh = _mask(run, fresh, run.rows.slots[:, :1] + index)
        return torch.where(slots.is_seen[..., None], seen, fresh)

    def find_changes(
        self, run: OpenRun, slots: SweepSlots, ids: Tensor, now: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Added to stale scores of `ids` `[B, n, M]`; and scores `[B, n, V]` of new slots."""
        weights = self.opened.weights
        hidden = find_hidden(weights, now, slots.base)
        change = (hidden - slots.hidden_seen)[..., None]
        moved = (weights.head[ids] @ change)[..., 0] * _scale(run)  # [B, n, M]
        fresh = (hidden @ weights.head.T + weights.head_bias) * _scale(run)
        return moved, fresh + share_of(slots.last[:, None], slots.gates[..., None])

    def _record(self, run: OpenRun, values: Tensor, ids: Tensor, scores: PassScores) -> None:
        state = self.state
        slots = run.rows.slots
        path = scores.path
        states = self.guided_states(run)
        prompts = state.prompts.value
        if path is not None:
            rows = torch.arange(len(states), device=states.device)[:, None]
            states = states[rows, path.entries]
        prompt = states[:, 0]
        if prompts is not None:
            prompt = torch.where(slots[:, :1] == 0, prompt, prompts)
        state.prompts.hold(prompt)
        _hold_window(run, state.values, values)
        _hold_window(run, state.ids, ids)
        neighbours = self._neighbours(run, slots)
        seen = _gather(self.pad_tokens(run), neighbours)
        if path is not None:
            of_branch = _gather(self._pad(path.tokens), neighbours)
            seen = torch.where(path.is_branch[..., None], of_branch, seen)
        self.hold_pass(run, seen, states, scores.last)

    def guided_states(self, run: OpenRun) -> Tensor:
        """States `[B, W, D]` float32 of the guided logits: guidance is linear in both."""
        states = cast(StateModel, run.model).last_states
        assert states is not None
        return guide(states.detach().float(), run.prompt.branches, run.params.guidance_scale)

    def hold_pass(self, run: OpenRun, seen: Tensor, states: Tensor, last: Tensor) -> None:
        """Keep a pass's ids `[B, W, N]`, its states and its last slot's scores `[B, V]`."""
        slots = run.rows.slots
        _hold_window(run, self.state.neighbours, seen)
        _hold_window(run, self.state.states, states)
        self.state.first.hold(slots[:, :1])
        self.state.end.hold(slots[:, -1:])
        self.state.last.hold(last)

    def pad_tokens(self, run: OpenRun) -> Tensor:
        """`[B, N + 1]` int64, the token buffer; V for padding and in the last column."""
        return self._pad(run.rows.tokens)

    def _pad(self, tokens: Tensor) -> Tensor:
        n_ids = self.opened.config.vocab_size
        tokens = F.pad(tokens, (0, 1), value=n_ids)
        return tokens.masked_fill((tokens < 0) | (tokens > n_ids), n_ids)

    def _neighbours(self, run: OpenRun, slots: Tensor) -> Tensor:
        return self.opened.table(run)[slots]

    def sweep_slots(self, run: OpenRun, noise: Tensor) -> SweepSlots | None:
        """What the next sweep knows; None before the first pass and for a window of one slot."""
        held = self.state
        model = self.opened.model
        rows = run.rows
        slots = rows.slots[:, :-1]
        if held.values.value is None or not slots.shape[1] or run.is_retry:
            return None
        values = held.values.get()
        ids = held.ids.get()
        states = held.states.get()
        seen = held.neighbours.get()
        prompts = held.prompts.get()
        first = held.first.get()
        last = held.end.get()  # slots of the last pass
        is_seen = rows.is_predicted()
        distances = (slots - last).masked_fill(is_seen, 0).clamp(min=0)
        # the window's slots among those of the last pass; new ones get its last
        at = slots.clamp(first, last) - first
        row = torch.arange(len(at), device=at.device)[:, None]
        base = model.base(slots, distances, states[row, at], prompts[:, None])
        seen = seen[row, at]
        ids = ids[row, at]
        values = values[row, at]
        is_fixed = (rows.n_generated == 0)[:, None] | rows.is_over(slots)
        if not model.drafts_new_slots:
            is_fixed = is_fixed | ~is_seen
        forced = rows.forced()
        if forced is not None:
            is_fixed = is_fixed | (forced >= 0)
        last_scores = held.last.get()
        gates = model.gate(distances)[..., 0] * _scale(run)
        noise = _mask(run, noise.expand(*slots.shape, last_scores.shape[1]), slots)
        return SweepSlots(
            rows.columns[:, :-1],
            self._neighbours(run, slots),
            is_seen,
            is_fixed,
            seen,
            base,
            find_hidden(self.opened.weights, seen, base),
            ids,
            values,
            last_scores,
            gates,
            noise,
        )

    def _stale_scores(self, run: OpenRun) -> Tensor:
        """`[B, W-1, V]`, the last pass's scores of the window's slots; meaningless for new ones."""
        scores = self.state.scores.get()
        first = self.state.first.get()
        at = (run.rows.slots[:, :-1] - first).clamp(0, scores.shape[1] - 1)
        rows = torch.arange(len(at), device=at.device)[:, None]
        return scores[rows, at]

    def make_drafts(
        self, run: OpenRun, slots: SweepSlots, work: Tensor, n_corrected: int
    ) -> Redrafted:
        """Drafts `[B, K]` of slots, written into `work`; see `coarse_rounds`."""
        rounds = self.opened.count_rounds(slots.columns.shape[1])
        weights, scale = self.opened.weights, _scale(run)
        return run.backend.run(coarse_rounds, weights, slots, work, scale, n_corrected, rounds)


def _hold_window(run: OpenRun, held: Held, value: Tensor) -> None:
    """Hold `[B, W, ...]` with zeros up to the widest window, as a held tensor has one shape."""
    missing = run.chooser.widest - value.shape[1]
    held.hold(F.pad(value, (0, 0, 0, missing)) if missing else value)


def _scale(run: OpenRun) -> float:
    return 1.0 / (run.params.temperature or 1.0)


def _mask(run: OpenRun, scores: Tensor, slots: Tensor) -> Tensor:
    """Scores `[B, K, V]` of slots `[B, K]`, -inf where the layout allows no token."""
    layout = run.prompt.layout
    allowed = None if layout is None else layout.allowed(slots)
    return scores if allowed is None else scores.masked_fill(~allowed, float("-inf"))


def _gather(work: Tensor, index: Tensor) -> Tensor:
    return work.gather(1, index.flatten(1)).view(index.shape)
