"""The node that loads a model that continues clips, and what it hands on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mmaccel.comfy.coded_model import check_coded, coded_files, coded_state
from mmaccel.comfy.kept_models import KeptModels, state_of
from mmaccel.comfy.open_model import AUTO, CUDA_GRAPHS, place_widgets
from mmaccel.comfy.table import ANIMATOR, PREFIX, Host, Made, NodeSpec, Output, Widget
from mmaccel.pipelines.engine import UseGraphs
from mmaccel.pipelines.image_to_video import CODEC, ImageToVideo


@dataclass(frozen=True, eq=False)
class OpenAnimator:
    """A loaded model that continues clips.

    Attributes:
        name: as it was asked for.
        dtype: of model and codec.
        pipe: the model.
    """

    name: str
    dtype: str
    pipe: ImageToVideo


_kept: KeptModels[OpenAnimator] = KeptModels()


def load_animator(
    host: Host, *, model: str, codec: str, device: str, dtype: str, cuda_graphs: UseGraphs
) -> Made:
    """Load a model that continues clips, or hand out the one that is loaded already.

    Raises:
        OptionError: no such model, codec or device.
        UnsupportedModelError: nothing we know.
    """
    place = host.device() if device == AUTO else device
    files = coded_files(model, codec)
    key = (model, codec, place, dtype, cuda_graphs, state_of(files))

    def load() -> OpenAnimator:
        pipe = ImageToVideo.from_pretrained(
            model,
            codec=codec or None,
            device=place,
            dtype=getattr(torch, dtype),
            cuda_graphs=cuda_graphs,
        )
        return OpenAnimator(model, dtype, pipe)

    return Made((_kept.find(key, host, place, files, load),))


LOAD_ANIMATOR = NodeSpec(
    id=f"{PREFIX}LoadVideoModel",
    title="MMAccel Load Video Model",
    summary="Loads a model that continues pictures and clips token by token, with its codec, and "
    "keeps both while they are in use.",
    inputs=(
        Widget(
            "model", "path", "nvidia/Cosmos-Predict1-4B",
            "A folder, or an id of the Hugging Face hub such as owner/name, which is downloaded.",
        ),
        Widget(
            "codec", "path", "",
            "What turns tokens into frames: a folder or an id of the hub. Empty takes the one its "
            f"authors published ({CODEC}).",
        ),
        *place_widgets("model"),
        CUDA_GRAPHS,
    ),
    outputs=(Output("video_model", ANIMATOR, "The loaded model."),),
    run=load_animator,
    check=check_coded,
    fingerprint=coded_state,
    folder="video",
)  # fmt: skip
