"""Step runners: how the forward passes of a window run are carried out.

A step is one forward pass with all around it. It reads nothing back to the host, its shapes depend
on its width alone, and tensors that it shares with other steps keep their addresses: a runner may
capture it once per width and replay it.
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
    """Size of a run."""

    origin: int  # columns before slot 0
    slots: int
    positions: int  # of the model's cache


def measure(
    prompt: Prompt, length: int, *, rounded: bool = False, most: int | None = None
) -> Capacity:
    """The capacity that a run of `length` slots needs; `rounded` up, so that other prompts and
    lengths fit too, but never beyond `most`, the model's positions.
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
    """What two runs must have in common so that one can replay the other's graphs: its constants
    and addresses. Seeds, prompts, lengths and stop tokens are static inputs.
    """

    model: ref[Any]  # the module whose forward passes these are
    model_state: Hashable  # where its parameters and buffers live, `CapturedBuffers.graph_key`
    options: Hashable  # what else a graph holds of the token model, and the settings of torch
    policy: object
    sampling_params: SamplingParams
    layout: Layout | None
    batch: int
    branches: int
    n_stops: int | None
    capacity: Capacity  # rounded up
    widest: int
    drafts: Hashable
    draft_weights: ref[Any] | None  # what a graph reads of the drafter, `Drafter.weights`
    has_callback: bool  # then counters are updated outside the step
    is_refilled: bool  # whether a row may begin while others are decoded
    sync_every: int
    device: torch.device


@dataclass
class StaticBuffers:
    """The tensors, by name, that the graphs of one key read and write."""

    inputs: dict[str, Tensor]  # every run begins with its own values in them
    state: dict[str, Tensor] = field(default_factory=dict)  # what a step hands to the next one
    first_state: set[str] = field(default_factory=set)  # what of it a run's first pass stores
    n_behind: dict[Hashable, int] = field(default_factory=dict)  # by step, as `RunPasses.n_behind`
    model: dict[str, Any] | None = None  # of the token model; None until they are reserved
    arithmetic: str = ""  # number format of the passes; empty before the end of the first run


class StepRunner:
    """Carries out the steps of one run at a time; this one runs every step as Python.

    Args:
        sync_every: steps between two synchronisations with the host, at least 1.
        reason: why steps are not captured; empty where nobody asked for it.
    """

    is_static = False  # captured: tensors keep their addresses, and no window narrows at an end
    has_cache = False  # whether later runs of the same key replay the graphs
    captures = 0  # so far, without those that runs have once each (`Once`)

    def __init__(self, sync_every: int = 1, reason: str = "") -> None:
        self.sync_every = sync_every
        self.reason = reason

    @property
    def name(self) -> str:
        """What statistics call it."""
        return "eager"

    def load(self, key: GraphKey | None, inputs: dict[str, Tensor]) -> StaticBuffers | None:
        """Start a run: buffers with the values of `inputs`, by name, which the run uses from now
        on, or None if it may use its own. Without a `key` it shares no graphs.
        """
        return None

    def reserve(self, model: TokenModel, rows: int, positions: int) -> None:
        """Reserve the key/value cache of the run's token model, in the static buffers."""
        model.reserve(rows, positions)

    def run_step(self, key: Hashable | None, step: Callable[[], None]) -> bool:
        """Carry out a step; whether it took as long as others like it will. Steps with the same key
        are the same work on the same tensors, those of one run, and with a `Once` those of runs
        with the same `GraphKey`; None is a step like no other.
        """
        step()
        return True

    def finish(self) -> None:
        """End a run that has all its tokens; the next run may replay its graphs."""

    def free_memory(self) -> bool:
        """Drop the graphs of other runs to free memory; whether there were any."""
        return False
