"""Methods inside the language model: one executor, and what a method does in a pass.

`DecoderLayers` owns the hooks. In front of a method's layer it hands a pass's `LayerAnswer` the
states; what that returns goes on: later layers compute fewer columns of a prompt (`PromptCuts`),
the pass ends here (`FirstRun`), a step computes tokens that earlier ones dropped (`revival`). What
methods ask of attention is computed from queries and keys of the layer before. Visual tokens and
words differ only in which columns may leave.

Departures from the methods' own code: rows of a batch have counts of their own and are padded on
the left again; kept tokens stay in order, at the positions they had.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from mmaccel.pipelines.hosts.causal_lm.own_prompt import Cut
from mmaccel.pipelines.hosts.generate_call import GenerateCall
from mmaccel.pipelines.hosts.layers.attention_function import watched
from mmaccel.pipelines.hosts.prompt_cuts.columns import (
    ChosenColumns,
    LeavingColumns,
    order_columns,
    shorten_mask,
    split_rows,
    take_places,
    take_states,
)
from mmaccel.pipelines.hosts.prompt_cuts.layer_attention import NotedLayers
from mmaccel.pipelines.hosts.transformers_release import CACHE
from mmaccel.reduction.visual_tokens import budgets
from mmaccel.reduction.visual_tokens.context import Queries, Text, make_context
from mmaccel.reduction.visual_tokens.contract import TokenReducer
from mmaccel.reduction.visual_tokens.plan import Plan
from mmaccel.results import Stats

if TYPE_CHECKING:
    from mmaccel.pipelines.hosts.prompt_cuts.revival import RevivingCuts


class PassEndedError(Exception):
    """Ends a pass in front of a layer; `DecoderLayers.passing` catches it."""


class LayerAnswer:
    """What one pass does in front of the decoder's layers, from a method's first one on."""

    n_last: int = 0  # how many of the last columns the model's head reads; 0: all

    def choose(
        self, layers: DecoderLayers, index: int, hidden: Tensor, given: dict[str, Any]
    ) -> Tensor:
        """In front of one of the method's layers: the states that it computes.

        Args:
            layers: ask the method, see `DecoderLayers.plan`.
            hidden: `[B, T', D]`, of the columns that the layers before computed.
            given: the layer's other arguments, of all columns of the pass.
        """
        raise NotImplementedError

    def arguments(self, given: dict[str, Any], hidden: Tensor) -> dict[str, Any]:
        """In front of every layer: its other arguments, of the columns of `hidden`."""
        return given


class DecoderLayers:
    """The layers of a call's language model under a method of the stage "llm_layer"."""

    def __init__(
        self,
        call: GenerateCall,
        method: TokenReducer,
        seeds: Sequence[int],
        leaving: LeavingColumns,
    ) -> None:
        self._model = call.model
        self._method = method
        self._layers = list(call.model.get_decoder().layers)
        self.before = method.layers_of(len(self._layers))  # in front of which the method is asked
        self.leaving = leaving
        self.mask, self.may_leave = leaving.mask, leaving.may_leave
        self._seeds = torch.tensor(
            [seed % 2**63 for seed in seeds], device=self.mask.device, dtype=torch.int64
        )
        self._noted = NotedLayers(frozenset())

    @property
    def depth(self) -> int:
        return len(self._layers)

    @property
    def n_leaving(self) -> Tensor:
        """`[B]` int64."""
        return self.may_leave.sum(1)

    @property
    def drops_some(self) -> bool:
        """Whether the method's `keep` drops a token of some row."""
        counts = self.n_leaving
        left = budgets.uniform(counts, self._method.keep, self._method.n_keep)
        return bool((left < counts).any())

    @contextmanager
    def passing(self, answer: LayerAnswer) -> Iterator[None]:
        """Inside the block, the model's passes do what an answer says."""
        self._noted = NotedLayers.asked_by(self._method, self.before)
        try:
            with ExitStack() as stack:
                watchers = [self._noted] if self._noted.wanted else []
                stack.enter_context(watched(self._model, watchers))
                for index in range(self.before[0], len(self._layers)):
                    hook = partial(self._enter, answer, index)
                    layer = self._layers[index]
                    handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
                    stack.callback(handle.remove)
                if answer.n_last:
                    hook = partial(_take_last, answer.n_last)
                    stack.callback(self._layers[-1].register_forward_hook(hook).remove)
                yield
        except PassEndedError:
            pass
        finally:
            self._noted.layers.clear()

    def plan(
        self,
        index: int,
        leaving: ChosenColumns,
        stays: Tensor,
        x: Tensor,
        hidden: Tensor,
        last: int = -1,
    ) -> Plan:
        """What the method keeps in front of a layer.

        Args:
            leaving: the keys of tokens that may leave, in the layer before.
            stays: `[B, T']` bool, the columns of the others.
            x: `[B, N, D]`, states of the tokens that may leave.
            hidden: `[B, T', D]`, states of all columns.
            last: the column that predicts.
        """
        noted = self._noted

        def find(layer: int) -> int:
            return index - 1 if layer < 0 else layer

        def attention(layer: int, queries: Queries, per_head: bool) -> Tensor:
            asking = stays
            if queries == "last":
                asking = torch.zeros_like(stays)
                asking[:, last] = True
            return noted.mass(find(layer), leaving, asking, per_head)

        def text() -> Text:
            before = noted.layers.get(index - 1)
            return Text(hidden, stays, None if before is None else before.key.transpose(1, 2))

        context = make_context(
            x,
            leaving.valid,
            initial=self.n_leaving,
            seed=self._seeds,
            layer=index,
            depth=self.depth,
            keys=lambda layer: noted.take(find(layer), leaving),
            attention=attention,
            queries=("last", "text"),
            text=text,
        )
        return self._method.plan(context)

    def _enter(
        self,
        answer: LayerAnswer,
        index: int,
        layer: Any,
        args: tuple[Any, ...],
        given: dict[str, Any],
    ) -> Any:
        hidden = args[0]
        named = dict(zip(list(signature(layer.forward).parameters)[1:], args[1:])) | given
        if index in self.before:
            hidden = answer.choose(self, index, hidden, named)
        return (hidden,), answer.arguments(named, hidden)


def _take_last(count: int, _layer: Any, _given: tuple[Any, ...], output: Any) -> Any:
    """What a layer gives out, of the last columns; some give out a tuple."""
    return (output[0][:, -count:], *output[1:]) if isinstance(output, tuple) else output[:, -count:]


class PromptCuts(LayerAnswer):
    """A prompt's pass whose later layers compute fewer tokens."""

    has_holes: ClassVar[bool] = False  # see `Cut`

    def __init__(self, layers: DecoderLayers) -> None:
        self.layers = layers
        self._mask = layers.mask
        self._may_leave = layers.may_leave
        width = self._mask.shape[1]
        self._columns = torch.arange(width, device=self._mask.device).expand_as(self._mask)
        self.cuts: list[Cut] = []  # what the cache of which layers holds, after the pass
        self.counts = (layers.n_leaving, layers.n_leaving)  # [B], before and after

    def cutting(self) -> AbstractContextManager[None]:
        """Inside the block, the next pass of the model drops columns."""
        return self.layers.passing(self)

    @property
    def steps(self) -> RevivingCuts | None:
        """What later passes do in their layers; None: nothing."""
        return None

    def kept(self) -> list[Tensor]:
        """Which tokens that may leave each row the last cut left: `[n]` bool, in their order."""
        whole = self.layers.may_leave
        return split_rows(torch.zeros_like(whole).scatter(1, self._columns, self._may_leave), whole)

    def describe(self) -> str:
        if not self.cuts:
            return ""
        before, after = (int(counts.sum()) for counts in self.counts)
        return f"{after} of {before} {self.layers.leaving.noun} after layer {self.cuts[0].first}"

    def record(self, stats: Stats) -> None:
        """Add what later passes did to the statistics of the call."""

    def choose(
        self, layers: DecoderLayers, index: int, hidden: Tensor, given: dict[str, Any]
    ) -> Tensor:
        """Drop columns; the states `[B, T', D]` of those that stay."""
        leaving = ChosenColumns.of(self._may_leave)
        others = self._mask & ~self._may_leave
        x = leaving.take(hidden)
        plan = layers.plan(index, leaving, others, x, hidden)
        self.counts = (layers.n_leaving, plan.counts)
        hidden = leaving.put(hidden, x, plan)
        stays = leaving.mark(others, plan)
        order = order_columns(stays)
        self._columns = self._columns.gather(1, order)
        self._mask = stays.gather(1, order)
        self._may_leave = self._may_leave.gather(1, order) & self._mask
        self.cuts.append(Cut(index, self._mask, self._columns, self.has_holes))
        return take_states(hidden, order)

    def arguments(self, given: dict[str, Any], hidden: Tensor) -> dict[str, Any]:
        mask = shorten_mask(given.get("attention_mask"), self._columns, self._mask)
        return {
            **given,
            **take_places(given, self._columns),
            "attention_mask": None if mask is None else mask.to(hidden.dtype),
        }


class FirstRun(LayerAnswer):
    """A pass over a prompt that ends in front of the method's layer, without cache or logits.
    Columns that the method does not choose leave the prompt; `stays` `[B, T]` bool run again at the
    positions they had (M. Liang et al., "ILRe", arXiv:2508.17892, section 3).
    """

    def __init__(self, layers: DecoderLayers) -> None:
        self.layers = layers
        self.stays = layers.mask
        self.seconds = 0.0

    def run(self, call: GenerateCall) -> None:
        """Cost: a pass of the prompt through the layers before the method's."""
        began = time.perf_counter()
        others = {**call.others, CACHE: None, "use_cache": False}
        others.pop("tokenizer", None)  # stopping criteria have it
        with self.layers.passing(self):
            call.model._prefill(call.ids, call.whole_config, others)
        self.seconds = time.perf_counter() - began

    def choose(
        self, layers: DecoderLayers, index: int, hidden: Tensor, given: dict[str, Any]
    ) -> Tensor:
        leaving = ChosenColumns.of(layers.may_leave)
        others = layers.mask & ~layers.may_leave
        plan = layers.plan(index, leaving, others, leaving.take(hidden), hidden)
        self.stays = leaving.mark(others, plan)
        raise PassEndedError

    def kept(self) -> list[Tensor]:
        """Which tokens that may leave stay in each row: `[n]` bool, in their order."""
        return split_rows(self.stays, self.layers.may_leave)

    def describe(self) -> str:
        before = int(self.layers.n_leaving.sum())
        after = int((self.stays & self.layers.may_leave).sum())
        counts = f"{after} of {before} {self.layers.leaving.noun}"
        return f"{counts} recalled in front of layer {self.layers.before[0]}"

    def record(self, stats: Stats) -> None:
        stats.prefill_passes += 1
        stats.tokens_processed += self.layers.mask.numel()
        stats.seconds += self.seconds
        stats.forward_seconds += self.seconds
