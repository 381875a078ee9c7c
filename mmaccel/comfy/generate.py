"""The node that makes images."""

from __future__ import annotations

from typing import Any

from mmaccel.comfy.record import Record
from mmaccel.comfy.request import check_request, read_request, request_inputs, to_tensor
from mmaccel.comfy.table import IMAGE, PREFIX, STATS, Host, Made, NodeSpec, Output
from mmaccel.comfy.watch import Watch


def generate_images(host: Host, **inputs: Any) -> Made:
    """Make images, the same as `mmaccel generate` makes with these settings.

    Raises:
        OptionError: a caption the model cannot draw, or a policy of another kind; before any pass.
    """
    request = read_request(**inputs)
    watch = Watch(host, request.model.pipe.image_model, request.tokens)
    made = request.make(request.chosen.policy, watch)
    return Made((to_tensor(made.images), Record.of(request, made)))


GENERATE = NodeSpec(
    id=f"{PREFIX}GenerateImage",
    title="MMAccel Generate Image",
    summary="Makes images from captions under a decoding policy.",
    inputs=request_inputs(),
    outputs=(
        Output("images", IMAGE, "One image per caption and count."),
        Output("stats", STATS, "For MMAccel Stats."),
    ),
    run=generate_images,
    check=check_request,
)
