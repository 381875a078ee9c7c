"""`mmaccel animate`: clips that continue an image or the end of another clip."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmaccel.commands import options as shared
from mmaccel.commands.flags import Without, with_flags
from mmaccel.commands.options import LayerFlags, WindowPolicyFlags
from mmaccel.commands.process import pause_collector
from mmaccel.limits import MAX_BATCH, MAX_IMAGES
from mmaccel.options import LoadOptions, SamplingOptions, given

_MAX_FRAMES = 9  # of a start, for all models here
_HELP_SEED = "of a start's first clip, the next has the next; by default drawn, and printed"
_HELP_CODEC = "folder or hub id of the decoder of tokens to frames; by default the authors'"


@with_flags
def animate(
    starts: Annotated[list[Path], typer.Argument(help="images or videos to continue")],
    *,
    model: Annotated[str, typer.Option(help="folder or hub id: nvidia/Cosmos-Predict1-4B")],
    codec: Annotated[str | None, typer.Option(help=_HELP_CODEC)] = None,
    method: WindowPolicyFlags,
    layer: LayerFlags,
    count: Annotated[int, typer.Option(help="clips of each start")] = 1,
    seed: Annotated[int | None, typer.Option(help=_HELP_SEED)] = None,
    out: shared.Out = Path("out"),
    sampling: Annotated[SamplingOptions, Without("guidance_scale")],
    batch_size: Annotated[int, typer.Option(help="clips decoded at a time at most")] = 1,
    file_format: Annotated[
        str | None, typer.Option("--format", help="mp4 or webp (lossless)")
    ] = None,
    load: LoadOptions,
    threads: shared.Threads = None,
) -> None:
    """Continue images or videos, each clip in a file with a JSON file next to it.

    Temperature and truncation are by default those the model's authors recommend.
    """
    pause_collector()
    from mmaccel.commands.files import check_folder, open_folder
    from mmaccel.commands.media_job import VideoJob, open_pipe
    from mmaccel.loading import place
    from mmaccel.outputs.video_files import pick_format, read_frames
    from mmaccel.pipelines.image_to_video.pipeline import ImageToVideo
    from mmaccel.pipelines.text_to_image.model import choose_params
    from mmaccel.samplers.noise import check_seed
    from mmaccel.samplers.sampling_params import SamplingParams

    shared.check_count("count", count, MAX_IMAGES)
    shared.check_count("batch-size", batch_size, MAX_BATCH)
    seed, is_drawn = shared.pick_seed(seed)
    check_seed([seed + k for k in range(count)])
    name, policy = method.choose("window")
    layers = layer.read()
    load = place(load)
    shared.set_threads(threads)
    choose_params(SamplingParams(), **given(sampling))
    suffix = pick_format(file_format)
    check_folder(out)
    # before the model is loaded, which takes long
    frames = {start: read_frames(start, _MAX_FRAMES) for start in starts}
    pipe = open_pipe(ImageToVideo, model, load, codec)
    open_folder(out)
    job = VideoJob(
        pipe=pipe,
        starts=frames,
        seed=seed,
        is_seed_drawn=is_drawn,
        count=count,
        name=name,
        policy=policy,
        options=given(sampling),
        layers=layers,
        batch_size=batch_size,
        out=out,
        suffix=suffix,
        model=model,
        dtype=load.dtype,
    )
    job.run()
