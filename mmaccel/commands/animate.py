"""`mmaccel animate`: clips that begin with an image or with the end of another clip."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmaccel.commands import options as shared
from mmaccel.commands.collector import rest_collector

_MOST = 9  # frames that a model here takes
_HELP_CODEC = "folder or hub id: what turns tokens into frames; by default its authors', of the hub"


def animate(
    starts: Annotated[list[Path], typer.Argument(help="images or videos, to be continued each")],
    model: Annotated[str, typer.Option(help="folder or hub id: nvidia/Cosmos-Predict1-4B")],
    codec: Annotated[str | None, typer.Option(help=_HELP_CODEC)] = None,
    policy: shared.WindowPolicy = None,
    set_fields: shared.SetFields = None,
    window: shared.Window = None,
    count: Annotated[int, typer.Option(help="clips of each start")] = 1,
    seed: Annotated[int, typer.Option(help="of a start's first clip; the next has the next")] = 0,
    out: shared.Out = Path("out"),
    temperature: shared.Temperature = None,
    top_k: shared.TopK = None,
    top_p: shared.TopP = None,
    min_p: shared.MinP = None,
    batch_size: Annotated[int, typer.Option(help="clips decoded at a time at most")] = 1,
    file_format: Annotated[
        str | None, typer.Option("--format", help="mp4 or webp (lossless)")
    ] = None,
    device: shared.Device = "cpu",
    dtype: shared.Dtype = "float32",
    cuda_graphs: shared.CudaGraphs = "auto",
) -> None:
    """Continue images or videos, each clip in a file with a JSON file beside it.

    Temperature and truncation are by default what the model's authors recommend.
    """
    rest_collector()
    from mmaccel.commands.media_job import VideoJob, choose_policy, open_pipe
    from mmaccel.commands.run_setup import check_count, check_folder, given, open_folder
    from mmaccel.loading import parse_dtype
    from mmaccel.outputs.video_files import pick_format, read_frames
    from mmaccel.pipelines.image_to_video.pipeline import ImageToVideo
    from mmaccel.pipelines.text_to_image.model import choose_params
    from mmaccel.samplers.noise import check_seed
    from mmaccel.samplers.sampling_params import SamplingParams

    check_count("count", count)
    check_count("batch-size", batch_size)
    check_seed([seed + k for k in range(count)])
    name, chosen = choose_policy(policy, window, set_fields)
    kind = parse_dtype(dtype)
    params = given(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    choose_params(SamplingParams(), **params)
    suffix = pick_format(file_format)
    check_folder(out)
    frames = {start: read_frames(start, _MOST) for start in starts}  # before what may take minutes
    pipe = open_pipe(
        ImageToVideo, model, codec=codec, device=device, dtype=kind, cuda_graphs=cuda_graphs
    )
    open_folder(out)
    job = VideoJob(
        pipe=pipe, starts=frames, seed=seed, count=count, name=name, policy=chosen,
        options=params, batch_size=batch_size, out=out, suffix=suffix, model=model, dtype=dtype,
    )  # fmt: skip
    job.run()
