"""What is asked of a model in Generate and Compare: captions, seeds, filters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mmaccel.canvas_contracts import kind_of
from mmaccel.catalog import find_policy
from mmaccel.comfy.law_widgets import OWN, law_widgets
from mmaccel.comfy.open_model import OpenModel
from mmaccel.comfy.policies import NamedPolicy, default_policy
from mmaccel.comfy.table import MODEL, POLICY, Socket, Widget
from mmaccel.comfy.watch import Watch
from mmaccel.errors import OptionError
from mmaccel.pipelines.text_to_image.model import choose_params
from mmaccel.pipelines.text_to_image.outputs import ImageOutput
from mmaccel.pipelines.text_to_image.outputs import Request as Wanted
from mmaccel.pipelines.text_to_image.pipeline import GenerationSettings
from mmaccel.samplers.sampling_params import SamplingParams

if TYPE_CHECKING:
    from PIL.Image import Image

SEEDS = 2**64
_MOST = 4096
_FILTERS = ("guidance_scale", "temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True)
class Request:
    """Images to make.

    Attributes:
        model: what makes them.
        chosen: the policy, under its name.
        captions: one per image.
        seeds: one per image.
        filters: guidance, temperature and truncation.
        batch_size: images made together.
        negative: what all are guided away from; None is the model's own.
    """

    model: OpenModel
    chosen: NamedPolicy
    captions: list[str]
    seeds: list[int]
    params: SamplingParams
    batch_size: int
    negative: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all images."""
        return len(self.captions) * self.model.pipe.length

    def make(self, policy: Any, watch: Watch) -> ImageOutput:
        """All images by a policy; `watch` is asked after every pass."""
        requests = [
            Wanted(caption, seed, tag=k, negative=self.negative)
            for k, (caption, seed) in enumerate(zip(self.captions, self.seeds))
        ]
        watch.begin(requests)
        recipe = GenerationSettings(self.chosen.name, policy, self.params)
        return self.model.generator.draw(requests, recipe, self.batch_size, watch, watch.finish)


def read_request(
    *,
    model: OpenModel,
    policy: NamedPolicy | None,
    prompt: str,
    seed: int,
    count: int | None,
    batch_size: int,
    negative: str,
    **params: Any,
) -> Request:
    """The inputs of a node as a request. Image k has seed `seed + k`, as on the command line.

    Raises:
        OptionError: a value outside its domain, a policy for another kind of model, or a model
            that is its own draft model.
    """
    chosen = policy or default_policy(model.pipe.model)
    find_policy(chosen.name, kind_of(model.pipe.model))
    if getattr(chosen.policy, "draft_model", None) is model.pipe.model:
        raise OptionError(
            "draft_model: expected another model than the one that is decoded, received the same; "
            "load a smaller one"
        )
    lines = read_captions(prompt)
    captions = [lines[k % len(lines)] for k in range(len(lines) if count is None else count)]
    seeds = [(seed + k) % SEEDS for k in range(len(captions))]
    own = choose_params(model.pipe.image_model.params, **params)
    return Request(model, chosen, captions, seeds, own, batch_size, negative.strip() or None)


def read_captions(prompt: str) -> list[str]:
    """One caption a line; lines without words are left out, unless there is no other."""
    return [line.strip() for line in prompt.splitlines() if line.strip()] or [""]


def check_request(**values: Any) -> None:
    """Refuse what no model takes, before any is loaded.

    Raises:
        OptionError: a filter outside its domain.
    """
    choose_params(SamplingParams(), **{name: values[name] for name in _FILTERS})


def to_tensor(images: list[Image]) -> Tensor:
    """B images of one size to ComfyUI's `[B, H, W, 3]` float32 in 0..1."""
    stacked = np.stack([np.asarray(image.convert("RGB")) for image in images])
    return torch.from_numpy(stacked).float() / 255


def request_inputs(most: int = _MOST) -> tuple[Widget | Socket, ...]:
    """The inputs that make a request, for up to `most` images."""
    own = ((-1.0, None),)
    return (
        Socket("model", MODEL, "From MMAccel Load Model."),
        Socket("policy", POLICY, "How to decode; without one, an exact policy.", is_optional=True),
        Widget(
            "prompt", "text", "a red circle above a small blue square on grass",
            "What to draw. One caption a line: several lines make a batch.", is_multiline=True,
        ),
        Widget(
            "negative", "text", "",
            "What to steer away from, in all images; empty is the model's own. Needs a "
            "guidance_scale other than 1, and a model that takes it.", is_multiline=True,
        ),
        Widget(
            "seed", "int", 0,
            "Of the first image; the second has seed + 1, and so on, as with mmaccel generate. "
            "A browser counts exactly up to 9007199254740992; larger ones come out rounded.",
            0, SEEDS - 1, 1, is_seed=True,
        ),
        Widget(
            "count", "int", 0, "Number of images; 0 makes one of each caption.", 0, most, 1,
            stands_for=((0, None),),
        ),
        Widget(
            "batch_size", "int", 1,
            "Images made together: more take more memory, and less time each.",
            1, most, 1,
        ),
        Widget(
            "guidance_scale", "float", -1.0,
            f"How closely to follow the prompt (classifier-free guidance); 1 is off. {OWN}",
            -1, 100, 0.1, stands_for=own,
        ),
        *law_widgets(),
    )  # fmt: skip
