"""Methods that revive: every token decides anew which visual tokens it is computed on.

In front of each of the method's layers, the visual tokens that the present token does not choose
leave its step: later layers attend to the others, and the auxiliary cache holds the state that a
dropped token has there. A later step that chooses such a token takes this state, and computes the
token in the layers behind, beside its own new token. So every token goes through every layer at
most once, and one that is revived is computed as it would have been had it stayed.

A step is one committed token a row. A window of drafts would revive what wrong drafts ask for, and
later tokens would depend on drafts; so only `Autoregressive` decodes such a model, and the plain
loop is its own.

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

from mmaccel.pipelines.causal_lm.own_prompt import count_columns
from mmaccel.pipelines.layers.store import KVCacheLayout
from mmaccel.pipelines.vision_language.columns import ChosenColumns
from mmaccel.pipelines.vision_language.layers import DecoderLayers, LayerAnswer, PromptCuts
from mmaccel.results import Stats


class AuxiliaryCache:
    """The visual tokens of a prompt and the states of those that a layer has dropped.

    The tokens of a row are numbered from 0 on; number N, of the row with most, is padding.

    Args:
        index: `[B, N]` int64, their cache indices.
        valid: `[B, N]` bool.

    Attributes:
        level: `[B, N]` int64, at how many of the method's layers a token was chosen, in any step:
            it has keys and values in the layers before the next one.
        states: `[B, N + 1, D]`, a token's state in front of that layer.
        places: embeddings of positions, `[B, N + 1, D]` each.
    """

    def __init__(self, index: Tensor, valid: Tensor) -> None:
        self.index, self.valid = index, valid
        self.level = torch.zeros_like(index)
        self.states: Tensor | None = None
        self.places: tuple[Tensor, ...] = ()

    @property
    def n_tokens(self) -> int:
        """N."""
        return self.index.shape[1]

    def hold(self, numbers: Tensor, states: Tensor) -> None:
        """Write the states `[B, n, D]` of the tokens `numbers` `[B, n]`."""
        if self.states is None:
            self.states = states.new_zeros(len(states), self.n_tokens + 1, states.shape[2])
        self.states.scatter_(1, numbers[..., None].expand_as(states), states)

    def advance(self, chosen: Tensor, level: int) -> Tensor:
        """Note a choice at one of the method's layers.

        Args:
            chosen: `[B, N]` bool.
            level: of that layer, from 1 on.

        Returns:
            `[B, n]` int64, numbers of the tokens that the layers behind it have to compute.
        """
        missing = chosen & (self.level == level - 1)
        self.level = self.level + missing
        columns = ChosenColumns.of(missing)
        return columns.index.where(columns.valid, self.n_tokens)


class RevivingCuts(PromptCuts):
    """The prompt's pass of a call with a method that revives, and its later passes.

    Args:
        layers: of the call.

    Attributes:
        n_revived: `[]` int64, how many tokens were computed again beside new ones, summed over
            passes.
    """

    has_holes: ClassVar[bool] = True

    def __init__(self, layers: DecoderLayers) -> None:
        super().__init__(layers)
        self._prompt = ChosenColumns.of(layers.is_visual)
        self._numbers = (layers.is_visual.cumsum(1) - 1).clamp(min=0)  # [B, T]
        index = count_columns(layers.mask).gather(1, self._prompt.index)
        self._tokens = AuxiliaryCache(index, self._prompt.valid)
        self.n_revived = layers.n_visual.new_zeros(())

    @property
    def steps(self) -> RevivingCuts:
        """This object: the passes look into the cache that the prompt's pass has filled."""
        return self

    def choose(
        self, layers: DecoderLayers, index: int, hidden: Tensor, given: dict[str, Any]
    ) -> Tensor:
        """As `PromptCuts`; what is dropped is held."""
        tokens = self._tokens
        visual = ChosenColumns.of(self._is_visual)
        if not tokens.places:
            tokens.places = tuple(
                pad(self._prompt.take(values.expand(len(hidden), -1, -1)), (0, 0, 0, 1))
                for values in given["position_embeddings"]
            )
        tokens.hold(self._find_numbers(visual), visual.take(hidden))
        hidden = super().choose(layers, index, hidden, given)
        numbers = self._find_numbers(ChosenColumns.of(self._is_visual))
        chosen = torch.zeros_like(pad(tokens.valid, (0, 1))).scatter_(1, numbers, True)[:, :-1]
        tokens.advance(chosen, layers.before.index(index) + 1)
        return hidden

    def _find_numbers(self, visual: ChosenColumns) -> Tensor:
        """`[B, n]` of columns of the prompt as the last cut left it."""
        columns = self._columns.gather(1, visual.index)
        return self._numbers.gather(1, columns).where(visual.valid, self._tokens.n_tokens)

    @contextmanager
    def passing(self, positions: Tensor, layout: KVCacheLayout) -> Iterator[None]:
        assert positions.shape[1] == 1, "a step is one token"
        step = _Step(positions, layout, self._tokens)
        with self.layers.passing(step):
            yield
        self.n_revived += step.is_revived.sum()

    def describe(self) -> str:
        found = super().describe()
        return f"{found}, at every step" if found else ""

    def record(self, stats: Stats) -> None:
        """How many tokens came back."""
        count = int(self.n_revived)
        stats.notes.append(f"visual_tokens: {count} tokens were revived by later steps")


class _Step(LayerAnswer):
    """One pass over a new token a row.

    Args:
        positions: `[B, 1]` int64, cache indices of the new tokens.
        layout: of the caches.
        tokens: the visual ones.

    Attributes:
        active: `[B, N]` bool, visual tokens that the present layer attends to.
        revived: `[B, n]` int64, numbers of those that the present layer computes.
        is_revived: `[B, N]` bool, those that some layer of this pass computed.
        given: arguments of the present layer.
    """

    only_last: ClassVar[bool] = True  # the model's head reads the new tokens alone

    def __init__(self, positions: Tensor, layout: KVCacheLayout, tokens: AuxiliaryCache) -> None:
        self._positions, self._layout, self._tokens = positions, layout, tokens
        self.active = tokens.valid
        self.revived = tokens.index[:, :0]
        self.is_revived = torch.zeros_like(tokens.valid)
        self.given: dict[str, Any] = {}

    def choose(
        self, layers: DecoderLayers, index: int, hidden: Tensor, given: dict[str, Any]
    ) -> Tensor:
        """The states `[B, n + 1, D]` of the tokens that come back, and of the new one."""
        tokens = self._tokens
        tokens.hold(self.revived, hidden[:, :-1])  # they are not computed any more
        assert tokens.states is not None
        is_new = torch.zeros(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        is_new[:, -1] = True
        active = ChosenColumns(tokens.index, self.active)
        plan = layers.plan(index, active, is_new, tokens.states[:, :-1], hidden)
        level = layers.before.index(index) + 1
        return self._compute(plan.assign >= 0, level, hidden, given)

    def arguments(self, given: dict[str, Any], hidden: Tensor) -> dict[str, Any]:
        """Masks and positions of these tokens."""
        return {**given, **self.given}

    def _compute(self, chosen: Tensor, level: int, hidden: Tensor, given: dict[str, Any]) -> Tensor:
        """Layers behind a choice: the states `[B, n + 1, D]` of what they compute."""
        tokens = self._tokens
        layout = self._layout
        assert tokens.states is not None
        self.active = chosen
        self.revived = tokens.advance(chosen, level)
        marks = pad(self.is_revived, (0, 1)).scatter_(1, self.revived, True)
        self.is_revived = marks[:, :-1]

        def beside(values: Tensor, own: Tensor) -> Tensor:
            """`[B, n + 1, D]`: of revived tokens, then of the new one."""
            index = self.revived[..., None].expand(-1, -1, values.shape[2])
            return torch.cat([values.gather(1, index), own.expand(len(values), -1, -1)], 1)

        scratch = layout.max_length - 1  # where padding writes
        at = pad(tokens.index, (0, 1), value=scratch).gather(1, self.revived)
        at = torch.cat([at, self._positions], 1)
        layout.prepare(at, layout.visible_length)
        embeddings = given["position_embeddings"]
        self.given = {
            "attention_mask": self._make_mask(at, hidden.dtype),
            "position_embeddings": tuple(map(beside, tokens.places, embeddings)),
            "position_ids": None,
        }
        return beside(tokens.states, hidden[:, -1:])

    def _make_mask(self, at: Tensor, dtype: torch.dtype) -> Tensor:
        """`[B, 1, n + 1, S]`: cache indices up to a token's own, but those that are not active."""
        tokens = self._tokens
        layout = self._layout
        dropped = torch.zeros(len(at), layout.max_length, dtype=torch.bool, device=at.device)
        dropped.scatter_(1, tokens.index, tokens.valid & ~self.active)
        keys = torch.arange(layout.visible_length, device=at.device)
        hidden = (keys > at[..., None]) | dropped[:, None, : layout.visible_length]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=at.device)
        return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]
