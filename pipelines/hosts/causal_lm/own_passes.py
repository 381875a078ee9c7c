"""A family whose windows run passes that its models do not have."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.causal_lm.compatibility import ModelFacts, find_training_effect
from mmaccel.pipelines.hosts.causal_lm.family import CausalLM
from mmaccel.samplers.arithmetic import own_arithmetic
from mmaccel.samplers.compare_logits import Tolerance, same_logits

_checked: WeakKeyDictionary[Any, ModelFacts] = WeakKeyDictionary()


class OwnPasses(CausalLM):
    """Such a family; its passes are compared with what a model's own loop or pass computes."""

    takes_own_prompt: ClassVar[bool] = False
    gives_cache: ClassVar[bool] = False
    cause: ClassVar[str] = ""  # why the passes may be others

    @abstractmethod
    def facts(self, model: Any) -> ModelFacts:
        """What is known of a model; raises UnsupportedModelError for one that it cannot serve."""

    @abstractmethod
    def compared(self, model: Any) -> tuple[Tensor, Tensor]:
        """The model's own logits of a few entries, and those of the windows' passes over them."""

    def check(self, model: Any) -> ModelFacts:
        """Cost: once a model, the passes of `compared`."""
        known = _checked.get(model)
        if known is not None:
            return known
        facts = self.facts(model)
        if model.device.type == "meta":
            self.refuse(model, "one on the meta device; load it")
        if find_training_effect(model) is None:
            with own_arithmetic(), torch.no_grad():
                own, received = self.compared(model)
            reason = same_logits(lambda: [own], lambda: [received], Tolerance.of(model.dtype))
            if reason:
                self.refuse(model, f"one whose windows give {reason}{self.cause}")
            _checked[model] = facts
        return facts

    def refuse(self, model: Any, received: str) -> None:
        raise UnsupportedModelError(
            f"model: expected a {type(model).__name__} that windows can serve, received {received}"
        )
