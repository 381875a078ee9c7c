"""Moving a loaded pipeline: `to` another device or dtype, and parts that wait on the CPU.

What a model's wrapper has computed from its weights, and captured passes, are made anew then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from mmaccel.checks import show
from mmaccel.errors import MissingBackendError, OptionError, UnsupportedModelError
from mmaccel.pipelines.hosts.causal_lm.compatibility import find_device
from mmaccel.pipelines.hosts.causal_lm.quantization import find_quantization
from mmaccel.pipelines.hosts.loading.placement import (
    AUTO,
    DTYPES,
    check_accelerate,
    choose_device,
    choose_placement,
)
from mmaccel.pipelines.hosts.runner.engine import Engine, UseGraphs
from mmaccel.samplers.run_lock import alone

_NAMES = {name for names in DTYPES.values() for name in names}


@dataclass(frozen=True)
class Part:
    """A part of a pipeline."""

    module: Any  # an `nn.Module`, or an object with a `to(device, dtype)` of its own
    keeps_float32: bool = False  # whatever the dtype of the pipeline


def find_parts(owner: Any) -> dict[str, Part]:
    """The parts of an image, speech or video model by name, in the order in which they compute.

    The token model (`window`), and the owner's attributes that are modules, or what its `parts`
    says; those in its `float32_parts` stay in float32.
    """
    if hasattr(owner, "parts"):
        parts: dict[str, Part] = owner.parts()
        return parts
    model = owner.window.model
    keeps = getattr(owner, "float32_parts", ())
    others = {
        name: Part(value, name in keeps)
        for name, value in vars(owner).items()
        if name not in ("window", "model")
        and hasattr(value, "to")
        and (isinstance(value, nn.Module) or hasattr(value, "decode"))
    }
    before = {name: part for name, part in others.items() if not hasattr(part.module, "decode")}
    return {**before, "model": Part(model), **others}  # a part keeps its first place


class MovablePipeline(ABC):
    """A pipeline whose parts can be moved. A child class says what they are."""

    _offloaded: dict[str, Any] | None = None  # hooks by name of the part

    def _refuse_saving(self) -> None:
        raise AttributeError(
            f"save_pretrained: a {type(self).__name__} changes nothing that it loads; copy the "
            "folder or file it was loaded from, pipe.source"
        )

    save_pretrained: Any = property(_refuse_saving)  # so that hasattr says no

    @abstractmethod
    def _parts(self) -> Mapping[str, Part]:
        """All parts; "model" predicts the tokens."""

    @abstractmethod
    def _moved(self) -> None:
        """Drop what was computed from the weights as they were, and captured passes."""

    @property
    @abstractmethod
    def _cuda_graphs(self) -> UseGraphs:
        """What the caller asked for."""

    @property
    @abstractmethod
    def _lock(self) -> Any:
        """What a run locks."""

    @property
    def device(self) -> torch.device:
        """Where the model takes its tokens."""
        return find_device(self._parts()["model"].module)

    @property
    def dtype(self) -> torch.dtype:
        model = self._parts()["model"].module
        dtype: torch.dtype | None = getattr(model, "dtype", None)
        if dtype is None:
            dtype = next(model.parameters()).dtype
        return dtype

    @property
    def components(self) -> dict[str, Any]:
        """The parts by name, in the order in which they compute."""
        return {name: part.module for name, part in self._parts().items()}

    def set_progress_bar_config(self, **options: Any) -> None:
        """Take `disable=True`, as diffusers' pipelines do: calls show no bar."""
        if not options.get("disable"):
            raise OptionError(
                f"set_progress_bar_config: expected disable=True, because calls show no bar, "
                f"received {show(options)}; pass a function to the call that shows one, on_step="
            )

    def to(self, *args: Any, device: Any = None, dtype: Any = None) -> Self:
        """Move the pipeline to a device, cast it to a dtype, or both, in any order or by name.

        The next call makes what a pipeline loaded there in that dtype makes; weights of fewer bits
        keep their rounding. Copies (`resize`) move too: they share the weights. A quantised model,
        one spread by a device map, or one after `enable_model_cpu_offload` is refused.

        Args:
            *args: a device (`torch.device`, "cuda:1", "auto") and a dtype (of torch, or a name such
                as "bf16").
        """
        where, kind = _read_target(args, device, dtype)
        parts = self._parts()
        self._check_movable("to")
        place, chosen = choose_placement(
            self.device if where is None else where, self.dtype if kind is None else kind
        )
        Engine(self._cuda_graphs).check(place)
        with alone(self._lock):
            for part in parts.values():
                cast = None if kind is None or part.keeps_float32 else chosen
                move_module(part.module, None if where is None else place, cast)
            self._moved()
        return self

    def enable_model_cpu_offload(
        self, gpu_id: int | None = None, device: torch.device | str | None = None
    ) -> None:
        """Keep the parts in main memory, and bring each to the accelerator while it computes.

        A run takes the memory of its largest part and of its keys and values, and the time of
        copying the weights once a call. Passes are not captured in CUDA graphs. Text encoders leave
        before tokens are decoded; the model leaves before images are rendered, and stays where
        rows are rendered one by one while others run (`serve`, speech, clips).

        Args:
            gpu_id: number of the accelerator; None is the first.
            device: its kind, such as "cuda"; None takes the one there is.
        """
        check_accelerate("enable_model_cpu_offload")
        kind = torch.device(choose_device(AUTO if device is None else device))
        if kind.type == "cpu":
            raise MissingBackendError(
                "enable_model_cpu_offload: expected an accelerator (CUDA, MPS or XPU), received a "
                "pipeline on the CPU, where nothing is saved; leave it out on this machine"
            )
        number = (kind.index or 0) if gpu_id is None else gpu_id
        found, _ = choose_placement(torch.device(kind.type, number), torch.float32)
        if self._offloaded is not None and found == self.device:
            return
        self._check_movable("enable_model_cpu_offload")
        if self._cuda_graphs is True:
            raise OptionError(
                "enable_model_cpu_offload: expected a pipeline whose passes run eagerly, received "
                'cuda_graphs=True, which needs weights that stay; load it with cuda_graphs="auto"'
            )
        from accelerate import cpu_offload_with_hook

        with alone(self._lock):
            self._moved()
            self._offloaded = {}
            last = None
            for part_name, part in self._parts().items():
                if isinstance(part.module, nn.Module):
                    # the model stays while rows are rendered in the middle of a run
                    last = None if last is not None and last[0] == "model" else last
                    hook = cpu_offload_with_hook(part.module, found, last and last[1])[1]
                    self._offloaded[part_name], last = hook, (part_name, hook)
                else:
                    move_module(part.module, found, None)

    def _check_movable(self, what: str) -> None:
        model = self._parts()["model"].module
        if self._offloaded is not None:
            raise UnsupportedModelError(
                f"{what}: expected a pipeline that stays on one device, received one after "
                "enable_model_cpu_offload, which moves its parts itself; load it again instead"
            )
        spread = getattr(model, "hf_device_map", None)
        if spread:
            raise UnsupportedModelError(
                f"{what}: expected a model on one device, received one with the device map "
                f"{show(spread)}, which accelerate places; load it with the device_map you want"
            )
        method = find_quantization(model)
        if method:
            raise UnsupportedModelError(
                f"{what}: expected a model whose weights are plain numbers, received one quantised "
                f"by {method}; load it on the device and in the dtype you want"
            )

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """A run: the model is where it computes; afterwards offloaded parts wait on the CPU."""
        ready(self._parts()["model"].module)
        if self._offloaded is not None:
            self._moved()
        try:
            yield
        finally:
            self._rest()

    def _rest(self) -> None:
        """Bring offloaded parts back to the CPU."""
        if self._offloaded is None:
            return
        for hook in self._offloaded.values():
            hook.offload()
        self._moved()


def describe(pipe: Any) -> str:
    model = pipe._parts()["model"].module
    text = "" if pipe.source is None else f" of {pipe.source}"
    text += f", {str(pipe.dtype).removeprefix('torch.')} on {pipe.device}"
    spread = getattr(model, "hf_device_map", None) or {}
    if len(set(spread.values())) > 1:
        text += f" and {len(set(spread.values())) - 1} other places by a device map"
    method = find_quantization(model)
    text += f", quantised by {method}" if method else ""
    text += ", with CPU offload" if pipe._offloaded is not None else ""
    return text + ("" if pipe._cuda_graphs == "auto" else f", cuda_graphs={pipe._cuda_graphs}")


def drop_computed(window: Any) -> None:
    moved = getattr(window, "moved", None)
    if moved is not None:
        moved()


def ready(module: Any) -> torch.device:
    """Where a part takes its inputs, brought there if `enable_model_cpu_offload` moves it."""
    hook = vars(module).get("_hf_hook")
    if hook is not None and hasattr(hook, "prev_module_hook"):  # accelerate's CpuOffload
        hook.pre_forward(module)
    return find_device(module)


def move_module(module: Any, device: Any, dtype: torch.dtype | None) -> Any:
    """Move a module, and cast it as its loader does; return it.

    Computed tables (rotary frequencies) and what a model of transformers keeps in float32 keep
    their dtype: `nn.Module.to` would round both.
    """
    if not isinstance(module, nn.Module):
        return module.to(device, dtype)
    if device is not None:
        module.to(device)
    if dtype is not None:
        _cast(module, dtype)
    return module


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    plan = getattr(module, "_get_dtype_plan", None)  # transformers: what stays in float32
    kept = plan(dtype) if callable(plan) else getattr(module, "_keep_in_fp32_modules", None) or ()
    for prefix, inner in module.named_modules():
        tensors = inner._parameters.items(), inner._buffers.items()
        stored = [(name, value) for tensors_of in tensors for name, value in tensors_of]
        for name, value in stored:
            if value is None or not value.is_floating_point():
                continue
            if name in inner._non_persistent_buffers_set:
                continue
            path = f".{prefix}.{name}."
            is_kept = any(f".{name_part}." in path for name_part in kept)
            target = torch.float32 if is_kept else dtype
            if value.dtype == target:
                continue
            if isinstance(value, nn.Parameter):  # in place: modules that share it keep sharing it
                value.data = value.data.to(target)
            else:
                inner._buffers[name] = value.to(target)


def _read_target(args: tuple[Any, ...], device: Any, dtype: Any) -> tuple[Any, Any]:
    """The device and the dtype of a call of `to`; None for what is not given."""
    devices, dtypes = [device], [dtype]
    for value in args:
        name = value.lower().removeprefix("torch.") if isinstance(value, str) else None
        is_dtype = isinstance(value, torch.dtype) or name in _NAMES
        (dtypes if is_dtype else devices).append(value)
    devices, dtypes = ([v for v in values if v is not None] for values in (devices, dtypes))
    if not devices + dtypes or len(devices) > 1 or len(dtypes) > 1:
        raise OptionError(
            f"to: expected a device, a dtype, or one of each, received {show(devices + dtypes)}; "
            'write for example to("cuda", torch.bfloat16)'
        )
    return (*devices, None)[0], (*dtypes, None)[0]
