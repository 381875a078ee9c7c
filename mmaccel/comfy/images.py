"""The nodes that generate images: Generate, and Compare with decoding token by token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mmaccel.comfy.loading import LoadedModel
from mmaccel.comfy.methods import LAYER_INPUTS, NamedPolicy, choose_policy
from mmaccel.comfy.progress import ImageProgress
from mmaccel.comfy.runs import RunRecord
from mmaccel.comfy.table import (
    IMAGE,
    MODEL,
    PREFIX,
    STATS,
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
from mmaccel.errors import OptionError
from mmaccel.options import SAMPLING_FIELDS
from mmaccel.pipelines.text_to_image.contact_sheet import (
    describe_difference,
    draw_comparison,
    make_plain,
    title_of,
)
from mmaccel.pipelines.text_to_image.generator import GenerationSettings, ImageGenerator, warm_up
from mmaccel.pipelines.text_to_image.model import choose_params
from mmaccel.pipelines.text_to_image.outputs import ImageOutput, Request
from mmaccel.samplers.noise import spread_seeds
from mmaccel.samplers.sampling_params import SamplingParams

if TYPE_CHECKING:
    from PIL.Image import Image

_MOST = 4096  # images of one run
_MOST_COMPARED = 64  # images that can be seen on one sheet


@dataclass(frozen=True)
class ImageJob:
    """Images to generate.

    Attributes:
        model: what generates them.
        chosen: the policy.
        requests: one per image.
        params: guidance, temperature and truncation.
        batch_size: images decoded together.
        layers: methods of the model's layers by slot; the plain side of a comparison has none.
    """

    model: LoadedModel
    chosen: NamedPolicy
    requests: list[Request]
    params: SamplingParams
    batch_size: int
    layers: Mapping[str, Any]

    @property
    def tokens(self) -> int:
        """Tokens of all images."""
        return len(self.requests) * self.model.pipe.length

    def generate(
        self, policy: Any, progress: ImageProgress, layers: Mapping[str, Any]
    ) -> ImageOutput:
        """All images under a policy and methods; `progress` is called after every pass."""
        progress.begin(self.requests)
        settings = GenerationSettings(self.chosen.name, policy, self.params, **layers)
        return ImageGenerator(self.model.pipe).draw(
            self.requests, settings, self.batch_size, progress, progress.finish
        )

    def record(self, made: ImageOutput, compared: str = "") -> RunRecord:
        """The record of a run of this job."""
        lines = [
            f"seed {request.seed}: {self.model.pipe.length} tokens in {passes} forward passes: "
            f"{request.prompt}"
            for request, passes in zip(self.requests, made.passes.tolist(), strict=True)
        ]
        negative = self.requests[0].negative or ""
        return RunRecord(self.model, self.chosen, made.stats, lines, compared, negative)


def read_job(
    *,
    model: LoadedModel,
    policy: NamedPolicy | None,
    prompt: str,
    seed: int,
    num_images: int | None,
    batch_size: int,
    negative_prompt: str,
    **options: Any,
) -> ImageJob:
    """The inputs of a node as a job. Image k has seed `seed + k`, as on the command line.

    Raises:
        OptionError: a value outside its domain, a policy for another kind of model, or a model
            that is its own draft model.
    """
    chosen = choose_policy(policy, model.pipe.model.kind)
    if getattr(chosen.policy, "draft_model", None) is model.pipe.model:
        raise OptionError(
            "draft_model: expected another model than the one that is decoded, received the same; "
            "load a smaller one"
        )
    texts = [text for text in read_prompts(prompt) for _ in range(num_images or 1)]
    seeds = spread_seeds(seed, len(texts))
    negative = negative_prompt.strip() or None
    requests = [
        Request(text, seed, k, negative)
        for k, (text, seed) in enumerate(zip(texts, seeds, strict=True))
    ]
    layers = {each.name: options.pop(each.name, None) for each in LAYER_INPUTS}
    own = choose_params(model.pipe.image_model.params, **options)
    return ImageJob(model, chosen, requests, own, batch_size, layers)


def check_inputs(**values: Any) -> None:
    """Refuse sampling parameters that no model takes, before any model is loaded.

    Raises:
        OptionError: a parameter outside its domain.
    """
    shown = [name for name in SAMPLING_FIELDS if name in values]
    choose_params(SamplingParams(), **{name: values[name] for name in shown})


def to_tensor(images: list[Image]) -> Tensor:
    """B images of one size as ComfyUI's `[B, height, width, 3]` float32 in 0..1."""
    stacked = np.stack([np.asarray(image.convert("RGB")) for image in images])
    return torch.from_numpy(stacked).float() / 255


def generate_images(host: Host, **inputs: Any) -> NodeResult:
    """Generate the images that `mmaccel generate` generates with these settings.

    Raises:
        OptionError: a prompt the model cannot draw, or a policy of another kind; before any pass.
    """
    job = read_job(**inputs)
    progress = ImageProgress(host, job.model.pipe.image_model, job.tokens)
    made = job.generate(job.chosen.policy, progress, job.layers)
    return NodeResult((to_tensor(made.images), job.record(made)))


def compare_images(host: Host, **inputs: Any) -> NodeResult:
    """Generate the images token by token and under the policy, and draw both on one sheet.

    Raises:
        OptionError: as in `generate_images`.
    """
    job = read_job(**inputs)
    pipe = job.model.pipe
    dtype = job.model.dtype
    policy = job.chosen.policy
    plain_policy = make_plain(policy)
    progress = ImageProgress(host, pipe.image_model, 2 * job.tokens)
    rows = min(job.batch_size, len(job.requests))
    for each in (plain_policy, policy):
        warm_up(pipe, each, job.params, job.requests[0].prompt, rows, host.check_interrupt)
    plain = job.generate(plain_policy, progress, {})
    made = job.generate(policy, progress, job.layers)
    sheet = draw_comparison(title_of(job.chosen.name, policy), plain, made, dtype)
    record = job.record(made, describe_difference(plain, made, dtype))
    return NodeResult((to_tensor([sheet]), to_tensor(plain.images), to_tensor(made.images), record))


def _inputs(most: int) -> tuple[Widget | Socket, ...]:
    """The inputs of both nodes, for up to `most` images; a graph needs a model and a prompt."""
    optional = (
        Widget(
            "negative_prompt",
            "text",
            "",
            "What to steer away from, in all images; empty is the model's own. Needs a "
            "guidance_scale other than 1, and a model that takes it.",
            is_multiline=True,
            old_name="negative",
        ),
        seed_widget(
            "Of the first image; the second has seed + 1, and so on, as with mmaccel generate."
        ),
        Widget(
            "num_images",
            "int",
            1,
            "Images of each prompt; 0 is one too.",
            0,
            most,
            1,
            stands_for=((0, None),),
            old_name="count",
        ),
        Widget(
            "batch_size",
            "int",
            1,
            "Images decoded together: more take more memory, and less time each.",
            1,
            most,
            1,
            is_advanced=True,
        ),
        *sampling_widgets(),
    )
    return (
        Socket("model", MODEL, "From MMAccel Load Model."),
        POLICY_INPUT,
        *LAYER_INPUTS,
        Widget(
            "prompt",
            "text",
            "a red circle above a small blue square on grass",
            "What to draw. One prompt a line: several lines make a batch.",
            is_multiline=True,
        ),
        *(replace(widget, is_optional=True) for widget in optional),
    )


GENERATE = NodeSpec(
    id=f"{PREFIX}GenerateImage",
    title="MMAccel Generate Image",
    summary="Generates images from prompts under a decoding policy.",
    inputs=_inputs(_MOST),
    outputs=(
        Output("images", IMAGE, "One image per prompt and count."),
        STATS_OUTPUT,
    ),
    run=generate_images,
    check=check_inputs,
)

COMPARE = NodeSpec(
    id=f"{PREFIX}Compare",
    title="MMAccel Compare",
    summary="Generates the same images token by token and under a policy, and draws them side by "
    "side with what both cost, as mmaccel generate --compare does.",
    inputs=_inputs(_MOST_COMPARED),
    outputs=(
        Output("sheet", IMAGE, "Both, side by side, with the verdict."),
        Output("token_by_token", IMAGE, "The images generated one token a pass."),
        Output("accelerated", IMAGE, "The images generated under the policy."),
        Output("stats", STATS, "Of the accelerated run, for MMAccel Stats."),
    ),
    run=compare_images,
    check=check_inputs,
)
