"""RunGraphs: static buffers of a run, and how its steps are carried out as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.contracts import Prompt, TokenModel
from mmaccel.results import Stats
from mmaccel.samplers.arithmetic import as_called
from mmaccel.samplers.drafting.contract import Drafter, DraftingPolicy
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.rows import Capacity, measure
from mmaccel.samplers.window.step_runner import (
    GraphKey,
    GraphModel,
    Once,
    StaticBuffers,
    StepRunner,
)
from mmaccel.samplers.window.step_state import StaticPart, StepState

_SHORT = 1024  # tokens of prompts; longer ones keep a device busy without a graph


class RunGraphs(StaticPart):
    """The steps of one run.

    Args:
        runner: carries them out.
        key: which graphs the run may share; None for its own alone.
        prompt: of the rows.
        length: slots wanted.
        is_refilled: whether a row may begin while others are decoded.

    Attributes:
        capacity: of the run's buffers.
        short_prompt: `[R, N]`, a prompt whose prefill is worth a graph; None for others.
        buffers: what outlives the run; empty ones where nothing does.
    """

    static = ("short_prompt",)

    def __init__(
        self,
        runner: StepRunner,
        key: GraphKey | None,
        prompt: Prompt,
        length: int,
        *,
        is_refilled: bool,
    ) -> None:
        self.runner = runner
        self.short_prompt = None if is_refilled else _find_short_prompt(key, prompt)
        self.capacity: Capacity = measure(prompt, length) if key is None else key.capacity
        self.buffers = StaticBuffers({})
        self._key = key
        self._n_captures = runner.captures

    def load(self, parts: Mapping[str, StaticPart], noise: Noise, state: StepState) -> Noise:
        """Begin a run whose steps are captured: it goes on with tensors that outlive it.

        Args:
            parts: of the run, by name.
            noise: of the run, with the values that it begins with. It stays as it is.
            state: of the run. What the last step of another one left there is ignored.

        Returns:
            The noise in such tensors.
        """
        loaded = self.runner.load(self._key, static_tensors(parts, noise))
        if loaded is None:
            return noise
        self.buffers = loaded
        state.use(loaded.state)
        found: dict[str, dict[str, Tensor]] = {}
        for name, value in loaded.inputs.items():
            part, _, own = name.partition(".")
            found.setdefault(part, {})[own] = value
        static_noise = Noise.over(found.pop("noise"))
        for part, inputs in found.items():
            parts[part].use_static(inputs)
        return static_noise

    def run_steps(
        self, step: Callable[[], None], key: Hashable | None, n_passes: int, state: StepState
    ) -> bool:
        """Carry out as many steps as lie between two synchronisations with the host.

        Args:
            step: one of them.
            key: see `StepRunner.run_step`.
            n_passes: how many.

        Returns:
            Whether each took as long as others like it will.
        """
        state.names |= self.buffers.first_state  # where the first step is replayed
        is_usual = True
        try:
            for _ in range(n_passes):
                is_usual &= self.runner.run_step(key, step)
        except torch.OutOfMemoryError:
            self.runner.free_memory()  # for the next call
            raise
        if isinstance(key, Once):
            self.buffers.first_state = set(state.names)
        return is_usual

    def describe(self, stats: Stats, arithmetic: str, same_bits: bool) -> None:
        """Fill in the statistics how the steps were carried out, and the number format that passes
        had, if they were not all replayed: replays of other runs have it too.
        """
        self.buffers.arithmetic = arithmetic or self.buffers.arithmetic
        stats.captures = self.runner.captures - self._n_captures
        stats.runner = self.runner.name
        stats.runner_reason = self.runner.reason
        stats.use_dtype(self.buffers.arithmetic, same_bits=same_bits)


def static_tensors(parts: Mapping[str, StaticPart], noise: Noise) -> dict[str, Tensor]:
    """Tensors of a run that outlive a step, by part and name, as the run begins with them."""
    found = {f"noise.{name}": value for name, value in noise.tensors().items()}
    for part, owner in parts.items():
        found |= {f"{part}.{name}": value for name, value in owner.static_inputs().items()}
    return found


def _find_short_prompt(key: GraphKey | None, prompt: Prompt) -> Tensor | None:
    """`[R, N]`, a prompt whose prefill is worth a graph; None for long ones and without graphs."""
    if key is None or len(prompt.tokens) * key.capacity.origin > _SHORT:
        return None
    return pad(prompt.tokens, (0, key.capacity.origin - prompt.tokens.shape[1]))


@as_called()
def make_graph_key(
    runner: StepRunner,
    policy: DraftingPolicy,
    model: TokenModel,
    prompt: Prompt,
    length: int,
    params: SamplingParams,
    *,
    widest: int,
    drafter: Drafter,
    has_callback: bool,
    is_refilled: bool,
) -> GraphKey | None:
    """The key of a run; None where its graphs cannot serve another one.

    That is so without a cache, with a logits processor, for a model that is no `GraphModel`, and
    for a policy or layout that is no frozen dataclass of hashable fields.
    """
    layout = prompt.layout
    if not runner.has_cache or params.processor is not None or not isinstance(model, GraphModel):
        return None
    if not (_is_frozen(policy) and (layout is None or _is_frozen(layout))):
        return None
    module, state, options = model.graph_key()
    n_stops = None if prompt.stop_tokens is None else len(prompt.stop_tokens)
    capacity = measure(prompt, length, rounded=True, most=model.max_positions)
    weights = None if drafter.weights is None else ref(drafter.weights)
    key = GraphKey(
        ref(module),
        state,
        options,
        policy,
        params,
        layout,
        prompt.batch,
        prompt.branches,
        n_stops,
        capacity,
        widest,
        drafter.source,
        weights,
        has_callback,
        is_refilled,
        runner.sync_every,
        prompt.tokens.device,
    )
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _is_frozen(item: Any) -> bool:
    return bool(getattr(getattr(type(item), "__dataclass_params__", None), "frozen", False))
