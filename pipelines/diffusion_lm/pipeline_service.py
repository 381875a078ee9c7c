"""What the services of diffusion models share: attaching, statistics, callbacks, decoded texts.

A service replaces methods of one pipeline or model by methods that decode with a policy. Each
family's service says which methods these are and what its policy must not ask for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from mmaccel.capabilities import Capable, explain, refuse
from mmaccel.contracts import LAYER_METHODS, Layout
from mmaccel.pipelines.attach.fallback import warn_once
from mmaccel.pipelines.attach.layout_processor import check_size
from mmaccel.pipelines.attach.patching import Injection
from mmaccel.pipelines.layers.methods import LayerMethods
from mmaccel.results import Stats

Methods = Mapping[str, Callable[..., Any]]


class PolicyService(Capable):
    """Base of the services of one object.

    Args:
        target: the pipeline, model or denoiser.
        policy: already checked to be of a kind that the target takes.
        seed, strict, layout: see `mmaccel.attach`.
        layer_methods: of the caches and the attention of the target's layers.

    Attributes:
        lacks: words that no object of the kind has, and why.
        history: statistics of all calls, the last one at the end.

    Raises:
        OptionError: a policy or a layout that the target cannot be decoded with.
        UnsupportedModelError: a model that fails its self-check, or whose layers do not carry
            methods.
    """

    slot = "model"
    lacks: ClassVar[Mapping[str, str]] = dict.fromkeys(
        LAYER_METHODS | {"cached canvas"}, "every pass computes the whole canvas"
    )
    adds_methods: ClassVar[bool] = False  # whether the object may lack the methods

    def __init__(
        self,
        target: Any,
        policy: Any,
        seed: int | Sequence[int] | None,
        strict: bool,
        layout: Layout | None,
        layer_methods: LayerMethods,
    ) -> None:
        self.layer_methods = layer_methods
        self.policy, self.seed, self.strict, self.layout = policy, seed, strict, layout
        self.history: list[Stats] = []
        self._target = target
        self._warned = set[str]()
        check_size(layout, self.open())
        refuse(explain(policy, layer_methods, self))

    @classmethod
    def serve(
        cls,
        target: Any,
        policy: Any,
        seed: int | Sequence[int] | None,
        strict: bool,
        layout: Layout | None,
        layer_methods: LayerMethods,
    ) -> tuple[Self, Injection]:
        """Attach a policy to a target.

        Returns:
            The service, and the injection that detaches it.

        Raises:
            OptionError, UnsupportedModelError: see the class.
            AttachError: the target or a part of it has a policy already.
        """
        service = cls(target, policy, seed, strict, layout, layer_methods)
        injection = Injection()
        try:
            for part, methods in service.methods():
                injection.add(part, methods, new=cls.adds_methods)
        except Exception:
            injection.remove()
            raise
        return service, injection

    def open(self) -> int | None:
        """Check the policy and find the target's parts.

        Returns:
            Ids of the model, which a layout must have too; None where this is not known.
        """
        raise NotImplementedError

    @property
    def model(self) -> Any:
        """What is attached to."""
        return self._target

    def lack(self, word: str, part: Any = None) -> str:
        """See `mmaccel.capabilities.Capable`."""
        return self.lacks.get(word, "")

    def methods(self) -> list[tuple[Any, Methods]]:
        """Objects, each with the methods that replace its own; these take the object first."""
        raise NotImplementedError

    def record(self, stats: Stats) -> None:
        """Append a call's statistics, and warn of a new reason for running without the policy."""
        self.history.append(stats)
        for reason in stats.fallbacks:
            warn_once(reason, self._warned)


def callback_tensors(given: Mapping[str, Any], default: Sequence[str]) -> list[str]:
    """Names of the tensors that a pipeline call's step callback asks for."""
    names = given.get("callback_on_step_end_tensor_inputs")
    names = getattr(given.get("callback_on_step_end"), "tensor_inputs", names)
    return list(default if names is None else names)


def check_inputs(pipe: Any, given: Mapping[str, Any]) -> None:
    """Run a pipeline's own checks of a call's arguments; their ValueError reaches the caller."""
    names = inspect.signature(pipe.check_inputs).parameters
    pipe.check_inputs(**{name: given[name] for name in names})


def decode_texts(decoder: Any, sequences: Tensor, end: int | None) -> list[str]:
    """Texts of `[B, L]` int64 sequences, each up to and with its first end token."""
    lengths = count_to_end(sequences, -1 if end is None else end).tolist()
    rows = [row[:n] for row, n in zip(sequences, lengths)]
    texts: list[str] = decoder.batch_decode(rows, skip_special_tokens=True)
    return texts


def count_to_end(tokens: Tensor, ends: int | Tensor) -> Tensor:
    """`[B]` int64: slots of `[B, L]` tokens up to and with the first end token, or all L."""
    length = tokens.shape[1]
    index = torch.arange(length, device=tokens.device)
    is_end = torch.isin(tokens, ends)
    return torch.where(is_end, index + 1, length).amin(1)
