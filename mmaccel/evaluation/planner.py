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
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from mmaccel.checks import check_int
from mmaccel.errors import OptionError
from mmaccel.evaluation.measure import Case, by_case, measure, synchronise
from mmaccel.evaluation.visual_tokens import PromptCost, count_visual, watch_prompt
from mmaccel.handle import attach
from mmaccel.pipelines.vision_language.visuals import find_placeholder
from mmaccel.reduction.visual_tokens.contract import TokenReducer, read_reducers
from mmaccel.reduction.visual_tokens.divprune import DivPrune

WORTH = 1.1  # times as fast; less does not make up for other answers
STEPS = 8  # decoded to measure one


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

    def seconds(self, n_tokens: int) -> float:
        """Seconds of an answer of so many tokens."""
        return self.encoder + self.prefill + (n_tokens - 1) * self.step


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
        return min(found, default=self.speed_up), max(found, default=self.speed_up)

    @property
    def worth_it(self) -> bool:
        """Whether the answer comes at least `WORTH` times as fast."""
        return self.speed_up >= WORTH

    @property
    def longest_answer(self) -> int | None:
        """Most tokens of an answer that is still worth it, 0 for none; None: no such limit, because
        steps get faster too.
        """
        gain = self.whole.seconds(1) - WORTH * self.reduced.seconds(1)
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
        low, high = self.spread
        said = [
            f"{self.speed_up:.2f} times as fast (rounds: {low:.2f} to {high:.2f}; worth it: "
            f"{self.worth_it}; longest answer: {self.longest_answer})",
            f"{self.method!r} on {self.device}, {self.concurrency} at a time, "
            f"{self.max_new_tokens} tokens each, {self.text_tokens:.0f} of text",
            f"{'':16}{'all tokens':>12}{'fewer':>12}",
        ]
        whole, less = asdict(self.whole), asdict(self.reduced)
        for name in whole:
            scale, unit = (1, "") if name == "visual_tokens" else (1000, ", ms")
            said.append(f"{name + unit:16}{scale * whole[name]:>12.4g}{scale * less[name]:>12.4g}")
        return "\n".join(said)


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
    counts = {"max_new_tokens": max_new_tokens, "concurrency": concurrency, "repeats": repeats}
    for name, value in counts.items():
        check_int(name, value, 1, hint="give a number of tokens, requests or calls")
    chosen = DivPrune(keep=keep) if method is None else read_reducers(method)[0]
    copies = {
        name: torch.cat([value] * concurrency) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
    n_visual = int((copies["input_ids"] == find_placeholder(model, "image")).sum())
    if not n_visual:
        raise OptionError(
            "inputs: expected prompts with an image, received none of its tokens; pass what the "
            "model's processor returns for a text and an image"
        )

    def run(own: TokenReducer | None, _: int) -> dict[str, PromptCosts]:
        return {"costs": measure_costs(model, copies, own)}

    cases = [Case("whole", partial(run, None)), Case("reduced", partial(run, chosen))]
    sides = by_case(measure(cases, repeats, device=model.device))
    both = zip(sides["whole"], sides["reduced"])
    rounds = tuple((whole["costs"], reduced["costs"]) for whole, reduced in both)
    whole, reduced = map(_median, zip(*rounds))
    rows = len(copies["input_ids"])
    text = (int(copies["attention_mask"].sum()) - n_visual) / rows
    device = str(model.device)
    return VisualTokenPlan(
        chosen, whole, reduced, max_new_tokens, rows, text, device, rounds=rounds
    )


def _median(costs: Sequence[PromptCosts]) -> PromptCosts:
    columns = zip(*(asdict(each).values() for each in costs))
    return PromptCosts(*map(median, columns))


@torch.no_grad()
def measure_costs(
    model: Any, inputs: Mapping[str, Any], method: TokenReducer | None
) -> PromptCosts:
    """Costs of one call of `generate` that decodes a few tokens; arguments as in
    `plan_visual_tokens`, no method for all visual tokens."""
    cost = PromptCost()
    selection: list[float] = []

    def time_plan(plan: Callable[[Any], Any], context: Any) -> Any:
        synchronise(model.device)
        began = time.perf_counter()
        found = plan(context)
        synchronise(model.device)
        if not cost.prefill_seconds:  # some methods plan at every step
            selection.append(time.perf_counter() - began)
        return found

    timed = copy(method)
    if method is not None:
        object.__setattr__(timed, "plan", partial(time_plan, method.plan))  # of this copy alone
    options: dict[str, Any] = {"max_new_tokens": 1 + STEPS, "min_new_tokens": 1 + STEPS}
    how: dict[str, Any] = {"strict": True, "seed": 0, "cuda_graphs": False}
    with attach(model, "autoregressive", visual_tokens=timed, **how):
        with watch_prompt(model) as cost:
            model.generate(**inputs, **options, do_sample=False)
    visual = count_visual(model, dict(inputs), cost.columns).double()
    return PromptCosts(
        cost.encoder_seconds,
        cost.prefill_seconds,
        median(cost.step_seconds),
        sum(selection),
        float(visual.mean()),
    )
