"""What a model in windows does so that its buffers outlive a run; see `samplers/kept_runs.py`."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmaccel.kernels import dispatch
from mmaccel.pipelines.fingerprint import fingerprint, is_plain, place_of


class KeptBuffers:
    """A window whose buffers can be handed to the next run.

    A child names its attributes: `made` by `reserve`, handed on as they are; `given` by the caller,
    of another content in every run, tensors or None; and `fixed` tensors, which stay the window's.
    """

    made: ClassVar[tuple[str, ...]] = ("_placement", "_cache", "attention_reason")
    given: ClassVar[tuple[str, ...]] = ()
    fixed: ClassVar[tuple[str, ...]] = ()
    model: Any
    device: Any
    _cache: Any

    def baked(self) -> tuple[Any, Hashable, Hashable]:
        """What a recorded pass has of a model, beside what stands in `given`.

        Returns:
            The model; the state it is in: where its parameters and buffers lie, its modules'
            attributes and hooks, its configurations; and what else the pass was recorded under:
            options of the window, settings of torch and of the kernels, the stream.
        """
        return self.model, fingerprint(self.model), self.kind()

    def kind(self) -> Hashable:
        """What a pass is recorded under beside the model: see `baked`."""
        own = [place_of(getattr(self, name)) for name in self.fixed]
        has_given = [getattr(self, name) is not None for name in self.given]
        names = set(self.made + self.given + self.fixed)
        options = [(k, v) for k, v in vars(self).items() if is_plain(v) and k not in names]
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            *own,
            *has_given,
            *options,
            *_surroundings(self.device),
        )

    def own(self) -> None:
        """Behind `reserve`: a run that may be kept writes into no tensor of the caller's."""
        for name in self.given:
            value = getattr(self, name)
            setattr(self, name, None if value is None else value.clone())

    def keep(self) -> dict[str, Any]:
        """The buffers of a run that came to its end."""
        return {name: getattr(self, name) for name in self.made + self.given}

    def resume(self, kept: dict[str, Any]) -> None:
        """In the place of `reserve`: the buffers of an earlier run, filled with what is given."""
        for name in self.given:
            own, place = getattr(self, name), kept[name]
            if own is not None and own is not place:
                place.copy_(self.fit(own, place))
        for name, value in kept.items():
            setattr(self, name, value)
        for layer in getattr(self._cache, "layers", self._cache):
            layer.clear()

    def fit(self, own: Tensor, place: Tensor) -> Tensor:
        """A tensor that is given, in the shape of the place it is copied to."""
        return own


def _surroundings(device: torch.device) -> tuple[Hashable, ...]:
    """Settings that decide what a recorded pass consists of."""
    cuda = torch.backends.cuda
    kernels = (
        cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(), cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_bf16_reduced_precision_reduction, torch.backends.cudnn.allow_tf32,
        torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    kind = device.type
    is_cast = torch.is_autocast_enabled(kind)
    stream = torch.cuda.current_stream(device).cuda_stream if kind == "cuda" else 0
    return (
        device, stream, torch.get_default_dtype(), torch.is_inference_mode_enabled(),
        torch.get_autocast_dtype(kind) if is_cast else None, dispatch.mode(),
        dispatch.is_interpreted(), kernels,
    )  # fmt: skip
