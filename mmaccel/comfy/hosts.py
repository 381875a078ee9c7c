"""ComfyUI as a `Host`, imported when a node runs."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor


class ComfyUI:
    """ComfyUI's versioned interface."""

    def __init__(self) -> None:
        from comfy_api.latest import ComfyAPISync

        self._execution: Any = ComfyAPISync().execution

    def report(self, done: int, total: int, image: Image | None) -> None:
        self._execution.set_progress(done, total, preview_image=image)

    def check_interrupt(self) -> None:
        """Raise ComfyUI's own exception if the user asked to interrupt; nothing here catches it."""
        from comfy import model_management

        model_management.throw_exception_if_processing_interrupted()

    def video(self, frames: Tensor, fps: float) -> Any:
        from comfy_api.input_impl import VideoFromComponents
        from comfy_api.util import VideoComponents

        rate = Fraction(fps).limit_denominator(1001)
        return VideoFromComponents(VideoComponents(images=frames, audio=None, frame_rate=rate))

    def graph(self) -> Any:
        from comfy_execution.graph_utils import GraphBuilder

        return GraphBuilder()

    def device(self) -> str:
        """Where ComfyUI computes."""
        from comfy import model_management

        return str(model_management.get_torch_device())

    def free_memory(self, size: int, device: str) -> None:
        """See `Host.free_memory`: ComfyUI leaves the models of earlier nodes on their device."""
        import torch
        from comfy import model_management

        own = model_management.get_torch_device()
        if torch.device(device).type == own.type:
            model_management.free_memory(size, own)
