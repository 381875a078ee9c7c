"""The contract of a reducer: score the visual tokens, select within a budget, return a `Plan`.

A method is a frozen dataclass with `score` and, where a ranking does not decide alone, `select`.
Counts, ties, order and the identity at `keep=1` are written once, here and in `budgets`. All
reducers are relaxed; a policy on top is as exact as it says *with respect to* the reduced model.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor

from mmaccel.capabilities import Capable, Exclusions, Words, explain, refuse
from mmaccel.catalog import read_method
from mmaccel.checks import (
    check_answer,
    check_int,
    check_length,
    within,
)
from mmaccel.errors import OptionError, ShapeError
from mmaccel.policies import Method, check_method
from mmaccel.reduction.visual_tokens import budgets
from mmaccel.reduction.visual_tokens.context import VisualContext
from mmaccel.reduction.visual_tokens.plan import Plan, check_plan, keep_tokens
from mmaccel.reduction.visual_tokens.selection import top
from mmaccel.results import Exactness

Stage = Literal["pixels", "encoder_layer", "encoder_exit", "llm_layer"]
Features = Literal["auto", "merged", "all"]
STAGES: tuple[Stage, ...] = ("pixels", "encoder_layer", "encoder_exit", "llm_layer")


ASCENDING = "a plan is made from the layer before; list layers in ascending order"


@dataclass(frozen=True)
class TokenReducer(Method):
    """Base of all reducers of visual tokens. Give one of `keep` and `n_keep`, or neither where
    `needs_budget` is False.

    Args:
        keep: the fraction of a row's visual tokens that stays, in (0, 1]; 1 changes nothing.
        n_keep: the number of a row's visual tokens that stays; rows with fewer keep all.
    """

    keep: float | None = within(
        None, 0, 1, "give the fraction of visual tokens that stays; 1 keeps all", above_low=True
    )
    n_keep: int | None = within(None, 1, hint="give the number that stays")

    stage: ClassVar[Stage] = "encoder_exit"
    exactness: ClassVar[Exactness] = "relaxed"
    slot = "visual_tokens"
    # False: a rule of the method says how many tokens stay, and a budget is the most that do
    needs_budget: ClassVar[bool] = True
    revives: ClassVar[bool] = False  # tokens dropped earlier are scored again at every step
    # the model runs from its first layer with the tokens that the plan keeps
    restarts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        has_none = self.keep is None and self.n_keep is None
        has_both = self.keep is not None and self.n_keep is not None
        if has_both or (has_none and self.needs_budget):
            received = "neither" if self.keep is None else f"{self.keep!r} and {self.n_keep!r}"
            raise OptionError(
                f"{self.name}: expected one of keep and n_keep, received {received}; write "
                f"{self.name}(keep=0.25) for a quarter of the visual tokens"
            )
        super().__post_init__()

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def parts(self) -> tuple[Any, ...]:
        """Its stage, whatever a child needs."""
        return (Leaving(self),)

    @property
    def excludes(self) -> Exclusions:
        if self.stage != "llm_layer":
            return {}
        why = (
            "drops tokens inside the language model; for visual ones take a method at the "
            "encoder's exit, such as DivPrune"
        )
        reasons = dict.fromkeys(("eviction", "packed entries"), why)
        if self.revives:
            other = ("trees", "step blocks", "draft canvas", "draft passes", "layer states")
            reasons |= dict.fromkeys(other, "computes tokens of the prompt beside those of a pass")
        return reasons

    def layers_in(self, depth: int) -> tuple[int, ...]:
        """The layers that receive a plan's tokens in a tower of `depth` layers, ascending; none at
        the exit of the encoder. Layer L receives: layers 0 ... L-1 have run, scores are those of
        layer L-1.
        """
        return ()

    @final
    def layers_of(self, depth: int) -> tuple[int, ...]:
        """`layers_in`, of a tower that has them all."""
        layers = self.layers_in(depth)
        if self.stage.endswith("layer"):
            last = layers[-1] if layers else 0
            check_int(f"{self.name}: layer", last, 1, depth - 1, hint=ASCENDING)
        return layers

    def budget(self, context: VisualContext) -> Tensor:
        """How many tokens of each row stay, `[B]` int64."""
        if self.keep is None and self.n_keep is None:
            return context.counts
        return budgets.uniform(context.counts, self.keep, self.n_keep)

    def score(self, context: VisualContext) -> Tensor:
        """How much each token matters, `[B, N]`; 0 for methods that do not rank."""
        return torch.zeros_like(context.size)

    def limit(self, scores: Tensor, context: VisualContext, budget: Tensor) -> Tensor:
        """A smaller budget `[B]` where the scores `[B, N]` say that fewer tokens will do."""
        return budget

    def select(self, scores: Tensor, context: VisualContext, budget: Tensor) -> Plan:
        """The plan with `budget [B]` slots a row: the highest scores `[B, N]`."""
        return keep_tokens(top(scores, context.valid, budget), context.valid, context.size)

    @final
    def plan(self, context: VisualContext) -> Plan:
        """What stays of the visual tokens of some rows; if nothing is to go, all valid ones. Cost:
        four host synchronisations, and the method's own.
        """
        refuse(explain(self, context))
        budget = self.budget(context)
        check_answer(f"{self.name}.budget", budget, context.counts.shape, "int64")
        is_whole = self.needs_budget and bool((budget >= context.counts).all())
        if self.keep == 1 or is_whole:
            return keep_tokens(context.valid, context.valid, context.size)
        scores = self.score(context)
        name = f"{self.name}.score"
        check_answer(name, scores, context.valid.shape, "float", counts=context.valid)
        limit = self.limit(scores, context, budget)
        check_answer(f"{self.name}.limit", limit, budget.shape, "int64")
        try:
            plan = self.select(scores, context, limit)
            check_plan(plan, context.valid)
        except ShapeError as error:
            raise ShapeError(f"{self.name}.select: {error}") from error
        return plan


@dataclass(frozen=True)
class StagedReducer(TokenReducer):
    """Base of reducers that drop or merge tokens in several layers; every one removes as many.

    Args:
        layers: those that receive fewer tokens than the one before; None: the usual ones.
    """

    layers: tuple[int, ...] | None = within(None, 1, hint=ASCENDING, fewest=1, ascends=True)

    schedule: ClassVar[Callable[..., Tensor]] = staticmethod(budgets.linear)

    @abstractmethod
    def usual(self, depth: int) -> tuple[int, ...]:
        """The layers that the paper or its code chooses, of `depth` layers."""

    def layers_in(self, depth: int) -> tuple[int, ...]:
        return self.layers or self.usual(depth)

    def budget(self, context: VisualContext) -> Tensor:
        """What is left behind a layer, `[B]`."""
        layers = () if context.depth is None else self.layers_of(context.depth)
        if context.layer not in layers:
            raise OptionError(
                f"{self.name}: expected a context at one of the layers {layers}, received layer "
                f"{context.layer} of {context.depth}; ask the method's layers_in for its layers"
            )
        stage = layers.index(context.layer) + 1
        before = context.initial, context.counts
        return self.schedule(*before, self.keep, self.n_keep, stage, len(layers))


@dataclass(frozen=True)
class Leaving(Capable):
    """That visual tokens leave at the stage of a method."""

    method: TokenReducer
    slot = "visual_tokens"
    needs: ClassVar[Words] = frozenset({"visual tokens"})

    def __repr__(self) -> str:
        return repr(self.method)


@dataclass(frozen=True)
class PromptReducer(TokenReducer):
    """Base of reducers that drop words, too: `prompt_tokens=` of `attach`.

    Args:
        first: words at the beginning of a prompt that always stay.
        newest: words at its end that always stay; for a method that reads them, the question.
    """

    first: int = within(4, 0, kw_only=True, hint="the first ones are looked at by all others")
    newest: int = within(32, 1, kw_only=True, hint="give the words of a question")


class LeavingWords(Leaving):
    """That words of prompts leave at the layers of a method."""

    slot = "prompt_tokens"
    needs: ClassVar[Words] = frozenset({"prompt words", "own attention"})

    @property
    def excludes(self) -> Exclusions:
        return self.method.excludes


UsePromptReducer = PromptReducer | str | Mapping[str, Any] | None
"""What `read_prompt_reducer` takes."""


def read_prompt_reducer(given: UsePromptReducer) -> PromptReducer | None:
    """The method of `prompt_tokens=`."""
    if given is None:
        return None
    method = read_method("visual_tokens", given)
    check_method("prompt_tokens", method, PromptReducer, "mmaccel.LazyLLM(keep=0.5)")
    return method


UseReducers = (
    TokenReducer | str | Mapping[str, Any] | Sequence[TokenReducer | str | Mapping[str, Any]] | None
)
"""What `read_reducers` takes."""


def read_reducers(given: UseReducers) -> tuple[TokenReducer, ...]:
    """The methods of `visual_tokens=`, in the order in which an image meets their stages, one each.

    A short name keeps `mmaccel.catalog.KEEP`. Before the encoder and in it is one stage here.
    """
    if given is None:
        return ()
    if isinstance(given, list | tuple):
        check_length("visual_tokens", given)
    asked = given if isinstance(given, list | tuple) else [given]
    methods = [read_method("visual_tokens", each) for each in asked]
    for method in methods:
        check_method("visual_tokens", method, TokenReducer, "mmaccel.DART(keep=0.22)")
    places = ["encoder_layer" if m.stage == "pixels" else m.stage for m in methods]
    if not methods or len(set(places)) < len(places):
        raise OptionError(
            f"visual_tokens: expected one method a stage, received {list(map(repr, methods))}; "
            "keep one of those that share a stage, or give None for no method"
        )
    return tuple(sorted(methods, key=lambda method: STAGES.index(method.stage)))
