"""Opens video models: Cosmos, and its codec."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mmaccel.checks import check_choice
from mmaccel.pipelines.image_to_video.types import VideoModel
from mmaccel.pipelines.loading.checkpoint import LoadConfig
from mmaccel.pipelines.loading.refusal import refusing
from mmaccel.pipelines.loading.sources import find_model
from mmaccel.pipelines.loading.tasks import check_task
from mmaccel.samplers.drafting.coarse import use_folder

CODEC = "nvidia/Cosmos-Tokenize1-DV8x16x16-720p"
FAMILIES = ("cosmos",)


def open_video(
    name: str | Path, codec: str | Path | None, load_config: LoadConfig, family: str | None = None
) -> tuple[VideoModel, Path, Path]:
    """Load a video model.

    Args:
        name: a path, or an id of the hub.
        codec: the same of its codec; None is `CODEC`.
        load_config: device and dtype.
        family: one of `FAMILIES`; None detects it.

    Returns:
        The model, the path of its checkpoint, and the path of its codec.

    Raises:
        OptionError: no such model, codec or family.
        UnsupportedModelError: files of another model, or that do not fit.
    """
    from mmaccel.pipelines.models.cosmos.video import load_cosmos

    if family is not None:
        check_choice("family", family, FAMILIES, hint="leave it out")
    check_task(name, "animate")
    source = find_model(name, {}, hub=load_config.hub)
    check_task(source, "animate")
    hub = replace(load_config.hub, revision=None, variant=None)
    codec_source = find_model(CODEC if codec is None else codec, {}, "codec", hub)
    with refusing(
        f"a Cosmos model in {source} and its codec in {codec_source}",
        "files that do not fit",
        "copy both folders again",
    ):
        video = load_cosmos(source, codec_source, load_config)
    use_folder(video.window, source)
    return video, source, codec_source
