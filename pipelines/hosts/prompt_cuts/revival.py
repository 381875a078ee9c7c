"""Methods that revive: every token decides anew which tokens of the prompt it is computed on.

In front of each of the method's layers, tokens that the present one does not choose leave its step;
the auxiliary cache holds the state that each has there. A later step that chooses one takes this
state and computes it in the layers behind, beside its own token: every token goes through every
layer at most once, computed as had it stayed.

In a window of drafts every entry chooses for itself. What several miss is computed for the first of
them; what was revived for entries that were not accepted counts as never computed. So what a token
is computed on follows from accepted tokens alone.

Source: Q. Fu et al., "LazyLLM" (arXiv:2407.14057), sections 3.2 and 3.3; the method is in
`mmaccel.reduction.visual_tokens.lazy_llm`.

Departures: a revived token attends, in the step that revives it, to what this step attends to up to
its own position. Keys and values have room for all tokens in all layers: computation is saved, and
no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.pipelines.hosts.causal_lm.own_prompt import count_columns
from mmaccel.pipelines.hosts.layers.store import KVCacheLayout
from mmaccel.pipelines.hosts.prompt_cuts.columns import ChosenColumns, take_places, take_states
from mmaccel.pipelines.hosts.prompt_cuts.layers import DecoderLayers, LayerAnswer, PromptCuts
from mmaccel.results import Stats

_NEVER = 2**62  # beyond all cache indices
_PROMPT = -1


class AuxiliaryCache:
    """The tokens of a prompt that may leave, numbered from 0 in each row (N, of the row with most:
    padding), and the states of those that one of the method's S layers has dropped.
    """

    def __init__(self, index: Tensor, valid: Tensor, stages: int) -> None:
        self.index, self.valid = index, valid  # [B, N], cache indices of the tokens
        # [S, B, N], the cache index of the token for which a token was computed behind each of the
        # method's layers: _PROMPT in the prompt's pass, _NEVER where it was not. Whoever is
        # computed behind a layer was so behind those before it
        self.since = torch.full_like(index, _NEVER).repeat(stages, 1, 1)
        # [B, N + 1, D] of each of the method's layers: states in front of it, of the tokens that
        # the layers before it have computed
        self.states: list[Tensor] = []
        self.places: dict[str, Any] = {}  # positions of the N + 1 tokens, see `take_places`

    @property
    def n_tokens(self) -> int:
        """N."""
        return self.index.shape[1]

    def hold(self, stage: int, numbers: Tensor, states: Tensor) -> None:
        """Write the states `[B, n, D]` of the tokens `numbers` `[B, n]` in front of a layer."""
        if stage == len(self.states):
            self.states.append(states.new_zeros(len(states), self.n_tokens + 1, states.shape[2]))
        self.states[stage].scatter_(1, numbers[..., None].expand_as(states), states)

    def note_prompt(self, stage: int, numbers: Tensor) -> None:
        """Note that the prompt's pass computes the tokens `numbers` `[B, n]` behind a layer."""
        since = pad(self.since[stage], (0, 1))
        self.since[stage] = since.scatter_(1, numbers, _PROMPT)[:, :-1]

    def note_choices(self, stage: int, chosen: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Note what entries at `positions` `[B, W]` choose, `chosen` `[B, W, N]` bool, behind a
        layer. Returns `[B, n]` int64 each: tokens to compute behind it, and the first entry that
        chooses them.
        """
        missing = chosen & (self.since[stage] == _NEVER)[:, None]  # [B, W, N]
        is_missing = missing.any(1)
        entry = missing.long().argmax(1)  # [B, N], the first that misses each
        asked = positions.gather(1, entry)
        self.since[stage] = asked.where(is_missing, self.since[stage])
        columns = ChosenColumns.of(is_missing)
        numbers = columns.index.where(columns.valid, self.n_tokens)
        return numbers, pad(entry, (0, 1)).gather(1, numbers)

    def forget(self, start: Tensor) -> None:
        """Go back to where nothing was computed for tokens from cache indices `start` `[B]` on."""
        self.since.masked_fill_(self.since >= start[:, None], _NEVER)

    @property
    def is_computed(self) -> Tensor:
        """`[S, B, N]` bool, what was computed behind each of the method's layers."""
        return (self.since != _NEVER) & self.valid

    @property
    def is_revived(self) -> Tensor:
        """`[S, B, N]` bool, what a later step than the prompt's pass has computed of these."""
        return self.is_computed & (self.since != _PROMPT)


class RevivingCuts(PromptCuts):
    """The prompt's pass of a call with a method that revives, and its later passes."""

    has_holes: ClassVar[bool] = True

    def __init__(self, layers: DecoderLayers) -> None:
        super().__init__(layers)
        self._prompt = ChosenColumns.of(layers.may_leave)
        self._numbers = (layers.may_leave.cumsum(1) - 1).clamp(min=0)  # [B, T]
        index = count_columns(layers.mask).gather(1, self._prompt.index)
        self._tokens = AuxiliaryCache(index, self._prompt.valid, len(layers.before))

    @property
    def steps(self) -> RevivingCuts:
        return self

    def choose(
        self, layers: DecoderLayers, index: int, hidden: Tensor, given: dict[str, Any]
    ) -> Tensor:
        """As `PromptCuts`; what is dropped is held."""
        tokens = self._tokens
        stage = layers.before.index(index)
        leaving = ChosenColumns.of(self._may_leave)
        if stage == 0:
            tokens.places = take_places(given, pad(self._prompt.index, (0, 1)))
        tokens.hold(stage, self._find_numbers(leaving), leaving.take(hidden))
        hidden = super().choose(layers, index, hidden, given)
        tokens.note_prompt(stage, self._find_numbers(ChosenColumns.of(self._may_leave)))
        return hidden

    def _find_numbers(self, leaving: ChosenColumns) -> Tensor:
        """`[B, n]` of columns of the prompt as the last cut left it."""
        columns = self._columns.gather(1, leaving.index)
        return self._numbers.gather(1, columns).where(leaving.valid, self._tokens.n_tokens)

    @contextmanager
    def passing(self, positions: Tensor, layout: KVCacheLayout) -> Iterator[None]:
        """Inside the block, a pass over entries at cache indices `positions` `[B, W]`."""
        with self.layers.passing(_Step(positions, layout, self._tokens)):
            yield

    def describe(self) -> str:
        said = super().describe()
        return f"{said}, at every step" if said else ""

    def record(self, stats: Stats) -> None:
        if not self.cuts:
            return
        layers = self.layers
        n_tokens = int(layers.mask.sum())
        n_stay = n_tokens - int(layers.n_leaving.sum())
        whole = n_tokens * layers.depth
        # tokens times layers: all up to the first cut, those that stay behind it, and of the
        # others as many layers as lie between the cut that they passed and the next one
        first = torch.tensor([*layers.before, layers.depth], dtype=torch.int64)
        passed, revived = (
            int((tokens.sum((1, 2)).cpu() * first.diff()).sum())
            for tokens in (self._tokens.is_computed, self._tokens.is_revived)
        )
        computed = n_tokens * layers.before[0] + n_stay * (layers.depth - layers.before[0]) + passed
        n_revived = int(self._tokens.is_revived.any(0).sum())
        stats.notes.append(
            f"{layers.leaving.slot}: {n_revived} tokens were revived by later steps; {computed} of "
            f"{whole} layers of the prompt's tokens were computed, {revived} of them so"
        )


class _Step(LayerAnswer):
    """One pass over W entries a row, at cache indices `positions` `[B, W]` int64."""

    def __init__(self, positions: Tensor, layout: KVCacheLayout, tokens: AuxiliaryCache) -> None:
        self._positions, self._layout, self._tokens = positions, layout, tokens
        tokens.forget(positions[:, 0])  # what comes from there on was not accepted
        self.n_last = positions.shape[1]
        # in the present layer: [B, W, N] bool, what each entry attends to of the tokens; [B, n]
        # int64, numbers of those that it computes; and its arguments
        self.active = tokens.valid[:, None].expand(-1, self.n_last, -1)
        self.revived = tokens.index[:, :0]
        self.given: dict[str, Any] = {}

    def choose(
        self, layers: DecoderLayers, index: int, hidden: Tensor, given: dict[str, Any]
    ) -> Tensor:
        """The states `[B, n + W, D]` of the tokens that come back, and of the entries."""
        tokens = self._tokens
        stage = layers.before.index(index)
        n_revived = self.revived.shape[1]
        if n_revived:  # they have come up to here
            tokens.hold(stage, self.revived, hidden[:, :n_revived])
        states = tokens.states[stage][:, :-1]
        chosen = []
        for entry in range(self.n_last):
            column = n_revived + entry
            is_own = torch.zeros(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
            is_own[:, column] = True
            active = ChosenColumns(tokens.index, self.active[:, entry])
            plan = layers.plan(index, active, is_own, states, hidden, column)
            chosen.append(plan.assign >= 0)
        return self._compute(torch.stack(chosen, 1), stage, hidden[:, n_revived:], given)

    def arguments(self, given: dict[str, Any], hidden: Tensor) -> dict[str, Any]:
        return {**given, **self.given}

    def _compute(
        self, chosen: Tensor, stage: int, entries: Tensor, given: dict[str, Any]
    ) -> Tensor:
        """Layers behind a choice `[B, W, N]` bool: the states `[B, n + W, D]` they compute."""
        tokens = self._tokens
        layout = self._layout
        self.active = chosen
        self.revived, entry = tokens.note_choices(stage, chosen, self._positions)

        scratch = layout.max_length - 1  # where padding writes
        at = pad(tokens.index, (0, 1), value=scratch).gather(1, self.revived)
        at = torch.cat([at, self._positions], 1)
        layout.prepare(at, layout.visible_length)
        for_entry = chosen.gather(1, entry[..., None].expand(-1, -1, tokens.n_tokens))
        sees = torch.cat([for_entry, chosen], 1)  # [B, n + W, N]
        self.given = {"attention_mask": self._make_mask(at, sees, entries.dtype)}
        back = take_places(tokens.places, self.revived)
        ids = given.get("position_ids")  # some models give none in a step
        if ids is not None and "position_ids" in back:
            revived = back["position_ids"]
            ids = torch.cat([revived, ids.expand(*revived.shape[:-1], -1)], -1)
        self.given["position_ids"] = ids
        if "position_embeddings" in back:
            self.given["position_embeddings"] = tuple(
                torch.cat([revived, new.expand(len(revived), -1, -1)], 1)
                for revived, new in zip(back["position_embeddings"], given["position_embeddings"])
            )
        revived = take_states(tokens.states[stage], self.revived)
        return torch.cat([revived, entries], 1)

    def _make_mask(self, at: Tensor, sees: Tensor, dtype: torch.dtype) -> Tensor:
        """`[B, 1, n + W, S]`: cache indices up to a token's own, but those that it dropped."""
        tokens = self._tokens
        layout = self._layout
        shape = (*at.shape, layout.max_length)
        dropped = torch.zeros(shape, dtype=torch.bool, device=at.device)
        index = tokens.index[:, None].expand_as(sees)
        dropped.scatter_(2, index, tokens.valid[:, None] & ~sees)
        keys = torch.arange(layout.visible_length, device=at.device)
        # [B, n + W, S]: what comes later, and what the entry left out
        hidden = (keys > at[..., None]) | dropped[..., : layout.visible_length]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=at.device)
        return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]
