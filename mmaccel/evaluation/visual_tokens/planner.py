"""Whether fewer visual tokens pay on this machine: measured costs, and what follows from them.

What is measured: the image is encoded, the prompt is processed and a few tokens are decoded, with
all visual tokens and with fewer, in turn, a few times; each cost is a median. Requests that run
together are really run together. What is extrapolated: an answer's later steps cost what its first
ones do. Their cache is longer by then, on both sides alike, so a long answer takes a little longer
than is said here. Passes are not captured as CUDA graphs; with them steps are faster on both sides.

    seconds = encoder + prefill (selection included) + (tokens - 1) * step

Answers are not looked at: what a method costs in accuracy is told by `mmaccel evaluate
visual-tokens`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from mmaccel.catalog import read_reducers
from mmaccel.checks import check_int
from mmaccel.errors import OptionError
from mmaccel.evaluation.visual_tokens.measure import count_visual
from mmaccel.evaluation.visual_tokens.prefill import PromptCost, watch_prompt
from mmaccel.handle import attach
from mmaccel.pipelines.vision_language.visuals import find_placeholder
from mmaccel.reduction.visual_tokens.contract import TokenReducer, check_reducers
from mmaccel.reduction.visual_tokens.divprune import DivPrune

WORTH = 1.1  # times as fast; less does not make up for other answers
_STEPS = 8  # decoded to measure one


@dataclass(frozen=True)
class PromptCosts:
    """What a batch of prompts costs, medians.

    Attributes:
        encoder: seconds to encode its images.
        prefill: seconds from then to the first token's logits, selection included.
        step: seconds of each further token of the batch.
        selection: seconds of choosing tokens before the first one, a part of encoder and prefill.
        visual_tokens: of a prompt, mean over the language model's layers.
    """

    encoder: float
    prefill: float
    step: float
    selection: float = 0.0
    visual_tokens: float = 0.0

    def first_token(self) -> float:
        """Seconds to the first token."""
        return self.encoder + self.prefill

    def seconds(self, n_tokens: int) -> float:
        """Seconds of an answer of so many tokens."""
        return self.first_token() + (n_tokens - 1) * self.step


@dataclass(frozen=True)
class VisualTokenPlan:
    """What to expect of a method for visual tokens; `print` shows it as text.

    Attributes:
        method: the method.
        whole: measured costs with all visual tokens.
        reduced: the same with those that the method keeps.
        max_new_tokens: tokens of an answer.
        concurrency: requests that run together.
        text_tokens: of a prompt, mean.
        device: of the model.
        rounds: (whole, reduced) costs of each repetition, whose medians the others are.
    """

    method: TokenReducer
    whole: PromptCosts
    reduced: PromptCosts
    max_new_tokens: int
    concurrency: int
    text_tokens: float
    device: str
    rounds: tuple[tuple[PromptCosts, PromptCosts], ...] = ()

    @property
    def seconds_without(self) -> float:
        """Expected seconds of the batch with all visual tokens."""
        return self.whole.seconds(self.max_new_tokens)

    @property
    def seconds_with(self) -> float:
        """Expected seconds of the batch with the method."""
        return self.reduced.seconds(self.max_new_tokens)

    @property
    def speed_up(self) -> float:
        """Seconds without over seconds with the method."""
        return self.seconds_without / self.seconds_with

    @property
    def spread(self) -> tuple[float, float]:
        """The least and the largest speed-up of a round: wide on a busy machine."""
        n = self.max_new_tokens
        found = [whole.seconds(n) / less.seconds(n) for whole, less in self.rounds]
        return (min(found), max(found)) if found else (self.speed_up, self.speed_up)

    @property
    def worth_it(self) -> bool:
        """Whether the answer comes at least `WORTH` times as fast."""
        return self.speed_up >= WORTH

    @property
    def longest_answer(self) -> int | None:
        """Most tokens of an answer that is still worth it, 0 for none; None: no such limit, because
        steps get faster too.
        """
        gain = self.whole.first_token() - WORTH * self.reduced.first_token()
        loss = WORTH * self.reduced.step - self.whole.step  # of each further token
        if loss <= 0:
            return None
        return 1 + math.floor(gain / loss) if gain >= 0 else 0

    @property
    def shares(self) -> dict[str, float]:
        """What part of the seconds with all tokens each stage takes."""
        steps = (self.max_new_tokens - 1) * self.whole.step
        stages = {"encoder": self.whole.encoder, "prefill": self.whole.prefill, "steps": steps}
        return {name: seconds / self.seconds_without for name, seconds in stages.items()}

    def __str__(self) -> str:
        """A few lines."""
        whole, less, (low, high) = self.whole, self.reduced, self.spread
        verdict = "This will pay here" if self.worth_it else "This will not pay here"
        count = self.longest_answer
        reach = f", up to {count} tokens" if self.worth_it and count is not None else ""
        shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in self.shares.items())
        rows = [
            ("encoder", whole.encoder, less.encoder),
            ("prefill", whole.prefill, less.prefill),
            ("there selection", whole.selection, less.selection),
            ("step", whole.step, less.step),
            ("in all", self.seconds_without, self.seconds_with),
        ]
        lines = [
            f"{verdict}: {self.speed_up:.2f} times as fast "
            f"(rounds: {low:.2f} to {high:.2f}){reach}.",
            f"{self.method!r} on {self.device}: {less.visual_tokens:.0f} of "
            f"{whole.visual_tokens:.0f} visual tokens a layer, {self.text_tokens:.0f} of text, "
            f"{self.concurrency} at a time, {self.max_new_tokens} tokens each.",
            f"{'milliseconds':16}{'all tokens':>12}{'fewer':>12}",
            *(f"{name:16}{1000 * a:>12.4g}{1000 * b:>12.4g}" for name, a, b in rows),
            f"Of all tokens' seconds: {shares}. Measured over {_STEPS} steps.",
        ]
        return "\n".join(lines)


def plan_visual_tokens(
    model: Any,
    inputs: Mapping[str, Any],
    keep: float = 0.22,
    method: TokenReducer | None = None,
    *,
    max_new_tokens: int = 64,
    concurrency: int = 1,
    repeats: int = 5,
) -> VisualTokenPlan:
    """Measure whether fewer visual tokens pay for a model, a prompt and this machine.

    >>> plan = mmaccel.plan_visual_tokens(vlm, inputs, keep=0.22, max_new_tokens=32)
    >>> print(plan)

    Args:
        model: a vision-language model that `mmaccel.attach` serves, on its device.
        inputs: arguments of `model.generate` for prompts with images, of the sizes and lengths that
            are to be served: `input_ids` and `attention_mask` `[R, T]` int64 and others.
        keep: the fraction of visual tokens that stays.
        method: a method with its own fraction; None: `DivPrune(keep=keep)`.
        max_new_tokens: tokens of an answer.
        concurrency: copies of `inputs` that are processed together.
        repeats: measured calls of each side; each is preceded by one that is not.

    Returns:
        The plan. It takes 2 * (repeats + 1) calls of `generate` to make.

    Raises:
        OptionError: a number out of range, something that is no method, or no image in the prompt.
        UnsupportedModelError: a model that `attach` does not serve, or without what the method
            needs.
    """
    hint = "give a number of tokens, requests or calls"
    for name, value in (
        ("max_new_tokens", max_new_tokens),
        ("concurrency", concurrency),
        ("repeats", repeats),
    ):
        check_int(name, value, 1, hint=hint)
    chosen = DivPrune(keep=keep) if method is None else check_reducers(read_reducers(method))[0]
    copies = {name: _copy(value, concurrency) for name, value in inputs.items()}
    n_visual = int((copies["input_ids"] == find_placeholder(model, "image")).sum())
    if not n_visual:
        raise OptionError(
            "inputs: expected prompts with an image, received none of its tokens; pass what the "
            "model's processor returns for a text and an image"
        )
    methods = {"whole": None, "reduced": chosen}
    rounds = []
    for k in range(repeats + 1):
        order = methods if k % 2 else reversed(methods)
        measured = {name: measure_costs(model, copies, methods[name]) for name in order}
        rounds.append((measured["whole"], measured["reduced"]))
    del rounds[0]  # the first warms up
    rows = len(copies["input_ids"])
    text = (int(copies["attention_mask"].sum()) - n_visual) / rows
    whole, reduced = (_median(side) for side in zip(*rounds, strict=True))
    return VisualTokenPlan(
        chosen,
        whole,
        reduced,
        max_new_tokens,
        rows,
        text,
        str(model.device),
        tuple(rounds),
    )


def _copy(value: Any, times: int) -> Any:
    return torch.cat([value] * times) if isinstance(value, Tensor) and times > 1 else value


def _median(costs: Sequence[PromptCosts]) -> PromptCosts:
    names = PromptCosts.__dataclass_fields__
    return PromptCosts(**{name: median(getattr(c, name) for c in costs) for name in names})


@torch.no_grad()
def measure_costs(
    model: Any, inputs: Mapping[str, Any], method: TokenReducer | None
) -> PromptCosts:
    """Costs of one call of `generate` that decodes a few tokens.

    Args:
        model: see `plan_visual_tokens`.
        inputs: see `plan_visual_tokens`.
        method: None for all visual tokens.

    Raises:
        UnsupportedModelError: see `plan_visual_tokens`.
    """

    def synchronise() -> None:
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)

    cost = PromptCost()
    timed, selection = _timed(method, synchronise, lambda: not cost.prefill_seconds)
    n_tokens = 1 + _STEPS
    options: dict[str, Any] = {"max_new_tokens": n_tokens, "min_new_tokens": n_tokens}
    with attach(
        model, "autoregressive", strict=True, seed=0, visual_tokens=timed, cuda_graphs=False
    ):
        with watch_prompt(model, synchronise) as cost:
            model.generate(**inputs, **options, do_sample=False)
    visual = count_visual(model, dict(inputs), cost.columns).double()
    return PromptCosts(
        cost.encoder_seconds,
        cost.prefill_seconds,
        median(cost.step_seconds),
        sum(selection),
        float(visual.mean()),
    )


def _timed(
    method: TokenReducer | None, synchronise: Callable[[], None], is_wanted: Callable[[], bool]
) -> tuple[TokenReducer | None, list[float]]:
    """A copy of a method that notes the seconds of its plans, where they are wanted."""
    seconds: list[float] = []
    if method is None:
        return None, seconds
    made, plan = copy(method), method.plan

    def timed(context: Any) -> Any:
        synchronise()
        began = time.perf_counter()
        found = plan(context)
        synchronise()
        if is_wanted():
            seconds.append(time.perf_counter() - began)
        return found

    object.__setattr__(made, "plan", timed)  # of this copy alone
    return made, seconds
