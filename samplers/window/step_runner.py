"""Step runners: how the forward passes of a window run are carried out.

A step is one forward pass of a window sampler with everything around it: drafts, model, sampling,
acceptance, counters. It reads nothing back to the host, its shapes depend on its width alone, and
the tensors it shares with other steps keep their addresses for the whole run. A runner may
therefore capture it once per width and replay it from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from mmaccel.contracts import Layout, Prompt, TokenModel
from mmaccel.samplers.sampling_params import SamplingParams

_STEP = 64  # capacities are rounded up to it, so that prompts of many lengths share graphs


class Capacity(NamedTuple):
    """Size of a run: columns before slot 0, slots, and positions of the model's cache."""

    origin: int
    slots: int
    positions: int


def measure(
    prompt: Prompt, length: int, *, rounded: bool = False, most: int | None = None
) -> Capacity:
    """The capacity that a run needs.

    Args:
        prompt: what stands before slot 0.
        length: slots wanted.
        rounded: round up, so that other prompts and lengths fit too.
        most: the model's positions, if known. Rounding never goes beyond them.
    """
    origin = prompt.tokens.shape[1]
    needed = prompt.tokens.shape[1] + length - 1
    if not rounded:
        return Capacity(origin, length, needed)  # the last token is never processed
    origin, slots = (-(-n // _STEP) * _STEP for n in (origin, length))
    positions = origin + slots - 1
    return Capacity(origin, slots, positions if most is None else max(needed, min(positions, most)))


class Once(NamedTuple):
    """Key of a step that every run carries out once: its prompt, or its first pass."""

    kind: str
    width: int


class GraphKey(NamedTuple):
    """What two runs must have in common so that one can replay the other's graphs.

    A graph holds all of this as constants or as addresses. Seeds, prompts, their lengths, the
    number of slots wanted and the ids of stop tokens are static inputs instead, and may differ.

    Attributes:
        model: the module whose forward passes these are.
        model_state: where its parameters and buffers live; see `CapturedBuffers.graph_key`.
        options: what else a graph holds of the token model, and the settings of torch.
        policy, sampling_params, layout: of the run.
        batch, branches: rows of the prompt and guidance branches.
        n_stops: number of stop tokens; None where the prompt has none.
        capacity: columns of the prompt, slots and positions, rounded up.
        widest: the widest window there will be.
        drafts: the draft source.
        draft_weights: what a graph reads of the drafter, see `Drafter.weights`; None for nothing.
        has_callback: whether a callback is called after every step; counters then are updated
            outside the step.
        is_refilled: whether a row may begin while others are decoded.
        sync_every: steps between two synchronisations with the host.
        device: of the run's tensors.
    """

    model: ref[Any]
    model_state: Hashable
    options: Hashable
    policy: object
    sampling_params: SamplingParams
    layout: Layout | None
    batch: int
    branches: int
    n_stops: int | None
    capacity: Capacity
    widest: int
    drafts: Hashable
    draft_weights: ref[Any] | None
    has_callback: bool
    is_refilled: bool
    sync_every: int
    device: torch.device


@dataclass
class StaticBuffers:
    """The tensors that the graphs of one key read and write.

    Attributes:
        inputs: by name, what a run declares in `static_inputs`; every run begins with its own
            values in them.
        state: by name, what a step hands to the next one; empty before the first step.
        model: by name, buffers of the token model; None until they are reserved.
        first_state: names of `state` that a run's first pass stores.
        n_behind: by the key of a step, entries of all rows that its pass has beside the window.
        arithmetic: number format of the passes; empty before the end of the first run.
    """

    inputs: dict[str, Tensor]
    state: dict[str, Tensor] = field(default_factory=dict)
    first_state: set[str] = field(default_factory=set)
    n_behind: dict[Hashable, int] = field(default_factory=dict)
    model: dict[str, Any] | None = None
    arithmetic: str = ""


class StepRunner:
    """Carries out the steps of one run at a time; this one runs every step as Python.

    Args:
        sync_every: steps between two synchronisations with the host, at least 1.
        reason: why steps are not captured; empty where nobody asked for it.

    Attributes:
        is_static: whether steps are captured, so that every tensor of a run must keep its address
            and its window should not narrow at a row's end.
        has_cache: whether later runs of the same key replay the graphs.
        captures: steps captured so far, without those that runs have once each (`Once`).
    """

    is_static = False
    has_cache = False
    captures = 0

    def __init__(self, sync_every: int = 1, reason: str = "") -> None:
        self.sync_every = sync_every
        self.reason = reason

    @property
    def name(self) -> str:
        """What statistics call it."""
        return "eager"

    def load(self, key: GraphKey | None, inputs: dict[str, Tensor]) -> StaticBuffers | None:
        """Start a run.

        Args:
            key: which graphs it may share; None for those of this run alone.
            inputs: by name, tensors with which the run begins.

        Returns:
            The buffers, with the values of `inputs` in them, which the run uses from now on; None
            if it may use its own tensors.
        """
        return None

    def reserve(self, model: TokenModel, rows: int, positions: int) -> None:
        """Reserve the key/value cache of the run's token model, in the static buffers."""
        model.reserve(rows, positions)

    def run_step(self, key: Hashable | None, step: Callable[[], None]) -> bool:
        """Carry out a step.

        Args:
            key: steps with the same key are the same work on the same tensors, those of one run,
                and with a `Once` those of runs with the same `GraphKey`; None for a step like no
                other.
            step: the step, run as it is or captured.

        Returns:
            Whether the step took as long as others with this key will: capturing takes longer.
        """
        step()
        return True

    def finish(self) -> None:
        """End a run that has all its tokens; the next run may replay its graphs."""

    def free_memory(self) -> bool:
        """Drop the graphs of other runs to free memory; returns whether there were any."""
        return False
