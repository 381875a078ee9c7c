"""Contracts of what a run is given beside its model and prompt: policies and methods.

Shapes: see `mmaccel.contracts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, get_args

from torch import Tensor

from mmaccel.capabilities import Capable
from mmaccel.checks import Checked, check_int, show
from mmaccel.contracts import Denoiser, Prompt, TokenModel
from mmaccel.errors import OptionError
from mmaccel.results import Exactness, Generation, OnStep


class Policy(Protocol):
    """A frozen dataclass whose fields are the configuration."""

    exactness: ClassVar[Exactness]

    def sample(
        self,
        model: TokenModel,
        prompt: Prompt,
        length: int,
        *,
        params: Any,
        noise: Any,
        on_step: OnStep | None = None,
    ) -> Generation:
        """Generate up to `length` tokens for every row of `prompt`, with `SamplingParams` and the
        `Noise` of the prompt's rows, the only source of randomness.
        """


@dataclass(frozen=True)
class CanvasProgress:
    """State that `on_step` receives after every pass.

    Attributes:
        tokens: `[B, L]` int64; a copy. Slots that are not committed hold no meaningful token.
        is_committed: `[B, L]` bool.
        lengths, previous: `[B]` int64, slots that hold a token and count, now and before this pass.
        passes: passes so far.
        nats: `[B]` float64, spent so far; a copy. See `mmaccel.samplers.divergence`.
        rows: the row of the prompt in each of the B batch slots under `ContinuousBatching`; else
            None.
    """

    tokens: Tensor
    is_committed: Tensor
    lengths: Tensor
    previous: Tensor
    passes: int
    nats: Tensor
    rows: tuple[int, ...] | None = None


OnCanvasStep = Callable[[CanvasProgress], Tensor | None]
"""Called after every pass. It may return `[B]` int64, the number of slots each row is cut to; None
changes nothing. An exception from it stops the run and reaches the caller."""


class CanvasPolicy(Protocol):
    """A frozen dataclass whose fields are the configuration; `kind` is "canvas"."""

    kind: ClassVar[str]

    @property
    def exactness(self) -> Exactness:
        """The guarantee; a property, as it may depend on the fields."""

    def sample(
        self,
        model: Denoiser,
        prompt: Prompt,
        length: int,
        *,
        params: Any,
        noise: Any,
        on_step: OnCanvasStep | None = None,
    ) -> Generation:
        """Fill `length` slots of every row of `prompt`. Randomness comes from `noise` alone.

        CanvasInterrupt is raised instead of KeyboardInterrupt, with what was committed.
        """


class CanvasInterrupt(KeyboardInterrupt):
    """An interrupt that carries what was committed before it; other tokens are the mask token."""

    def __init__(self, generation: Generation, is_committed: Tensor) -> None:
        super().__init__("interrupted; the error's `generation` holds what was committed")
        self.generation, self.is_committed = generation, is_committed


def check_window(window: Any, *, adaptive: bool) -> None:
    """Raise OptionError unless `window` is in 1..4096, or "adaptive" where that is allowed."""
    if not (adaptive and isinstance(window, str) and window == "adaptive"):
        other = ', and "adaptive" chooses' if adaptive else ""
        check_int("window", window, 1, 4096, hint=f"16 to 64 suits most{other}")


class Method(Checked, Capable):
    """Base of what a slot of `attach` takes beside a policy; `slot` is the keyword of `attach`."""


def check_method(slot: str, method: object, base: type, example: str) -> Any:
    """The method of a slot, a child of `base`; OptionError for anything else, with its own slot."""
    if isinstance(method, base):
        return method
    remedy = f"give an instance of a method of {slot}"
    if isinstance(method, Method):
        remedy = f"{type(method).__name__} goes into {method.slot}="
    raise OptionError(
        f"{slot}: expected a method such as {example}, received {show(method)}; {remedy}"
    )


def check_policy(policy: Any, kind: str = "window") -> None:
    has_exactness = getattr(policy, "exactness", None) in get_args(Exactness)
    can_sample = callable(getattr(policy, "sample", None)) and not isinstance(policy, type)
    is_policy = has_exactness and can_sample
    decodes = getattr(policy, "kind", "window")
    if not is_policy or decodes != kind:
        example = "Jacobi(window=32)" if kind == "window" else "LosslessUnmask()"
        remedy = f"it is for a {decodes}, take" if is_policy else "make an instance of"
        what = f"expected a policy such as mmaccel.{example}, received {show(policy)}; {remedy}"
        raise OptionError(f"policy: {what} one of the classes that mmaccel offers for a {kind}")
