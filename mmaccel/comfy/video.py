"""The node that continues an image or a clip."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmaccel.comfy.loading import LoadedModel
from mmaccel.comfy.methods import LAYER_INPUTS, NamedPolicy
from mmaccel.comfy.runs import run_media
from mmaccel.comfy.table import (
    ANIMATOR,
    IMAGE,
    PREFIX,
    VIDEO,
    Host,
    NodeResult,
    NodeSpec,
    Output,
    Socket,
)
from mmaccel.comfy.widgets import POLICY_INPUT, STATS_OUTPUT, sampling_widgets, seed_widget
from mmaccel.pipelines.image_to_video.types import Clip
from mmaccel.pipelines.text_to_image.model import choose_params
from mmaccel.samplers.noise import check_seed
from mmaccel.samplers.sampling_params import SamplingParams


def generate_video(
    host: Host,
    *,
    video_model: LoadedModel,
    policy: NamedPolicy | None,
    start: Tensor,
    **options: Any,
) -> NodeResult:
    """Continue frames, as `mmaccel animate` does with these settings.

    Raises:
        OptionError: a policy of another kind; before any pass.
    """
    frames = start[..., :3].clamp(0, 1)  # no model here takes transparency
    clips, record = run_media(
        host, video_model, policy, frames, rows=1, describe=_describe, **options
    )
    (clip,) = clips
    pixels = clip.frames.float().div(255)
    return NodeResult((host.video(pixels, clip.fps), pixels, record))


def _describe(made: Clip) -> str:
    return (
        f"seed {made.seed}: {len(made.frames)} frames, {made.n_given} of them given, "
        f"{made.fps:g} a second, {made.passes} forward passes"
    )


def check_video(*, seed: int, **params: Any) -> None:
    """Check what can be checked before a model is loaded.

    Raises:
        OptionError: a seed or a sampling parameter outside its domain.
    """
    check_seed(seed)
    choose_params(SamplingParams(), **params)


ANIMATE = NodeSpec(
    id=f"{PREFIX}GenerateVideo",
    title="MMAccel Generate Video",
    summary="Continues an image or a clip under a decoding policy.",
    inputs=(
        Socket("video_model", ANIMATOR, "From MMAccel Load Video Model."),
        Socket(
            "start",
            IMAGE,
            "What the clip begins with: one image, or frames in a row, of which the last nine "
            "count. They are made to fit, and cut where they are too wide or too high.",
        ),
        POLICY_INPUT,
        *LAYER_INPUTS,
        seed_widget("The same as with mmaccel animate."),
        *sampling_widgets(without=("guidance_scale", "divergence_temperature")),
    ),
    outputs=(
        Output("video", VIDEO, "The clip, the given frames first."),
        Output("frames", IMAGE, "The same, frame by frame."),
        STATS_OUTPUT,
    ),
    run=generate_video,
    check=check_video,
    folder="video",
)
