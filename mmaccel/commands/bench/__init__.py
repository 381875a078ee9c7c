"""`mmaccel bench`: four rows against transformers; or policies and windows, or canvas policies."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from mmaccel.catalog import IMAGE_MODELS
from mmaccel.commands import options as shared
from mmaccel.commands.bench.labels import ALL
from mmaccel.commands.flags import Without, with_flags
from mmaccel.commands.options import SizeFlags
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_BATCH, MAX_MEASURED
from mmaccel.options import LoadOptions

_WINDOWS, _DTYPES = "1,16,32,64,adaptive", "float32"
_HELP_POLICIES = "short names, module:Name, or setups of canvas, with commas; or all"
_HELP_WINDOWS = f"with commas; by default {_WINDOWS}"
_HELP_DTYPES = "with commas; the first, by default float32, is the baseline"
_HELP_DRAFTS = "draft sources with commas, such as neighbour,coarse, or folders of coarse models"
_HELP_FAMILY = f"one of {', '.join(IMAGE_MODELS)}; or canvas, for the masked models that ship"


@with_flags
def bench(
    prompt: Annotated[
        str | None, typer.Argument(help="of all images; without it, fresh prompts")
    ] = None,
    *,
    model: Annotated[str, typer.Option(help="demo model, path or hub id")] = "scenes",
    policies: Annotated[str | None, typer.Option(help=_HELP_POLICIES)] = None,
    windows: Annotated[str | None, typer.Option(help=_HELP_WINDOWS)] = None,
    drafts: Annotated[str | None, typer.Option(help=_HELP_DRAFTS)] = None,
    guidance: Annotated[
        str | None, typer.Option(help="scales with commas; by default 1 and the model's own")
    ] = None,
    count: Annotated[int, typer.Option(help="number of fresh prompts")] = 16,
    seed: Annotated[int, typer.Option(help="of the first image")] = 0,
    batch_size: Annotated[int, typer.Option(help="images generated together")] = 1,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; by default the model's own")
    ] = None,
    sides: SizeFlags,
    decoder: shared.Decoder = None,
    load: Annotated[LoadOptions, Without("dtype", "compile", "cuda_graphs", "family")],
    family: Annotated[str | None, typer.Option(help=_HELP_FAMILY)] = None,
    dtypes: Annotated[str | None, typer.Option(help=_HELP_DTYPES)] = None,
    compile: shared.CompileFirst = False,
    json_file: shared.JsonFile = None,
) -> None:
    """Measure forward passes and seconds, interleaved image by image.

    Without --policies, --windows, --drafts and --dtypes: transformers' own generate, Jacobi as it
    comes, the fastest relaxed policy, and speculative Jacobi decoding as published. With any of
    them: every policy at every window against token by token.
    """
    from mmaccel.outputs.whole_files import check_target

    shared.check_count("count", count, MAX_MEASURED)
    shared.check_count("batch-size", batch_size, MAX_BATCH)
    if json_file is not None:
        check_target(json_file, "--json")
    if family == "canvas":
        from mmaccel.commands.bench.canvas import bench_canvas

        _refuse_with_canvas(
            {
                "--windows": windows,
                "--drafts": drafts,
                "--dtypes": dtypes,
                "a prompt": prompt,
                "--guidance": guidance,
                "--temperature": temperature,
                "--size": sides.join(),
                "--decoder": decoder,
                "--fused/--no-fused": None if load.fused == "auto" else load.fused,
                "--compile": compile or None,
                "--trust-remote-code": load.trust_remote_code or None,
                "--revision": load.revision,
            }
        )
        labels = ALL if policies is None else policies
        return bench_canvas(model, labels, count, seed, batch_size, json_file, load.device)
    shared_options: dict[str, Any] = dict(
        prompt=prompt, model=model, guidance=guidance, count=count, seed=seed,
        batch_size=batch_size, temperature=temperature, size=sides.join(), decoder=decoder,
        load=replace(load, family=family, compile=compile), json_file=json_file,
    )  # fmt: skip
    if (policies, windows, drafts, dtypes) == (None, None, None, None):
        from mmaccel.commands.bench.peers import bench_peers

        return bench_peers(**shared_options)
    from mmaccel.commands.bench.window import bench_window

    bench_window(
        policies=ALL if policies is None else policies,
        windows=_WINDOWS if windows is None else windows,
        drafts=drafts,
        dtypes=_DTYPES if dtypes is None else dtypes,
        **shared_options,
    )


def _refuse_with_canvas(given: dict[str, Any]) -> None:
    """Raise OptionError for an option that the setups of canvas policies decide."""
    for name, value in given.items():
        if value is not None:
            raise OptionError(
                f"{name}: expected none with --family canvas, whose setups decide all but model, "
                "count, seed, batch size and device; leave it out"
            )
