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
_MOST = 0.5  # a part with this share of the seconds is what they are spent on
_SAME = 0.9  # a ratio of seconds above this one is no saving


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
        key_heads: of a layer of the language model.
        device: of the model.
        rounds: (whole, reduced) costs of each repetition, whose medians the others are.
    """

    method: TokenReducer
    whole: PromptCosts
    reduced: PromptCosts
    max_new_tokens: int
    concurrency: int
    text_tokens: float
    key_heads: int
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
    def reason(self) -> str:
        """Why it is worth it, or what stands in its way, in words."""
        whole, less = self.whole, self.reduced
        if self.worth_it:
            return self._gain()
        total, obstacles = self.seconds_without, []
        steps = self.max_new_tokens - 1
        decode = steps * whole.step
        gain = whole.first_token() - less.first_token()
        chosen_behind = 0.0 if self.method.stage == "encoder_layer" else less.selection
        if whole.encoder >= _MOST * total and less.encoder >= _SAME * whole.encoder:
            obstacles.append(
                f"the encoder takes {_percent(whole.encoder / total)} of the time, and a method "
                "behind it saves none of that: smaller images, or a method inside the encoder"
            )
        if decode >= _MOST * total:
            step = f"a step takes {_ms(less.step)} instead of {_ms(whole.step)}"
            obstacles.append(
                f"the answer's {self.max_new_tokens} tokens take {_percent(decode / total)} of the "
                f"time, and {step}" + self._tell_step()
            )
        elif less.step > whole.step / _SAME and steps * (less.step - whole.step) >= _MOST * gain:
            obstacles.append(
                f"a step takes {_ms(less.step)} instead of {_ms(whole.step)}, which takes back "
                "what the prompt saves"
            )
        if less.selection >= _MOST * max(gain + less.selection, 1e-9):
            obstacles.append(
                f"choosing tokens takes {_ms(less.selection)} and saves "
                f"{_ms(max(gain + less.selection, 0.0))} of the first token's time: a cheaper "
                "method such as UniformTokens or DART"
            )
        if less.prefill - chosen_behind >= _SAME * whole.prefill:
            obstacles.append(
                f"a prompt of {less.visual_tokens + self.text_tokens:.0f} columns is processed "
                f"hardly faster than one of {whole.visual_tokens + self.text_tokens:.0f}: it is "
                "short, or the device is not filled by it; more requests together may be"
            )
        if not obstacles:
            obstacles.append(
                f"the prompt's pass takes {_percent(whole.prefill / total)} of the time, and only "
                f"{_ms(whole.prefill - less.prefill)} of it are saved"
            )
        return "; ".join(obstacles)

    def _gain(self) -> str:
        whole, less = self.whole, self.reduced
        parts = [
            (
                f"the prompt's pass takes {_ms(less.prefill)} instead of {_ms(whole.prefill)}",
                whole.prefill - less.prefill,
            ),
            (
                f"the encoder {_ms(less.encoder)} instead of {_ms(whole.encoder)}",
                whole.encoder - less.encoder,
            ),
            (
                f"a step {_ms(less.step)} instead of {_ms(whole.step)}",
                (self.max_new_tokens - 1) * (whole.step - less.step),
            ),
        ]
        saved = self.seconds_without - self.seconds_with
        return ", ".join(text for text, seconds in parts if seconds >= 0.1 * saved)

    def _tell_step(self) -> str:
        if self.reduced.step < _SAME * self.whole.step:
            return ", which is not enough"
        heads = f"{self.key_heads} key head{'s' * (self.key_heads != 1)} a layer"
        return f": a cache of {heads} is little next to what else a step does"

    def __str__(self) -> str:
        """A few lines."""
        whole, less = self.whole, self.reduced
        times = f"{self.speed_up:.2f} times as fast"
        verdict = "This will pay here" if self.worth_it else "This will not pay here"
        if self.speed_up < 1:
            verdict, times = "This will slow you down here", f"{1 / self.speed_up:.2f} times slower"
        count = self.longest_answer
        low, high = self.spread
        unsure = low < WORTH <= high
        rounds = f"Rounds were from {low:.2f} to {high:.2f} times as fast"
        rounds += ": too unsteady to be sure, measure again on a quiet machine." * unsure
        reach = "" if not self.worth_it or count is None else f" Up to {count} tokens it pays."
        rows = [
            (name, _ms(getattr(whole, field)), _ms(getattr(less, field)))
            for name, field in (
                ("encoder", "encoder"),
                ("prefill", "prefill"),
                ("there selection", "selection"),
                ("step", "step"),
            )
        ]
        rows.append(("in all", _ms(self.seconds_without), _ms(self.seconds_with)))
        lines = [
            f"{verdict}: {times} ({self.reason}).{reach}",
            f"{self.method!r} on {self.device}: {less.visual_tokens:.0f} of "
            f"{whole.visual_tokens:.0f} visual tokens a layer, {self.text_tokens:.0f} of text, "
            f"{self.concurrency} at a time, {self.max_new_tokens} tokens each.",
            f"{'':16}{'all tokens':>12}{'fewer':>12}",
            *(f"{name:16}{first:>12}{second:>12}" for name, first, second in rows),
            f"{rounds}{'.' * (not unsure)}",
            f"Measured: encoder, prefill, {_STEPS} steps. Extrapolated: later steps.",
        ]
        return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


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
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    whole, reduced = (_median(side) for side in zip(*rounds, strict=True))
    return VisualTokenPlan(
        chosen,
        whole,
        reduced,
        max_new_tokens,
        rows,
        text,
        heads,
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
