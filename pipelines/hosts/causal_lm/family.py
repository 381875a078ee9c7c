"""The family of causal LMs: any decoder-only transformers model, as `generate` runs it.

Another is a child class that overrides what differs: one file, and one line in
`mmaccel.catalog.FAMILIES` or an entry point of another package.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor

from mmaccel.contracts import Layout, Prompt
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.causal_lm.compatibility import (
    UNSERVED,
    ModelFacts,
    find_facts,
    find_training_effect,
)
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.causal_lm.self_check import check_windows, has_passed
from mmaccel.pipelines.hosts.generate_call import SAMPLE, GenerateCall, Table, Task
from mmaccel.pipelines.hosts.original_methods import has_own, original

_PREPARE = "prepare_inputs_for_generation"
_LIKE_THE_USUAL = {  # beyond the positions of `find_position_limit`, or in the first pass
    f"Phi3ForCausalLM.{_PREPARE}",
    f"PhimoeForCausalLM.{_PREPARE}",
    f"Gemma3ForConditionalGeneration.{_PREPARE}",  # leaves token types to the first pass
}
_OWN = ("_sample", _PREPARE, "_update_model_kwargs_for_generation")


class CausalLM:
    """How a kind of model is decoded in windows."""

    name: ClassVar[str] = "causal_lm"
    arguments: ClassVar[Table] = SAMPLE  # what becomes of each argument of the model's forward
    known: ClassVar[frozenset[str]] = frozenset()  # methods of `GenerationMixin` it may override
    takes_own_prompt: ClassVar[bool] = True  # whether windows go on from the model's own prefill
    gives_cache: ClassVar[bool] = True  # whether transformers' cache can come from a window
    of_tokens: ClassVar[frozenset[str]] = frozenset()  # outputs of steps that tokens tell
    # whether calls are parts of one work, as frames of speech: each then has noise of its own
    repeats_calls: ClassVar[bool] = False

    def check(self, model: Any) -> ModelFacts:
        """The facts of a model; refuses one whose `generate` no policy can serve. Cost: the first
        call runs a self-check of a few tokens; later ones look whether the model has changed.
        """
        facts = find_facts(model)
        self._check_loop(model)
        if not has_passed(model) and find_training_effect(model) is None:
            check_windows(model, self.wrap(model))
        return facts

    def _check_loop(self, model: Any) -> None:
        from transformers import GenerationMixin

        for name in _OWN:
            method: Any = original(model, name)
            is_foreign = method.__func__ is not getattr(GenerationMixin, name) and not (
                method.__func__.__qualname__ in _LIKE_THE_USUAL
                and method.__func__.__module__.startswith("transformers.models.")
            )
            if (is_foreign and name not in self.known) or has_own(model, name):
                raise UnsupportedModelError(
                    f"model: expected one whose generate runs transformers' own {name}, received a "
                    f"{type(model).__name__} with another; {UNSERVED}"
                )

    def placeholders(self, model: Any) -> frozenset[int]:
        """Ids that stand for a part of an image or a video in a model's prompts."""
        return frozenset()

    def wrap(self, model: Any) -> CausalLMWindow:
        """A window for a prompt of text alone."""
        return CausalLMWindow(model)

    def open(self, call: GenerateCall) -> CausalLMWindow:
        return self.wrap(call.model)

    def layout(self, model: Any) -> Layout | None:
        """What is known of the slots of every call where the caller says nothing."""
        return None

    def prompt(self, call: GenerateCall) -> Prompt:
        return call.prompt()

    def own_loop(self, model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Task | None:
        """A `generate` call that runs the model's own loop, as a task; None for any other call."""
        return None

    def sample_loop(self, call: GenerateCall) -> Task | None:
        """A call of `_sample` whose rows are not those of a prompt, as a task; None for others."""
        return None

    def make_steps(self, model: Any, tokens: Tensor) -> dict[str, tuple[Any, ...]]:
        """What transformers' loop returns of each step of tokens `[B, L]` int64, by `of_tokens`."""
        return {}

    def obstacles(self, call: GenerateCall) -> Iterator[str]:
        """Why only the original can serve a call."""
        yield from ()
