"""The family of causal LMs: any decoder-only transformers model, as `generate` runs it.

Other families are children of `CausalLM` that change what is different about their models; each is
one file and one line in `mmaccel.catalog.FAMILIES`, or an entry point of another package.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.attach.generate_call import GenerateCall, OwnLoop
from mmaccel.pipelines.attach.patching import original
from mmaccel.pipelines.causal_lm.compatibility import check_causal_lm, drops_cache, is_random
from mmaccel.pipelines.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.causal_lm.self_check import check_windows

_OWN = ("_sample", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation")


class CausalLM:
    """How a kind of model is decoded in windows.

    Attributes:
        name: of the family.
        served: arguments meant for the model's forward that `open` heeds, beside the usual ones.
        known: methods of `GenerationMixin` that models of this family may have of their own.
    """

    name: ClassVar[str] = "causal_lm"
    served: ClassVar[frozenset[str]] = frozenset()
    known: ClassVar[frozenset[str]] = frozenset()

    def check(self, model: Any) -> None:
        """Refuse a model whose `generate` no policy can serve.

        Raises:
            UnsupportedModelError: with what is in the way.
        """
        from transformers import GenerationMixin

        check_causal_lm(model)
        for name in _OWN:
            own: Any = original(model, name)
            is_foreign = own.__func__ is not getattr(GenerationMixin, name)
            if (is_foreign and name not in self.known) or name in vars(model):
                raise UnsupportedModelError(
                    f"model: expected transformers' own {name}, received a {type(model).__name__} "
                    "with another; its generate cannot be served"
                )
        if not is_random(model) and not drops_cache(model):  # else nothing is served, nor compared
            check_windows(model, self.wrap(model))

    def wrap(self, model: Any) -> CausalLMWindow:
        """The model in windows, for a prompt of text alone."""
        return CausalLMWindow(model)

    def open(self, call: GenerateCall) -> CausalLMWindow:
        """The model in windows, for one call."""
        return self.wrap(call.model)

    def own_loop(
        self, model: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> OwnLoop | None:
        """A `generate` call that runs a loop of the model's own, as a task; None if it does not."""
        return None

    def obstacles(self, call: GenerateCall) -> Iterator[str]:
        """What in a call only the original can serve, beside what stands in every family's way."""
        yield from ()
