"""What nodes ask of ComfyUI, which is imported when a node runs."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor


def check_interrupt() -> None:
    """Raise ComfyUI's own exception if the user asked to interrupt; nothing here catches it."""
    from comfy import model_management

    model_management.throw_exception_if_processing_interrupted()


@cache
def _execution() -> Any:
    from comfy_api.latest import ComfyAPISync

    return ComfyAPISync().execution


def report(done: int, total: int, image: Image | None = None) -> None:
    _execution().set_progress(done, total, preview_image=image)


def output(*values: Any, **more: Any) -> Any:
    from comfy_api.latest import io

    return io.NodeOutput(*values, **more)


def video(frames: Tensor, fps: float) -> Any:
    """ComfyUI's video of frames `[F, height, width, 3]`, float in 0..1."""
    from comfy_api.input_impl import VideoFromComponents
    from comfy_api.util import VideoComponents

    rate = Fraction(fps).limit_denominator(1001)
    return VideoFromComponents(VideoComponents(images=frames, audio=None, frame_rate=rate))


def graph() -> Any:
    from comfy_execution.graph_utils import GraphBuilder

    return GraphBuilder()


def device() -> str:
    """Where ComfyUI computes, as torch names it."""
    from comfy import model_management

    return str(model_management.get_torch_device())


def free_memory(size: int, wanted: str) -> None:
    """Free bytes on a device if ComfyUI computes there, where it leaves models of earlier nodes."""
    import torch
    from comfy import model_management

    computing = model_management.get_torch_device()
    if torch.device(wanted).type == computing.type:
        model_management.free_memory(size, computing)
