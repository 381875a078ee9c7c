"""Engines: whether the passes of a call run one by one or as a captured step, and why."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from mmaccel.canvas_contracts import kind_of
from mmaccel.contracts import Policy, Prompt, TokenModel
from mmaccel.errors import MissingBackendError, OptionError, UnsupportedModelError
from mmaccel.kernels import dispatch
from mmaccel.pipelines.graph_steps import GraphSteps
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.kept_runs import Shelf
from mmaccel.samplers.steps import Eager, Steps

ENGINES = ("auto", "eager", "graph")


@dataclass(frozen=True)
class Engine:
    """How passes are carried out.

    Args:
        kind: "eager" runs every pass as it is; "graph" captures one per window width in a CUDA
            graph and replays it, and raises where it cannot; "auto" takes "graph" where it can be
            had, and says in `Stats.engine_reason` why not.
        sync_every: captured passes between two looks of the host at what they made. With more
            than 1 the device never waits for the host, but up to `sync_every - 1` passes behind the
            last token do nothing.

    Attributes:
        shelf: keeps the buffers and graphs of the latest two kinds of runs, for calls to come.

    Raises:
        OptionError: another kind, or less than 1.
    """

    kind: str = "auto"
    sync_every: int = 1
    shelf: Shelf = field(default_factory=Shelf, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in ENGINES:
            raise OptionError(
                f"engine: expected one of {', '.join(ENGINES)}, received {self.kind!r}; auto "
                "takes the fastest that works"
            )
        n = self.sync_every
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise OptionError(f"sync_every: expected an integer >= 1, received {n!r}; try 4")

    def check(self, device: torch.device | str, policy: Policy | None = None) -> None:
        """Refuse early what "graph" can never serve.

        Raises:
            MissingBackendError: the model is on no CUDA device; or kernels that MMACCEL_KERNELS
                asks for cannot run.
            OptionError: a policy whose passes cannot be captured; or a bad MMACCEL_KERNELS.
        """
        dispatch.check(str(device).split(":")[0])
        if self.kind != "graph":
            return
        if not str(device).startswith("cuda"):
            raise MissingBackendError(
                f"engine='graph': expected a model on a CUDA device, received one on {device}; "
                'move it with model.to("cuda"), or set engine="auto"'
            )
        if policy is not None and not is_capturable(policy):
            raise OptionError(
                f"engine='graph': expected a policy whose passes can be captured, received "
                f'{policy!r}, which waits for the host; set engine="auto"'
            )

    def close(self) -> None:
        """Let go of what is kept for calls to come; the engine may be used on."""
        self.shelf.clear()

    def prepare(self, window: Any, prompt: Prompt, policy: Any, filters: Filters) -> None:
        """Give a model in windows the steps of its next call; see `steps`. Passes over a canvas
        are carried out one by one.

        Raises:
            UnsupportedModelError: "graph", and a model that fills a canvas; and as `steps`.
        """
        if kind_of(window) == "canvas":
            dispatch.check(window.device.type)
            if self.kind == "graph":
                raise UnsupportedModelError(
                    "engine='graph': expected a model that is decoded in windows, received a "
                    f"{type(window).__name__}, whose canvas is filled pass by pass; "
                    'set engine="auto"'
                )
            return
        steps = self.steps(window, prompt, policy, filters)
        if hasattr(window, "steps"):
            window.steps = steps

    def steps(self, window: TokenModel, prompt: Prompt, policy: Policy, filters: Filters) -> Steps:
        """What carries out the passes of a call.

        Raises:
            MissingBackendError, OptionError: as `check`.
            UnsupportedModelError: "graph", and this call cannot be captured.
        """
        self.check(window.device, policy)
        if self.kind == "eager":
            return Eager(self.sync_every)
        reason = find_obstacle(window, prompt, policy, filters)
        if reason is None:
            gives_up = self.kind == "auto"
            return GraphSteps(window.device, self.sync_every, gives_up, self.shelf)
        if self.kind == "graph":
            raise UnsupportedModelError(
                f"engine='graph': expected a call whose passes can be captured, received one with "
                f'{reason}; set engine="auto"'
            )
        return Eager(self.sync_every, reason)


def is_capturable(policy: Policy) -> bool:
    """Whether a policy says that its passes never wait for the host."""
    return bool(getattr(policy, "is_capturable", False))


def find_obstacle(
    window: TokenModel, prompt: Prompt, policy: Policy, filters: Filters
) -> str | None:
    """What keeps the passes of a call from being captured; None if nothing does.

    Cost: at the first call for a model, two passes over two made-up tokens.
    """
    if window.device.type != "cuda":
        return f"the model on {window.device}; graphs need a CUDA device"
    if not is_capturable(policy):
        return f"{type(policy).__name__}, whose passes wait for the host"
    if not hasattr(window, "steps"):
        return f"a {type(window).__name__}, which knows no captured steps"
    if filters.processor is not None:
        return "logits processors, which may wait for the host"
    model = getattr(window, "model", window)
    places = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(places) > 1:
        return f"a model spread over {len(places)} devices"
    return _trial(window, model, prompt)


_TRIED: WeakKeyDictionary[Any, dict[Hashable, str | None]] = WeakKeyDictionary()


def _trial(window: TokenModel, model: Any, prompt: Prompt) -> str | None:
    """Whether a forward pass of the model waits for the host."""
    kind = getattr(window, "kind", None)  # another attention or stride may wait where this does not
    tried = _TRIED.setdefault(model, {})
    own = (getattr(model, "dtype", None), None if kind is None else kind())
    if own in tried:
        return tried[own]
    rows = prompt.tokens.shape[0]
    tokens = prompt.tokens[:, :1].clamp(min=0).expand(-1, 2)
    start = prompt.lengths.new_zeros(rows)
    window.reserve(rows, 3)
    window.forward(tokens, start)  # what is set up once may wait
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        window.forward(tokens, start)
        reason = None
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        reason = f"a {type(model).__name__}, whose forward waits for the host"
    finally:
        torch.cuda.set_sync_debug_mode(before)
    tried[own] = reason
    return reason
