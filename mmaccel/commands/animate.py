"""`mmaccel animate`: clips that begin with a picture or with the end of another clip."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmaccel.catalog import POLICIES
from mmaccel.commands.collector import rest_collector

_WINDOW = [name for name, entry in POLICIES.items() if entry.kind == "window"]
_HELP_POLICY = f"one of {', '.join(_WINDOW)}; by default jacobi, which is exact"
_HELP_SET = "a field of the policy as name=value, as often as needed; see mmaccel models"
_MOST = 9  # frames that a model here takes
_HELP_CODEC = "folder or hub id: what turns tokens into frames; by default its authors', of the hub"


def animate(
    starts: Annotated[list[Path], typer.Argument(help="pictures or videos, to be continued each")],
    model: Annotated[str, typer.Option(help="folder or hub id: nvidia/Cosmos-Predict1-4B")],
    codec: Annotated[str | None, typer.Option(help=_HELP_CODEC)] = None,
    policy: Annotated[str | None, typer.Option(help=_HELP_POLICY)] = None,
    set_fields: Annotated[list[str] | None, typer.Option("--set", help=_HELP_SET)] = None,
    window: Annotated[str | None, typer.Option(help='tokens per pass, or "adaptive"')] = None,
    count: Annotated[int, typer.Option(help="clips of each start")] = 1,
    seed: Annotated[int, typer.Option(help="of a start's first clip; the next has the next")] = 0,
    out: Annotated[Path, typer.Option(help="folder for the files")] = Path("out"),
    temperature: Annotated[float | None, typer.Option(help="0 is greedy")] = None,
    top_k: Annotated[int | None, typer.Option(help="keep the k likeliest; 0 keeps all")] = None,
    top_p: Annotated[float | None, typer.Option(help="keep this much probability")] = None,
    min_p: Annotated[float | None, typer.Option(help="least share of the likeliest")] = None,
    batch_size: Annotated[int, typer.Option(help="clips of a start in the making at most")] = 1,
    file_format: Annotated[
        str | None, typer.Option("--format", help="mp4 or webp (lossless)")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    cuda_graphs: Annotated[str, typer.Option(help="auto, on or off; on needs a GPU")] = "auto",
) -> None:
    """Continue pictures or videos, each clip in a file with a JSON file beside it.

    Temperature and truncation are by default what the model's authors recommend.
    """
    rest_collector()
    from mmaccel.catalog import make_policy
    from mmaccel.commands.run_setup import (
        check_count,
        check_folder,
        given,
        merge_fields,
        open_folder,
        parse_window,
    )
    from mmaccel.commands.terminal import Stopped
    from mmaccel.commands.video_job import VideoJob, open_animator, run_video
    from mmaccel.opening import parse_dtype, pick_name
    from mmaccel.outputs.video_files import pick_format, read_frames
    from mmaccel.pipelines.picture_model import choose_filters
    from mmaccel.samplers.filters import Filters
    from mmaccel.samplers.noise import check_seed

    check_count("count", count)
    check_count("batch-size", batch_size)
    check_seed([seed + k for k in range(count)])
    options = merge_fields(given(window=parse_window(window)), set_fields)
    name, options = pick_name(policy, options, "window")
    chosen, kind = make_policy(name, **options), parse_dtype(dtype)
    law = given(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    choose_filters(Filters(), **law)
    suffix = pick_format(file_format)
    check_folder(out)
    frames = {start: read_frames(start, _MOST) for start in starts}  # before what may take minutes
    pipe = open_animator(model, codec, device, kind, cuda_graphs)
    open_folder(out)
    job = VideoJob(
        pipe=pipe, starts=frames, seed=seed, count=count, name=name, policy=chosen, options=law,
        batch_size=batch_size, out=out, suffix=suffix, model=model, dtype=dtype,
    )  # fmt: skip
    if not run_video(job):
        raise Stopped(f"stopped; {job.told} in {out}")
