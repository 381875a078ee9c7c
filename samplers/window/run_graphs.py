"""RunGraphs: static buffers of a run, and how its steps are carried out as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.model_parts import CapturedBuffers
from mmaccel.results import Stats
from mmaccel.samplers.arithmetic import as_called
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.window.rows import measure
from mmaccel.samplers.window.step_runner import GraphKey, Once, StaticBuffers
from mmaccel.samplers.window.step_state import StaticPart, StepState

if TYPE_CHECKING:
    from mmaccel.samplers.window.run import WindowRun

_SHORT = 1024  # tokens of prompts; longer ones keep a device busy without a graph


class RunGraphs(StaticPart):
    """The steps of one run.

    Args:
        run: whose prompt, drafter and widths are known.

    Attributes:
        capacity: of the run's buffers.
        short_prompt: `[R, N]`, a prompt whose prefill is worth a graph; None for long ones and
            without graphs.
        buffers: what outlives the run; empty ones where nothing does.
    """

    static = ("short_prompt",)

    def __init__(self, run: WindowRun) -> None:
        self.runner = run.runner
        self._key = make_graph_key(run)
        self._n_captures = self.runner.captures
        self.buffers = StaticBuffers({})
        self.short_prompt: Tensor | None = None
        self._model = run.model if isinstance(run.model, CapturedBuffers) else None
        prompt = run.prompt
        if self._key is None:
            self.capacity = measure(prompt, run.length)
            return
        self.capacity = self._key.capacity
        origin = self.capacity.origin
        is_captured = self._model is not None and self._model.captures_prompts
        if is_captured and run.scheduler is None and len(prompt.tokens) * origin <= _SHORT:
            self.short_prompt = pad(prompt.tokens, (0, origin - prompt.tokens.shape[1]))

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
        state.tensors = loaded.state
        found: dict[str, dict[str, Tensor]] = {}
        for name, value in loaded.inputs.items():
            part, _, own = name.partition(".")
            found.setdefault(part, {})[own] = value
        static_noise = Noise.over(found.pop("noise"))
        for part, inputs in found.items():
            parts[part].use_static(inputs)
        return static_noise

    def run_steps(
        self,
        step: Callable[[], None],
        key: Hashable | None,
        n_passes: int,
        state: StepState,
        width: int,
    ) -> bool:
        """Carry out as many steps as lie between two synchronisations with the host.

        Args:
            step: one of them.
            key: see `StepRunner.run_step`.
            n_passes: how many.
            width: entries of a row in the pass of each.

        Returns:
            Whether each took as long as others like it will.
        """
        state.names |= self.buffers.first_state  # where the first step is replayed
        is_usual = True
        try:
            for _ in range(n_passes):
                does_more = self._model is not None and self._model.begin_step(width)
                own = (key, does_more) if does_more and key is not None else key
                is_usual &= self.runner.run_step(own, step)
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


@as_called()
def make_graph_key(run: WindowRun) -> GraphKey | None:
    """The key of a run; None where its graphs cannot serve another one.

    That is so without a cache, with a logits processor, for a model without `CapturedBuffers` or
    whose buffers serve this run alone, and for a policy or layout that is no frozen dataclass of
    hashable fields.
    """
    runner = run.runner
    model = run.model
    prompt = run.prompt
    layout = prompt.layout
    drafter = run.drafter
    if not runner.has_cache or run.params.processor is not None:
        return None
    if not isinstance(model, CapturedBuffers) or not model.serves_later_runs:
        return None
    if not (_is_frozen(run.policy) and (layout is None or _is_frozen(layout))):
        return None
    module, state, options = model.graph_key()
    key = GraphKey(
        ref(module),
        state,
        options,
        run.policy,
        run.params,
        layout,
        prompt.batch,
        prompt.branches,
        None if prompt.stop_tokens is None else len(prompt.stop_tokens),
        measure(prompt, run.length, rounded=True, most=run.model.max_positions),
        run.chooser.widest,
        drafter.source,
        None if drafter.weights is None else ref(drafter.weights),
        run.on_step is not None,
        run.scheduler is not None,
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
