"""The node that makes the same images token by token and under a policy, side by side."""

from __future__ import annotations

from typing import Any

from mmaccel.comfy.record import Record
from mmaccel.comfy.request import check_request, read_request, request_inputs, to_tensor
from mmaccel.comfy.table import IMAGE, PREFIX, STATS, Host, Made, NodeSpec, Output
from mmaccel.comfy.watch import Watch
from mmaccel.pipelines.text_to_image.contact_sheet import (
    describe_difference,
    draw_comparison,
    make_plain,
    title_of,
)
from mmaccel.pipelines.text_to_image.pipeline import warm_up

_MOST = 64  # images that can be seen on one sheet


def compare_images(host: Host, **inputs: Any) -> Made:
    """Make the images twice, each way once, and draw both.

    Raises:
        OptionError: as in `generate_images`.
    """
    request = read_request(**inputs)
    pipe, dtype, policy = request.model.pipe, request.model.dtype, request.chosen.policy
    plain_policy = make_plain(policy)
    watch = Watch(host, pipe.image_model, 2 * request.tokens)
    rows = min(request.batch_size, len(request.captions))
    for each in (plain_policy, policy):
        warm_up(pipe, each, request.params, request.captions[0], rows, host.check_interrupt)
    plain, made = request.make(plain_policy, watch), request.make(policy, watch)
    sheet = draw_comparison(title_of(request.chosen.name, policy), plain, made, dtype)
    record = Record.of(request, made, describe_difference(plain, made, dtype))
    return Made((to_tensor([sheet]), to_tensor(plain.images), to_tensor(made.images), record))


COMPARE = NodeSpec(
    id=f"{PREFIX}Compare",
    title="MMAccel Compare",
    summary="Makes the same images token by token and under a policy, and draws them side by "
    "side with what both cost, as mmaccel generate --compare does.",
    inputs=request_inputs(_MOST),
    outputs=(
        Output("sheet", IMAGE, "Both, side by side, with the verdict."),
        Output("token_by_token", IMAGE, "The images made one token a pass."),
        Output("accelerated", IMAGE, "The images made under the policy."),
        Output("stats", STATS, "Of the accelerated run, for MMAccel Stats."),
    ),
    run=compare_images,
    check=check_request,
)
