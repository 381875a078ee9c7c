"""The steps of a run: what they hand to each other, and how they are carried out, maybe as graphs.

A replayed step runs no Python: a value reaches the next step only in a tensor that both know,
`Held`. Which of them a run's first pass stores is known after it was carried out once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.model_parts import CapturedBuffers
from mmaccel.results import Stats
from mmaccel.samplers.arithmetic import as_called
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.window.step_runner import (
    Capacity,
    GraphKey,
    Once,
    StaticBuffers,
    StepRunner,
    measure,
)

if TYPE_CHECKING:
    from mmaccel.samplers.window.run import WindowRun

T = TypeVar("T")
_SHORT = 1024  # tokens of prompts; longer ones keep a device busy without a graph


class StaticPart:
    """Base of a run's parts whose tensors named in `static` keep their addresses where steps are
    captured: every run begins with its own values in them. Some may be None in a run.
    """

    static: ClassVar[tuple[str, ...]] = ()


class RunSteps(StaticPart):
    """The steps of one run, and the tensors `[B, ...]` that they hand to each other, by name."""

    static = ("short_prompt",)
    short_prompt: Tensor | None = None  # [R, N], where its prefill is worth a graph
    capacity: Capacity  # of the run's buffers

    def __init__(self, runner: StepRunner, device: torch.device) -> None:
        self.runner = runner
        self.device = device
        self.tensors: dict[str, Tensor] = {}  # those of an earlier run hold what is ignored
        self.names: set[str] = set()  # of what this run has stored so far
        self.buffers = StaticBuffers({})  # what outlives the run
        self._declared: set[str] = set()
        self._n_captures = runner.captures
        self._key: GraphKey | None = None
        self._model: CapturedBuffers | None = None

    def declare(self, name: str) -> Held:
        """A tensor that steps hand to each other; each name is declared once in a run."""
        assert name not in self._declared, name
        self._declared.add(name)
        return Held(self, name)

    def declare_fields(self, cls: Callable[..., T]) -> T:
        """An instance of a dataclass whose fields are all `Held`, and are named after it."""
        owner: Any = cls
        return cls(*(self.declare(f"{owner.__name__} {field.name}") for field in fields(owner)))

    def keep_rows(self, batch_slots: Tensor) -> None:
        """Go on with some batch slots alone, `[n]` int64."""
        self.tensors = {name: value[batch_slots] for name, value in self.tensors.items()}

    def open(self, run: WindowRun) -> None:
        """Find out which graphs a run may share whose prompt, drafter and widths are known."""
        self._key = make_graph_key(run)
        self._model = run.model if isinstance(run.model, CapturedBuffers) else None
        shared = self._key is not None
        most = run.model.max_positions if shared else None
        prompt = run.prompt
        self.capacity = measure(prompt, run.length, rounded=shared, most=most)
        origin = self.capacity.origin
        is_short = run.scheduler is None and len(prompt.tokens) * origin <= _SHORT
        if shared and is_short and self._model is not None and self._model.captures_prompts:
            self.short_prompt = pad(prompt.tokens, (0, origin - prompt.tokens.shape[1]))

    def load(self, run: WindowRun) -> None:
        """Let a run whose steps are captured go on with tensors that outlive it."""
        loaded = self.runner.load(self._key, static_tensors(run))
        if loaded is None:
            return
        self.buffers = loaded
        self.tensors = loaded.state
        parts = static_parts(run)
        noise_tensors = {}
        for name, value in loaded.inputs.items():
            part, _, attribute = name.partition(".")
            if part == "noise":
                noise_tensors[attribute] = value
            else:
                setattr(parts[part], attribute, value)
        run.noise = Noise.over(noise_tensors)

    def run(
        self, step: Callable[[], None], key: Hashable | None, n_passes: int, width: int
    ) -> bool:
        """Carry out as many steps as lie between two synchronisations, captured ones that are all
        alike as one graph; whether each took as long as others like it will. `key` is that of one
        step, and `width` the entries of a row in its pass.
        """
        self.names |= self.buffers.first_state  # where the first step is replayed
        is_usual = True
        model = self._model
        try:
            if n_passes > 1 and self.runner.is_static and not (model and model.steps_differ):

                def steps() -> None:
                    for _ in range(n_passes):
                        step()

                is_usual = self.runner.run_step((key, n_passes), steps)
            else:
                for _ in range(n_passes):
                    does_more = model is not None and model.begin_step(width)
                    step_key = (key, does_more) if does_more and key is not None else key
                    is_usual &= self.runner.run_step(step_key, step)
        except torch.OutOfMemoryError:
            self.runner.free_memory()  # for the next call
            raise
        if isinstance(key, Once):
            self.buffers.first_state = set(self.names)
        return is_usual

    def describe(self, stats: Stats, arithmetic: str, same_bits: bool) -> None:
        """Fill in statistics; without a format, of replays, it is that of the run that captured."""
        self.buffers.arithmetic = arithmetic or self.buffers.arithmetic
        stats.captures = self.runner.captures - self._n_captures
        stats.runner = self.runner.name
        stats.runner_reason = self.runner.reason
        stats.use_dtype(self.buffers.arithmetic, same_bits=same_bits)


class Held:
    """A tensor that a step hands to the next one; see `RunSteps.declare`."""

    __slots__ = ("_name", "_steps")

    def __init__(self, steps: RunSteps, name: str) -> None:
        self._steps = steps
        self._name = name

    @property
    def value(self) -> Tensor | None:
        """What the last step of this run has stored, `[B, ...]`; None before the first."""
        return self._steps.tensors[self._name] if self._name in self._steps.names else None

    def get(self) -> Tensor:
        """`value`, which an earlier step of the run has stored."""
        value = self.value
        assert value is not None, self._name
        return value

    def hold(self, value: Tensor) -> None:
        """Store `[B, ...]`, final, and always of one shape where steps are captured."""
        steps = self._steps
        steps.names.add(self._name)
        stored = steps.tensors.get(self._name)
        if not steps.runner.is_static:
            steps.tensors[self._name] = value
        elif stored is None:  # two that share memory would overwrite each other
            steps.tensors[self._name] = value.clone()
        elif stored is not value:
            stored.copy_(value)

    def room(self, shape: tuple[int, ...]) -> Tensor:
        """A float32 tensor for `hold` to store, in static steps the stored one, read before."""
        steps = self._steps
        stored = steps.tensors.get(self._name) if steps.runner.is_static else None
        if stored is not None:
            return stored
        return torch.empty(shape, device=steps.device, dtype=torch.float32)


def static_parts(run: WindowRun) -> dict[str, StaticPart]:
    return {"run": run, "rows": run.rows, "steps": run.steps}


def static_tensors(run: WindowRun) -> dict[str, Tensor]:
    """Tensors of a run that outlive a step, by part and name, as the run begins with them."""
    tensors = {f"noise.{name}": value for name, value in run.noise.tensors().items()}
    for part, owner in static_parts(run).items():
        for name in owner.static:
            value = getattr(owner, name)
            if value is not None:
                tensors[f"{part}.{name}"] = value
    return tensors


@as_called()
def make_graph_key(run: WindowRun) -> GraphKey | None:
    """The key of a run; None where its graphs cannot serve another: no cache, a logits processor, a
    model without buffers that outlive it, or a policy or layout without a hash.
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
