"""Opens video models: Cosmos, its codec, and the T5 of those that read a text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mmaccel.checks import check_choice, show
from mmaccel.errors import OptionError
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig
from mmaccel.pipelines.hosts.loading.refusal import refusing
from mmaccel.pipelines.hosts.loading.sources import find_model
from mmaccel.pipelines.hosts.loading.tasks import check_task
from mmaccel.pipelines.image_to_video.types import VideoModel
from mmaccel.samplers.drafting.coarse import use_folder

CODEC = "nvidia/Cosmos-Tokenize1-DV8x16x16-720p"
TEXT_ENCODER = "google-t5/t5-11b"
FAMILIES = ("cosmos",)


class OpenedVideo(NamedTuple):
    """A video model, and the paths that it was loaded from."""

    video: VideoModel
    source: Path
    codec: Path
    text_encoder: Path | None  # of what reads its prompts; None where it reads none


def open_video(
    name: str | Path,
    codec: str | Path | None,
    text_encoder: str | Path | None,
    load_config: LoadConfig,
) -> OpenedVideo:
    """Load a video model, its codec (by default `CODEC`), and a T5 where the model reads a text."""
    from mmaccel.pipelines.models.cosmos.video import load_cosmos

    if load_config.family is not None:
        check_choice("family", load_config.family, FAMILIES, hint="leave it out")
    check_task(name, "animate")
    source = find_model(name, {}, hub=load_config)
    check_task(source, "animate")
    parts = replace(load_config, revision=None, variant=None)
    codec_source = find_model(CODEC if codec is None else codec, {}, "codec", parts)
    given = None if text_encoder is None else find_model(text_encoder, {}, "text_encoder", parts)
    with refusing(
        f"a Cosmos model in {source} and its codec in {codec_source}",
        "files that do not fit",
        "copy both folders again",
    ):
        video, text_source = load_cosmos(
            source,
            codec_source,
            parts,
            lambda: given or find_model(TEXT_ENCODER, {}, "text_encoder", parts),
        )
    if given is not None and text_source is None:
        raise OptionError(
            f"text_encoder: expected none with {name}, which reads no text, received "
            f"{show(str(text_encoder))}; leave it out"
        )
    use_folder(video.window, source)
    return OpenedVideo(video, source, codec_source, text_source)
