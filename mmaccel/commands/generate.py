"""`mmaccel generate`: images from prompts, of the command line or of a file.

This module checks the options and opens the model. `generate_images` and `generate_batch` generate.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from mmaccel.catalog import IMAGE_MODELS, MODELS
from mmaccel.checks import show
from mmaccel.commands import options as shared
from mmaccel.commands.process import pause_collector, resume_collector
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_ACTORS, MAX_BATCH, MAX_IMAGES, MAX_RETRIES, check_most

LOCAL, RAY = "local", "ray"

_BATCH_ROWS = 8
_HELP_COUNT = "images of each prompt, by default one; without prompts, images in all"
_HELP_EXECUTOR = "of a file: local, this process, or ray, actors on one or several machines"
_HELP_FILE = "rows {id, prompt, negative, seed, n, size, policy, params}: .jsonl, .csv, .txt or -"
_HELP_SEED = "of the first image, the next has the next; by default drawn, and printed"
_HELP_NEGATIVE = "negative prompt, for models whose authors have it"


def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="without them, examples of the model")
    ] = None,
    model: Annotated[str, typer.Option(help="demo model, path or hub id")] = "scenes",
    policy: shared.Policy = None,
    set_fields: shared.SetFields = None,
    window: shared.Window = None,
    drafts: shared.Drafts = None,
    coupling: Annotated[str | None, typer.Option(help="coupling of gsd")] = None,
    group: Annotated[int | None, typer.Option(help="group size of gsd")] = None,
    max_gap: Annotated[float | None, typer.Option(help="largest gap in a group of gsd")] = None,
    count: Annotated[
        int | None, typer.Option("--num-images", "-n", "--count", help=_HELP_COUNT)
    ] = None,
    seed: Annotated[int | None, typer.Option(help=_HELP_SEED)] = None,
    out: shared.Out = Path("out"),
    compare: Annotated[bool, typer.Option("--compare", help="also token by token")] = False,
    guidance: shared.Guidance = None,
    temperature: shared.Temperature = None,
    top_k: shared.TopK = None,
    top_p: shared.TopP = None,
    min_p: shared.MinP = None,
    negative: Annotated[
        str | None, typer.Option("--negative-prompt", "--negative", help=_HELP_NEGATIVE)
    ] = None,
    size: shared.Size = None,
    width: shared.Width = None,
    height: shared.Height = None,
    decoder: shared.Decoder = None,
    family: Annotated[str | None, typer.Option(help=f"one of {', '.join(IMAGE_MODELS)}")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="images generated together; by default 1, of a file 8")
    ] = None,
    device: shared.Device = "auto",
    dtype: shared.Dtype = "auto",
    threads: shared.Threads = None,
    cuda_graphs: shared.CudaGraphs = "auto",
    fused: shared.Fused = None,
    compile: shared.Compile = None,
    trust_remote_code: shared.TrustRemoteCode = False,
    revision: shared.Revision = None,
    executor: Annotated[str, typer.Option(help=_HELP_EXECUTOR)] = LOCAL,
    prompt_file: Annotated[str | None, typer.Option("--prompts", help=_HELP_FILE)] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="of a file: generate what is missing")
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
    """Generate images. Each carries its prompt, seed, policy, versions and stats.

    With --prompts FILE (.jsonl, .csv, .txt or -), generate those of a file: see docs/batch.md.

    Guidance, temperature, top-k and top-p are by default those the model's authors recommend.
    """
    pause_collector()
    from mmaccel.batch.worker import Setup
    from mmaccel.catalog import make_policy
    from mmaccel.commands.files import check_folder, open_folder
    from mmaccel.commands.generate_batch import BatchOptions, run_batch
    from mmaccel.commands.generate_images import ImageJob, choose_threads_for
    from mmaccel.loading import choose_names, open_pipeline, pick_name
    from mmaccel.pipelines.text_to_image.model import (
        choose_params,
        encode_prompts,
        spread_negatives,
    )
    from mmaccel.samplers.noise import Noise
    from mmaccel.samplers.sampling_params import SamplingParams

    single = {"prompt": prompts, "--num-images": count, "--compare": compare}
    batch = {"--resume": resume, "--shard": shard, "--retries": retries is not None}
    batch |= {"--max-failures": max_failures is not None, "--dry-run": dry_run}
    batch |= {"--executor": executor != LOCAL, "--actors": actors is not None}
    batch |= {"--json": as_json, "--json-stream": json_stream}
    _check_mode(prompt_file, single, batch)
    if count is not None:
        many = MAX_IMAGES // max(1, len(prompts or ()))
        shared.check_count("num-images", count, many, "a file takes more, see --prompts")
    size = shared.join_size(size, width, height)
    rows = batch_size if batch_size is not None else 1 if prompt_file is None else _BATCH_ROWS
    shared.check_count("batch-size", rows, MAX_BATCH)
    _check_not_negative("retries", retries)
    check_most("--retries", retries or 0, MAX_RETRIES, "what failed so often will fail again")
    _check_not_negative("max-failures", max_failures)
    _check_executor(executor, actors)
    device, dtype = choose_names(device, dtype)
    shared.set_threads(threads)
    named = shared.given(
        window=shared.parse_window(window),
        drafts=drafts,
        coupling=coupling,
        group=group,
        max_gap=max_gap,
    )
    options = shared.merge_fields(named, set_fields)
    if policy is not None:
        make_policy(policy, **options)
    sampling = dict(
        guidance_scale=guidance, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    choose_params(SamplingParams(), **sampling)
    if prompt_file is not None:
        setup = Setup(
            model, out, policy, options, shared.given(**sampling), device, dtype, decoder, family,
            cuda_graphs, size, rows, negative, trust_remote_code, revision,
            shared.read_switch(fused), shared.read_switch(compile),
        )  # fmt: skip
        limits = (1 if retries is None else retries, max_failures)
        flags = (resume, dry_run, as_json, json_stream)
        return run_batch(
            BatchOptions(
                prompt_file, setup, seed, _parse_shard(shard), *flags, *limits, executor, actors
            )
        )
    seed, is_drawn = shared.pick_seed(seed)
    check_folder(out)
    pipe = open_pipeline(
        model, device, dtype, size=size, decoder=decoder, family=family, cuda_graphs=cuda_graphs,
        fused=shared.read_switch(fused), compile=shared.read_switch(compile),
        trust_remote_code=trust_remote_code, revision=revision,
    )  # fmt: skip
    resume_collector()
    name, options = pick_name(policy, options, pipe.model.kind)
    chosen = make_policy(name, **options)
    params = choose_params(pipe.image_model.params, **sampling)
    examples = MODELS[model].examples if model in MODELS else pipe.image_model.examples
    texts = _spread_prompts(prompts, count, examples)
    (negative,) = spread_negatives(negative, 1)
    encode_prompts(pipe.image_model, texts, [negative] * len(texts), params)
    Noise.from_seed([seed + k for k in range(len(texts))], len(texts))
    open_folder(out)
    choose_threads_for(pipe, chosen, params, texts[0], min(rows, len(texts)), threads)
    ImageJob(
        pipe, texts, seed, name, chosen, params, rows, out, model, dtype,
        shared.given(size=size, family=family), decoder, negative, compare,
        is_drawn,
    ).run()  # fmt: skip


def _spread_prompts(
    prompts: list[str] | None, count: int | None, examples: tuple[str, ...]
) -> list[str]:
    """A prompt for each image: `count` of each of the user's, or `count` of the examples."""
    if prompts:
        return [text for text in prompts for _ in range(count or 1)]
    return [examples[k % len(examples)] for k in range(count or len(examples))]


def _check_mode(prompt_file: str | None, single: dict[str, Any], batch: dict[str, Any]) -> None:
    """Refuse options for single images with a prompt file, and options of a file without one.

    Args:
        prompt_file: value of `--prompts`.
        single, batch: options by name; None, False or empty was not given.

    Raises:
        OptionError: with the first such option.
    """
    given = [name for name, value in (batch if prompt_file is None else single).items() if value]
    if not given:
        return
    if prompt_file is None:
        raise OptionError(f"{given[0]}: expected --prompts FILE with it; it is for prompt files")
    raise OptionError(
        f"--prompts: expected no {given[0]} with it, because each row of the file has its "
        "own prompt and count; leave it out, or write it into the file"
    )


def _check_not_negative(name: str, value: int | None) -> None:
    if value is not None and value < 0:
        raise OptionError(f"--{name}: expected 0 or more, received {show(value)}; 0 allows none")


def _check_executor(executor: str, actors: int | None) -> None:
    if executor not in (LOCAL, RAY):
        raise OptionError(
            f"--executor: expected {LOCAL} or {RAY}, received {executor!r}; {LOCAL} is this process"
        )
    if actors is None:
        return
    shared.check_count("actors", actors, MAX_ACTORS)
    if executor != RAY:
        raise OptionError(f"--actors: expected --executor ray with it, received {executor}; add it")


def _parse_shard(text: str | None) -> tuple[int, int] | None:
    """The value of `--shard`: `i/n`, counted from 1.

    Raises:
        OptionError: anything else.
    """
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", text)
    index, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= index <= count:
        raise OptionError(
            f"--shard: expected i/n with i in 1..n, such as 1/4, received {text!r}; the first is 1"
        )
    return index, count
