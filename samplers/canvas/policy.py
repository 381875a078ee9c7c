"""Base classes of canvas policies (S. Nie et al., 2025, arXiv 2502.09992, algorithm 5)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from mmaccel.capabilities import Capable, Exclusions, Words
from mmaccel.checks import check_callable, check_fields, check_kind, within
from mmaccel.contracts import Denoiser, Prompt
from mmaccel.errors import OptionError
from mmaccel.policies import CanvasPolicy, OnCanvasStep
from mmaccel.results import Exactness, Generation
from mmaccel.samplers.arithmetic import own_arithmetic
from mmaccel.samplers.canvas.cache_plan import CachePlan, as_plan
from mmaccel.samplers.canvas.early_end import ConvergedBlock, EosThreshold
from mmaccel.samplers.canvas.predictions import SlotPredictions
from mmaccel.samplers.canvas.run import CanvasRun
from mmaccel.samplers.canvas.selector import AtLeast, Or, Selector, SelectorState
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams


class RunPolicy(Capable, CanvasPolicy):
    """A `CanvasPolicy` in two steps: `open` a run and `decode` it.

    A subclass is a frozen dataclass and has these fields among its own, in its own order:

    Attributes:
        block: slots per block; None takes the canvas as one, or a block-causal model's own.
        cache: what passes reuse, a `CachePlan` or its kind.
    """

    block: int | None
    cache: CachePlan | str

    kind: ClassVar[str] = "canvas"

    @property
    def needs(self) -> Words:
        plan = as_plan(self.cache)
        words = {
            "drafts": True,
            "finished blocks": plan.keeps_blocks,
            "hidden slots": plan.far is not None,
            "kept entries": plan.reuses,
        }
        return frozenset(word for word, is_needed in words.items() if is_needed)

    @property
    def excludes(self) -> Exclusions:
        if as_plan(self.cache).kind == "block":
            return {}
        return {"own attention": 'keeps no finished blocks without cache="block"'}

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "cache", as_plan(self.cache))

    @own_arithmetic()
    def sample(
        self,
        model: Denoiser,
        prompt: Prompt,
        length: int,
        *,
        params: SamplingParams,
        noise: Noise,
        on_step: OnCanvasStep | None = None,
    ) -> Generation:
        check_callable("on_step", on_step)
        run = self.open(model, prompt, length, params=params, noise=noise, on_step=on_step)
        name = f"{type(self).__name__}.decode"
        generation: Generation = check_kind(name, self.decode(run), Generation)
        return generation

    def open(self, model: Denoiser, prompt: Prompt, length: int, **options: Any) -> CanvasRun:
        return CanvasRun(self, model, prompt, length, **options)

    @abstractmethod
    def decode(self, run: CanvasRun) -> Generation: ...


@dataclass(frozen=True, kw_only=True)
class SelectorPolicy(RunPolicy, Selector):
    """A policy that commits what its `selector` takes, which may be itself.

    Args:
        block: slots per block; None takes the canvas as one, or a block-causal model's own.
        cache: what passes reuse, a `CachePlan` or its kind.
        end_threshold: probability of an end token at which the first such slot is committed at
            once. None: end tokens are committed like others.
        drop_suffix: whether passes leave out the slots after a row's end once it has one. For
            models that were trained on canvases of every length: `grammar-masked`, which knows one,
            falls from 98 to 57 % right.
        settled: nats; where no likeliest token of the active block's open slots changed since the
            pass before, and their mean entropy is lower, all are committed. None: never. What
            `end_threshold` and `settled` commit is charged like everything, and may exceed a bound
            of the policy's own.
    """

    block: int | None = within(None, 1, hint="None takes the whole canvas, or the model's own")
    cache: CachePlan | str = "none"
    end_threshold: float | None = within(None, 0, 1, "0.9 is usual, None turns it off")
    drop_suffix: bool = False
    settled: float | None = within(None, hint="0.005 is usual, None turns it off")

    exactness: ClassVar[Exactness] = "relaxed"

    def selector(self, run: CanvasRun, state: SelectorState) -> Selector:
        return self

    def full_selector(self, run: CanvasRun, state: SelectorState) -> Selector:
        """What is committed at a pass: what the selector takes, and early ends."""
        chosen = self.selector(run, state)
        if self.end_threshold is not None:
            chosen = Or(AtLeast(1, chosen), EosThreshold(self.end_threshold))
        if self.settled is not None:
            chosen = Or(chosen, ConvergedBlock(self.settled))
        return chosen

    def open(self, model: Denoiser, prompt: Prompt, length: int, **options: Any) -> CanvasRun:
        run = super().open(model, prompt, length, **options)
        if self.drop_suffix or self.end_threshold is not None:
            stops = prompt.stop_tokens
            if stops is None or not bool((stops < model.vocab_size).any()):
                raise OptionError(
                    "end_threshold, drop_suffix: expected a prompt with stop tokens among the "
                    "model's ids, received none; give the model an end token, or leave both out"
                )
        run.canvas.drop_suffix |= self.drop_suffix
        return run

    def narrow(
        self, run: CanvasRun, predictions: SlotPredictions, state: SelectorState
    ) -> SlotPredictions:
        return predictions

    def decode(self, run: CanvasRun) -> Generation:
        """One whose selector depends on the tokens that were drawn is relaxed."""
        state = SelectorState.of(run)
        selector = self.full_selector(run, state)
        if selector.sees_samples:
            run.stats.exactness = "relaxed"
        with run.interruptible():
            while run.sync():
                predictions = self.narrow(run, run.forward(), state)
                run.commit(predictions, state.choose(selector, predictions))
        return run.generation()
