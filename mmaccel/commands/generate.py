"""`mmaccel generate`: pictures from a caption, and the same pictures token by token to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmaccel.catalog import MODELS, policy_names

_HELP_POLICY = f"one of {', '.join(policy_names())}"


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="caption; without it, examples of the model")
    ] = None,
    model: Annotated[str, typer.Option(help="demo model or folder")] = "scenes",
    policy: Annotated[str, typer.Option(help=_HELP_POLICY)] = "jacobi",
    window: Annotated[str | None, typer.Option(help='tokens per pass, or "adaptive"')] = None,
    drafts: Annotated[str | None, typer.Option(help="draft source of the policy")] = None,
    coupling: Annotated[str | None, typer.Option(help="coupling of gsd")] = None,
    group: Annotated[int | None, typer.Option(help="group size of gsd")] = None,
    max_gap: Annotated[float | None, typer.Option(help="largest gap in a group of gsd")] = None,
    count: Annotated[int, typer.Option(help="number of pictures")] = 8,
    seed: Annotated[int, typer.Option(help="of the first picture; the next has the next")] = 0,
    out: Annotated[Path, typer.Option(help="folder for the pictures")] = Path("out"),
    compare: Annotated[bool, typer.Option("--compare", help="also token by token")] = False,
    guidance: Annotated[float, typer.Option(help="classifier-free guidance; 1 is off")] = 2.0,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="keep the k likeliest")] = None,
    top_p: Annotated[float | None, typer.Option(help="keep this much probability")] = None,
    min_p: Annotated[float | None, typer.Option(help="least share of the likeliest")] = None,
    batch_size: Annotated[int, typer.Option(help="pictures made together")] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
) -> None:
    """Make pictures. Each carries its caption, seed, policy, versions and stats."""
    from mmaccel.catalog import make_policy
    from mmaccel.commands.picture_job import Job, run_job
    from mmaccel.commands.run_setup import (
        check_count,
        given,
        open_folder,
        open_pipeline,
        parse_window,
    )
    from mmaccel.commands.terminal import Stopped
    from mmaccel.samplers.filters import Filters
    from mmaccel.samplers.noise import Noise

    check_count("count", count)
    check_count("batch-size", batch_size)
    options = given(
        window=parse_window(window),
        drafts=drafts,
        coupling=coupling,
        group=group,
        max_gap=max_gap,
    )
    chosen = make_policy(policy, **options)
    filters = Filters(guidance, temperature, top_k, top_p, min_p)
    pipe = open_pipeline(model, device, dtype)
    examples = MODELS.get(model, MODELS["scenes"]).examples
    captions = [prompt] if prompt is not None else list(examples)
    captions = [captions[k % len(captions)] for k in range(count)]
    for caption in captions:
        pipe.words.encode(caption)
    Noise.from_seed([seed + k for k in range(count)], count)
    open_folder(out)
    job = Job(pipe, captions, seed, policy, chosen, filters, batch_size, out, model, dtype)
    kept, finished = run_job(job, compare=compare)
    if not finished:
        raise Stopped(f"stopped; kept {kept} of {count} pictures in {out}")
