"""Methods inside the language model: one executor, and what a method does in a pass.

`DecoderLayers` owns the hooks in front of the decoder's layers. In front of a method's layer it
hands a pass's `LayerAnswer` the states that the layer would receive; what the answer returns goes
on. The answers are: later layers compute fewer columns of a prompt (`PromptCuts`), the pass ends
here (`recall`), a step computes tokens that earlier ones dropped (`revival`). What methods ask of
attention is computed from the queries and keys of the layer before, for the queries they ask for.

Departures from the methods' own code: rows of a batch have counts of their own and are padded on
the left again; kept tokens stay in order, at the positions they had.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from mmaccel.pipelines.causal_lm.own_prompt import Cut
from mmaccel.pipelines.generate_call import GenerateCall
from mmaccel.pipelines.layers.attention import watched
from mmaccel.pipelines.vision_language.columns import (
    ChosenColumns,
    order_columns,
    shorten_mask,
    split_rows,
    take_columns,
    take_states,
)
from mmaccel.pipelines.vision_language.layer_attention import LayerAttention, NotedLayers
from mmaccel.pipelines.vision_language.visuals import find_columns
from mmaccel.reduction.visual_tokens import budgets
from mmaccel.reduction.visual_tokens.contract import TokenReducer
from mmaccel.reduction.visual_tokens.plan import Plan
from mmaccel.results import Stats

if TYPE_CHECKING:
    from mmaccel.pipelines.vision_language.revival import RevivingCuts


class PassEndedError(Exception):
    """Ends a pass in front of a layer; `DecoderLayers.passing` catches it."""


class LayerAnswer:
    """What one pass does in front of the decoder's layers, from a method's first one on.

    Attributes:
        only_last: whether the model's head reads the last column alone.
    """

    only_last: ClassVar[bool] = False

    def choose(
        self, layers: DecoderLayers, index: int, hidden: Tensor, given: dict[str, Any]
    ) -> Tensor:
        """In front of one of the method's layers: the states that it computes.

        Args:
            layers: ask the method, see `DecoderLayers.plan`.
            hidden: `[B, T', D]`, of the columns that the layers before computed.
            given: the layer's other arguments, of all columns of the pass.

        Raises:
            PassEndedError: the pass ends here.
        """
        raise NotImplementedError

    def arguments(self, given: dict[str, Any], hidden: Tensor) -> dict[str, Any]:
        """In front of every layer: its other arguments, of the columns of `hidden`."""
        return given


class DecoderLayers:
    """The layers of a call's language model under a method.

    Args:
        call: the call.
        method: of the stage "llm_layer".
        seeds: of its rows, for methods that draw.

    Attributes:
        before: the layers in front of which the method is asked.
        mask: `[B, T]` bool, columns of the prompt that are attended to.
        is_visual: `[B, T]` bool, the visual ones of these.
    """

    def __init__(self, call: GenerateCall, method: TokenReducer, seeds: Sequence[int]) -> None:
        self._model = call.model
        self._method = method
        self._layers = list(call.model.get_decoder().layers)
        self.before = method.layers_of(len(self._layers))
        self.mask, self.is_visual = find_columns(call)
        self._seeds = torch.tensor(
            [seed % 2**63 for seed in seeds], device=self.mask.device, dtype=torch.int64
        )
        self._noted = NotedLayers(frozenset())

    @property
    def n_visual(self) -> Tensor:
        """`[B]` int64, visual tokens of the prompt."""
        return self.is_visual.sum(1)

    @property
    def drops_some(self) -> bool:
        """Whether the method's `keep` drops a visual token of some row."""
        counts = self.n_visual
        left = budgets.uniform(counts, self._method.keep, self._method.n_keep)
        return bool((left < counts).any())

    @contextmanager
    def passing(self, answer: LayerAnswer) -> Iterator[None]:
        """Inside the block, the model's passes do what an answer says."""
        self._noted = NotedLayers.asked_by(self._method, self.before)
        try:
            with ExitStack() as stack:
                stack.enter_context(watched(self._model, self._noted.watchers))
                for index in range(self.before[0], len(self._layers)):
                    hook = partial(self._enter, answer, index)
                    layer = self._layers[index]
                    handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
                    stack.callback(handle.remove)
                if answer.only_last:
                    handle = self._layers[-1].register_forward_hook(_take_last)
                    stack.callback(handle.remove)
                yield
        except PassEndedError:
            pass
        finally:
            self._noted.layers.clear()

    def plan(
        self, index: int, visual: ChosenColumns, is_text: Tensor, x: Tensor, hidden: Tensor
    ) -> Plan:
        """What the method keeps in front of a layer.

        Args:
            visual: the keys of visual tokens, in the layer before.
            is_text: `[B, T']` bool, the columns of text.
            x: `[B, N, D]`, states of the visual tokens.
            hidden: `[B, T', D]`, states of all columns.
        """
        attention = LayerAttention(self._noted, visual, is_text, index)
        return self._method.plan(
            attention.open_context(
                x,
                hidden,
                initial=self.n_visual,
                seed=self._seeds,
                depth=len(self._layers),
            )
        )

    def _enter(
        self,
        answer: LayerAnswer,
        index: int,
        _layer: Any,
        args: tuple[Any, ...],
        given: dict[str, Any],
    ) -> Any:
        """The hook in front of a layer."""
        hidden = args[0]
        if index in self.before:
            hidden = answer.choose(self, index, hidden, given)
        return (hidden, *args[1:]), answer.arguments(given, hidden)


def _take_last(_layer: Any, _given: tuple[Any, ...], made: Any) -> Any:
    """What a layer gives out, of the last column; some give out a tuple."""
    return (made[0][:, -1:], *made[1:]) if isinstance(made, tuple) else made[:, -1:]


class PromptCuts(LayerAnswer):
    """A prompt's pass whose later layers compute fewer visual tokens.

    Args:
        layers: of the call.

    Attributes:
        cuts: what the cache of which layers holds, after the pass.
        counts: `[B]` visual tokens before, and after.
    """

    has_holes: ClassVar[bool] = False  # see `Cut`

    def __init__(self, layers: DecoderLayers) -> None:
        self.layers = layers
        self._mask = layers.mask
        self._is_visual = layers.is_visual
        width = self._mask.shape[1]
        self._columns = torch.arange(width, device=self._mask.device).expand_as(self._mask)
        self.cuts: list[Cut] = []
        self.counts = (layers.n_visual, layers.n_visual)

    def cutting(self) -> AbstractContextManager[None]:
        """Inside the block, the next pass of the model drops columns."""
        return self.layers.passing(self)

    @property
    def steps(self) -> RevivingCuts | None:
        """What later passes do in their layers; None: nothing."""
        return None

    def kept(self) -> list[Tensor]:
        """Which visual tokens of each row the last cut left: `[n]` bool, in their order."""
        whole = self.layers.is_visual
        return split_rows(torch.zeros_like(whole).scatter(1, self._columns, self._is_visual), whole)

    def describe(self) -> str:
        """How many stay; empty where the pass did not run."""
        if not self.cuts:
            return ""
        before, after = (int(counts.sum()) for counts in self.counts)
        return f"{after} of {before} visual tokens after layer {self.cuts[0].first}"

    def record(self, stats: Stats) -> None:
        """Add what later passes did to the statistics of the call."""

    def choose(
        self, layers: DecoderLayers, index: int, hidden: Tensor, given: dict[str, Any]
    ) -> Tensor:
        """Drop columns; the states `[B, T', D]` of those that stay."""
        visual = ChosenColumns.of(self._is_visual)
        is_text = self._mask & ~self._is_visual
        x = visual.take(hidden)
        plan = layers.plan(index, visual, is_text, x, hidden)
        self.counts = (layers.n_visual, plan.counts)
        hidden = visual.put(hidden, x, plan)
        stays = visual.mark(is_text, plan)
        order = order_columns(stays)
        self._columns = self._columns.gather(1, order)
        self._mask = stays.gather(1, order)
        self._is_visual = self._is_visual.gather(1, order) & self._mask
        self.cuts.append(Cut(index, self._mask, self._columns, self.has_holes))
        return take_states(hidden, order)

    def arguments(self, given: dict[str, Any], hidden: Tensor) -> dict[str, Any]:
        """Masks and positions of the columns that stay."""
        columns = self._columns
        found = dict(given)
        mask = shorten_mask(given.get("attention_mask"), columns, self._mask)
        found["attention_mask"] = None if mask is None else mask.to(hidden.dtype)
        positions = given.get("position_embeddings")
        if positions is not None:  # [B or 1, T, D] each
            found["position_embeddings"] = tuple(
                take_states(values.expand(len(columns), -1, -1), columns) for values in positions
            )
        ids = given.get("position_ids")
        if isinstance(ids, Tensor):
            found["position_ids"] = take_columns(ids, columns)
        return found
