"""`mmaccel generate`: images from a caption, and the same images token by token to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmaccel.catalog import MODELS, POLICIES
from mmaccel.commands.collector import rest_collector, wake_collector
from mmaccel.pipelines.text_to_image.registry import IMAGE_MODELS

_HELP_POLICY = f"one of {', '.join(POLICIES)}; by default one that is exact"
_HELP_EXECUTOR = "of a file: local, this process, or ray, actors on one or several machines"
_HELP_FILE = "rows {id, prompt, negative, seed, n, size, policy, params}: .jsonl, .csv, .txt or -"
_HELP_NEGATIVE = "what images are guided away from, for models whose authors have it"
_HELP_SET = "a field of the policy as name=value, as often as needed; see mmaccel models"


def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="captions; without them, examples of the model")
    ] = None,
    model: Annotated[str, typer.Option(help="demo model, path or hub id")] = "scenes",
    policy: Annotated[str | None, typer.Option(help=_HELP_POLICY)] = None,
    set_fields: Annotated[list[str] | None, typer.Option("--set", help=_HELP_SET)] = None,
    window: Annotated[str | None, typer.Option(help='tokens per pass, or "adaptive"')] = None,
    drafts: Annotated[str | None, typer.Option(help="draft source of the policy")] = None,
    coupling: Annotated[str | None, typer.Option(help="coupling of gsd")] = None,
    group: Annotated[int | None, typer.Option(help="group size of gsd")] = None,
    max_gap: Annotated[float | None, typer.Option(help="largest gap in a group of gsd")] = None,
    count: Annotated[
        int | None, typer.Option(help="number of images; by default one of each caption, or 8")
    ] = None,
    seed: Annotated[int, typer.Option(help="of the first image; the next has the next")] = 0,
    out: Annotated[Path, typer.Option(help="folder for the images")] = Path("out"),
    compare: Annotated[bool, typer.Option("--compare", help="also token by token")] = False,
    guidance: Annotated[
        float | None, typer.Option(help="classifier-free guidance; 1 is off")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy")] = None,
    top_k: Annotated[int | None, typer.Option(help="keep the k likeliest; 0 keeps all")] = None,
    top_p: Annotated[float | None, typer.Option(help="keep this much probability")] = None,
    min_p: Annotated[float | None, typer.Option(help="least share of the likeliest")] = None,
    negative: Annotated[str | None, typer.Option(help=_HELP_NEGATIVE)] = None,
    size: Annotated[str | None, typer.Option(help="pixels, 768 or 1024x768")] = None,
    decoder: Annotated[
        Path | None, typer.Option(help="image decoder, for checkpoints without one")
    ] = None,
    family: Annotated[str | None, typer.Option(help=f"one of {', '.join(IMAGE_MODELS)}")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="images made together; by default 1, of a file 8")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    cuda_graphs: Annotated[str, typer.Option(help="auto, on or off; on needs a GPU")] = "auto",
    executor: Annotated[str, typer.Option(help=_HELP_EXECUTOR)] = "local",
    prompt_file: Annotated[str | None, typer.Option("--prompts", help=_HELP_FILE)] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="of a file: make what is missing")
    ] = False,
    shard: Annotated[str | None, typer.Option(help="of a file: part i/n of its images")] = None,
    actors: Annotated[int | None, typer.Option(help="of ray: how many processes")] = None,
    retries: Annotated[
        int | None, typer.Option(help="of a file: tries after a failure; by default 1")
    ] = None,
    max_failures: Annotated[
        int | None, typer.Option(help="of a file: end when more images failed")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="of a file: check it, no more")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="of a file: JSON on stdout")] = False,
    json_stream: Annotated[
        bool, typer.Option("--json-stream", help="of a file: a line of JSON per event")
    ] = False,
) -> None:
    """Make images. Each carries its caption, seed, policy, versions and stats.

    With --prompts FILE (.jsonl, .csv, .txt or -), make those of a file: see docs/batch.md.

    Guidance, temperature, top-k and top-p are by default what the model's authors recommend.
    """
    rest_collector()
    from mmaccel.batch.setup import Setup
    from mmaccel.canvas_contracts import kind_of
    from mmaccel.catalog import make_policy
    from mmaccel.commands.batch_options import (
        LOCAL,
        ROWS,
        check_counts,
        check_executor,
        check_together,
        parse_shard,
    )
    from mmaccel.commands.generate_batch import Wish, run_batch
    from mmaccel.commands.image_job import Job, run_job
    from mmaccel.commands.run_setup import (
        check_count,
        check_folder,
        given,
        merge_fields,
        open_folder,
        parse_window,
    )
    from mmaccel.commands.terminal import Stopped
    from mmaccel.loading import open_pipeline, pick_name
    from mmaccel.pipelines.text_to_image.model import (
        choose_params,
        encode_prompts,
        spread_negatives,
    )
    from mmaccel.samplers.noise import Noise
    from mmaccel.samplers.sampling_params import SamplingParams

    single = {"caption": prompts, "--count": count, "--compare": compare}
    batch = {"--resume": resume, "--shard": shard, "--retries": retries is not None}
    batch |= {"--max-failures": max_failures is not None, "--dry-run": dry_run}
    batch |= {"--executor": executor != LOCAL, "--actors": actors is not None}
    batch |= {"--json": as_json, "--json-stream": json_stream}
    check_together(prompt_file, single, batch)
    if count is not None:
        check_count("count", count)
    rows = batch_size if batch_size is not None else 1 if prompt_file is None else ROWS
    check_counts(rows, retries, max_failures)
    check_executor(executor, actors)
    named = given(
        window=parse_window(window),
        drafts=drafts,
        coupling=coupling,
        group=group,
        max_gap=max_gap,
    )
    options = merge_fields(named, set_fields)
    if policy is not None:
        make_policy(policy, **options)
    wanted = dict(
        guidance_scale=guidance, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    choose_params(SamplingParams(), **wanted)
    if prompt_file is not None:
        setup = Setup(
            model, out, policy, options, given(**wanted), device, dtype, decoder, family,
            cuda_graphs, size, rows, negative,
        )  # fmt: skip
        limits = (1 if retries is None else retries, max_failures)
        flags = (resume, dry_run, as_json, json_stream)
        return run_batch(
            Wish(prompt_file, setup, seed, parse_shard(shard), *flags, *limits, executor, actors)
        )
    check_folder(out)
    pipe = open_pipeline(
        model, device, dtype, size=size, decoder=decoder, family=family, cuda_graphs=cuda_graphs
    )
    wake_collector()
    name, options = pick_name(policy, options, kind_of(pipe.model))
    chosen = make_policy(name, **options)
    params = choose_params(pipe.image_model.params, **wanted)
    examples = MODELS[model].examples if model in MODELS else pipe.image_model.examples
    captions = list(prompts or examples)
    if count is None:
        count = 8 if len(captions) == 1 and model in MODELS else len(captions)
    captions = [captions[k % len(captions)] for k in range(count)]
    (negative,) = spread_negatives(negative, 1)
    encode_prompts(pipe.image_model, captions, [negative] * count, params)
    Noise.from_seed([seed + k for k in range(count)], count)
    open_folder(out)
    extras = given(size=size, family=family)
    job = Job(
        pipe, captions, seed, name, chosen, params, rows, out, model, dtype, extras,
        decoder, negative,
    )  # fmt: skip
    kept, finished = run_job(job, compare=compare)
    if not finished:
        raise Stopped(f"stopped; kept {kept} of {count} images in {out}")
