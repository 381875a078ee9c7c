"""`mmaccel generate`: images from prompts, of the command line or of a file.

This module checks the options and opens the model. `generate_images` and `generate_batch` generate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mmaccel.catalog import MODELS
from mmaccel.checks import show
from mmaccel.commands import options as shared
from mmaccel.commands.flags import with_flags
from mmaccel.commands.options import ImagePolicyFlags, LayerFlags, SizeFlags
from mmaccel.commands.process import pause_collector, resume_collector
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_ACTORS, MAX_BATCH, MAX_IMAGES, MAX_RETRIES, check_most
from mmaccel.options import LoadOptions, SamplingOptions, given

LOCAL, RAY = "local", "ray"

_BATCH_ROWS = 8
_HELP_COUNT = "images of each prompt, by default one; without prompts, images in all"
_HELP_EXECUTOR = "of a file: local, this process, or ray, actors on one or several machines"
_HELP_FILE = "rows {id, prompt, negative, seed, n, size, policy, params}: .jsonl, .csv, .txt or -"
_HELP_SEED = "of the first image, the next has the next; by default drawn, and printed"
_HELP_NEGATIVE = "negative prompt, for models whose authors have it"


@dataclass(frozen=True, kw_only=True)
class FileFlags:
    """Images of a prompt file.

    Attributes:
        prompt_file: of rows; None makes images of the command line.
        executor, actors: who generates.
        resume, shard, retries, max_failures, dry_run: of the job.
        as_json, json_stream: reports for programs.
    """

    executor: Annotated[str, typer.Option(help=_HELP_EXECUTOR)] = LOCAL
    prompt_file: Annotated[str | None, typer.Option("--prompts", help=_HELP_FILE)] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="of a file: generate what is missing")
    ] = False
    shard: Annotated[str | None, typer.Option(help="of a file: part i/n of its images")] = None
    actors: Annotated[int | None, typer.Option(help="of ray: how many processes")] = None
    retries: Annotated[
        int | None, typer.Option(help="of a file: tries after a failure; by default 1")
    ] = None
    max_failures: Annotated[
        int | None, typer.Option(help="of a file: end when more images failed")
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="of a file: check it, no more")] = False
    as_json: Annotated[bool, typer.Option("--json", help="of a file: JSON on stdout")] = False
    json_stream: Annotated[
        bool, typer.Option("--json-stream", help="of a file: a line of JSON per event")
    ] = False

    def check(self, single: dict[str, Any]) -> None:
        """Refuse numbers outside their domains, and options of the other way to give prompts.

        Args:
            single: options of images of the command line, by name; None, False or empty was not
                given.

        Raises:
            OptionError: with the first such option.
        """
        batch = {"--resume": self.resume, "--shard": self.shard}
        batch |= {"--retries": self.retries is not None}
        batch |= {"--max-failures": self.max_failures is not None, "--dry-run": self.dry_run}
        batch |= {"--executor": self.executor != LOCAL, "--actors": self.actors is not None}
        batch |= {"--json": self.as_json, "--json-stream": self.json_stream}
        _check_mode(self.prompt_file, single, batch)
        _check_not_negative("retries", self.retries)
        check_most(
            "--retries", self.retries or 0, MAX_RETRIES, "what failed so often will fail again"
        )
        _check_not_negative("max-failures", self.max_failures)
        _check_executor(self.executor, self.actors)


@with_flags
def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="without them, examples of the model")
    ] = None,
    *,
    model: Annotated[str, typer.Option(help="demo model, path or hub id")] = "scenes",
    method: ImagePolicyFlags,
    layer: LayerFlags,
    count: Annotated[
        int | None, typer.Option("--num-images", "-n", "--count", help=_HELP_COUNT)
    ] = None,
    seed: Annotated[int | None, typer.Option(help=_HELP_SEED)] = None,
    out: shared.Out = Path("out"),
    compare: Annotated[bool, typer.Option("--compare", help="also token by token")] = False,
    sampling: SamplingOptions,
    negative: Annotated[
        str | None, typer.Option("--negative-prompt", "--negative", help=_HELP_NEGATIVE)
    ] = None,
    sides: SizeFlags,
    decoder: shared.Decoder = None,
    batch_size: Annotated[
        int | None, typer.Option(help="images generated together; by default 1, of a file 8")
    ] = None,
    load: LoadOptions,
    threads: shared.Threads = None,
    file: FileFlags,
) -> None:
    """Generate images. Each carries its prompt, seed, policy, versions and stats.

    With --prompts FILE (.jsonl, .csv, .txt or -), generate those of a file: see docs/batch.md.

    Guidance, temperature, top-k and top-p are by default those the model's authors recommend.
    """
    pause_collector()
    from mmaccel.batch.worker import Setup
    from mmaccel.commands.files import check_folder, open_folder
    from mmaccel.commands.generate_batch import BatchOptions, run_batch
    from mmaccel.commands.generate_images import ImageJob, choose_threads_for
    from mmaccel.loading import open_pipeline, place
    from mmaccel.pipelines.call_options import DecodingOptions
    from mmaccel.pipelines.text_to_image.model import (
        choose_params,
        encode_prompts,
        spread_negatives,
    )
    from mmaccel.samplers.noise import Noise
    from mmaccel.samplers.sampling_params import SamplingParams

    single = {"prompt": prompts, "--num-images": count, "--compare": compare}
    file.check(single | {"--kv-cache": layer.kv_cache, "--attention": layer.attention})
    if count is not None:
        many = MAX_IMAGES // max(1, len(prompts or ()))
        shared.check_count("num-images", count, many, "a file takes more, see --prompts")
    size = sides.join()
    usual_rows = 1 if file.prompt_file is None else _BATCH_ROWS
    rows = usual_rows if batch_size is None else batch_size
    shared.check_count("batch-size", rows, MAX_BATCH)
    load = place(load)
    shared.set_threads(threads)
    options = method.read()
    layers = layer.read()
    choose_params(SamplingParams(), **given(sampling))
    if file.prompt_file is not None:
        setup = Setup(
            model,
            out,
            policy=method.policy,
            options=options,
            sampling=sampling,
            load=load,
            decoder=decoder,
            size=size,
            rows=rows,
            negative=negative,
        )
        return run_batch(
            BatchOptions(
                file.prompt_file,
                setup,
                seed,
                shard=_parse_shard(file.shard),
                is_resumed=file.resume,
                is_dry=file.dry_run,
                is_json=file.as_json,
                is_streaming=file.json_stream,
                retries=1 if file.retries is None else file.retries,
                max_failures=file.max_failures,
                executor=file.executor,
                actors=file.actors,
            )
        )
    seed, is_drawn = shared.pick_seed(seed)
    check_folder(out)
    pipe = open_pipeline(model, load, size=size, decoder=decoder)
    resume_collector()
    name, policy = method.choose(pipe.model.kind)
    pipe.choose(DecodingOptions(policy=policy, **layers))
    params = choose_params(pipe.image_model.params, **given(sampling))
    examples = MODELS[model].examples if model in MODELS else pipe.image_model.examples
    texts = _spread_prompts(prompts, count, examples)
    (negative,) = spread_negatives(negative, 1)
    encoded = encode_prompts(pipe.image_model, texts, [negative] * len(texts), params)
    Noise.from_seed([seed + k for k in range(len(texts))], len(texts))
    open_folder(out)
    choose_threads_for(pipe, policy, params, texts[0], min(rows, len(texts)), threads)
    job = ImageJob(
        pipe,
        texts,
        encoded,
        seed,
        name=name,
        policy=policy,
        params=params,
        batch_size=rows,
        out=out,
        model=model,
        dtype=load.dtype,
        extras=shared.given(size=size, family=load.family),
        decoder=decoder,
        negative=negative,
        compare=compare,
        layers=layers,
        is_seed_drawn=is_drawn,
    )
    job.run()


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
    wrong = [name for name, value in (batch if prompt_file is None else single).items() if value]
    if not wrong:
        return
    if prompt_file is None:
        raise OptionError(f"{wrong[0]}: expected --prompts FILE with it; it is for prompt files")
    raise OptionError(
        f"--prompts: expected no {wrong[0]} with it, because each row of the file has its "
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
