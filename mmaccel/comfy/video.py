"""The nodes that make a clip: from a prompt, or from an image or a clip that it continues."""

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
    TEXT_TO_VIDEO,
    VIDEO,
    Host,
    NodeResult,
    NodeSpec,
    Output,
    Socket,
    Widget,
)
from mmaccel.comfy.widgets import (
    POLICY_INPUT,
    STATS_OUTPUT,
    read_prompts,
    sampling_widgets,
    seed_widget,
)
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
    prompt: str = "",
    **options: Any,
) -> NodeResult:
    """Continue frames, as `mmaccel animate` does with these settings.

    Raises:
        OptionError: a prompt the model does not take, or a policy of another kind; before any pass.
    """
    options["prompt"] = prompt.strip() or None
    return _make_clip(host, video_model, policy, _opaque(start), **options)


def prompt_video(
    host: Host,
    *,
    text_to_video_model: LoadedModel,
    policy: NamedPolicy | None,
    prompt: str,
    negative_prompt: str,
    start: Tensor | None = None,
    **options: Any,
) -> NodeResult:
    """Make a clip from a prompt, as `mmaccel animate` does with these settings.

    Raises:
        OptionError: a prompt the model does not take, or a policy of another kind; before any pass.
    """
    options["negative_prompt"] = negative_prompt.strip() or None
    options["start"] = None if start is None else _opaque(start)
    return _make_clip(host, text_to_video_model, policy, prompt, **options)


def _make_clip(
    host: Host, model: LoadedModel, policy: NamedPolicy | None, given: Any, **options: Any
) -> NodeResult:
    """One clip of what a pipeline takes first."""
    clips, record = run_media(host, model, policy, given, rows=1, describe=_describe, **options)
    (clip,) = clips
    pixels = clip.frames.float().div(255)
    return NodeResult((host.video(pixels, clip.fps), pixels, record))


def _opaque(frames: Tensor) -> Tensor:
    """Frames without transparency, which no model here takes."""
    return frames[..., :3].clamp(0, 1)


def _describe(made: Clip) -> str:
    named = f": {made.prompt}" if made.prompt else ""
    return (
        f"seed {made.seed}: {len(made.frames)} frames, {made.n_given} of them given, "
        f"{made.fps:g} a second, {made.passes} forward passes{named}"
    )


def check_prompted_video(*, prompt: str, negative_prompt: str, **values: Any) -> None:
    """Check what can be checked before a model is loaded.

    Raises:
        OptionError: no prompt, or a seed or sampling parameter outside its domain.
    """
    read_prompts(prompt)
    check_video(**values)


def check_video(*, seed: int, prompt: str = "", **params: Any) -> None:
    """Check what can be checked before a model is loaded.

    Raises:
        OptionError: a seed or a sampling parameter outside its domain.
    """
    check_seed(seed)
    choose_params(SamplingParams(), **params)


_OUTPUTS = (
    Output("video", VIDEO, "The clip, the given frames first."),
    Output("frames", IMAGE, "The same, frame by frame."),
    STATS_OUTPUT,
)

PROMPTED = NodeSpec(
    id=f"{PREFIX}TextToVideo",
    title="MMAccel Text to Video",
    summary="Makes a clip from a prompt under a decoding policy.",
    inputs=(
        Socket("text_to_video_model", TEXT_TO_VIDEO, "From MMAccel Load Text-to-Video Model."),
        Socket(
            "start",
            IMAGE,
            "What the clip begins with, if anything: one image, or frames in a row.",
            is_optional=True,
        ),
        POLICY_INPUT,
        *LAYER_INPUTS,
        Widget(
            "prompt",
            "text",
            "a red circle moves left over grass",
            "What the clip shows.",
            is_multiline=True,
        ),
        Widget(
            "negative_prompt",
            "text",
            "",
            "What it should not show; empty for the model's own unconditional prompt.",
            is_multiline=True,
        ),
        seed_widget("The same as with mmaccel animate."),
        *sampling_widgets(without=("divergence_temperature",)),
    ),
    outputs=_OUTPUTS,
    run=prompt_video,
    check=check_prompted_video,
    folder="video",
)

ANIMATE = NodeSpec(
    id=f"{PREFIX}GenerateVideo",
    title="MMAccel Generate Video",
    summary="Continues an image or a clip under a decoding policy, as a prompt says if the model "
    "reads one.",
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
        Widget(
            "prompt",
            "text",
            "",
            "What happens in the clip, for a model that reads a prompt; empty for others.",
            is_multiline=True,
            is_optional=True,
        ),
    ),
    outputs=_OUTPUTS,
    run=generate_video,
    check=check_video,
    folder="video",
)
