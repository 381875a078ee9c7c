"""`mmaccel bench`: four rows against transformers; or policies and windows, or canvas policies."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from mmaccel.catalog import IMAGE_MODELS
from mmaccel.commands import options as shared
from mmaccel.commands.bench.flags import ALL, ImageFlags, SweepFlags
from mmaccel.commands.flags import Without, with_flags
from mmaccel.commands.options import SizeFlags
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_BATCH, MAX_MEASURED
from mmaccel.options import LoadOptions

_HELP_FAMILY = f"one of {', '.join(IMAGE_MODELS)}; or canvas, for the masked models that ship"


@with_flags
def bench(
    prompt: Annotated[
        str | None, typer.Argument(help="of all images; without it, fresh prompts")
    ] = None,
    *,
    sweep: SweepFlags,
    images: ImageFlags,
    sides: SizeFlags,
    load: Annotated[LoadOptions, Without("dtype", "compile", "cuda_graphs", "family")],
    family: Annotated[str | None, typer.Option(help=_HELP_FAMILY)] = None,
    compile: shared.CompileFirst = False,
) -> None:
    """Measure forward passes and seconds, interleaved image by image.

    Without --policies, --windows, --drafts and --dtypes: transformers' own generate, Jacobi as it
    comes, the fastest relaxed policy, and speculative Jacobi decoding as published. With any of
    them: every policy at every window against token by token.
    """
    from mmaccel.outputs.whole_files import check_target

    shared.check_count("count", images.count, MAX_MEASURED)
    shared.check_count("batch-size", images.batch_size, MAX_BATCH)
    if images.json_file is not None:
        check_target(images.json_file, "--json")
    if family == "canvas":
        from mmaccel.commands.bench.canvas import bench_canvas

        _refuse_with_canvas(
            {
                "--windows": sweep.windows,
                "--drafts": sweep.drafts,
                "--dtypes": sweep.dtypes,
                "a prompt": prompt,
                "--guidance": images.guidance,
                "--temperature": images.temperature,
                "--size": sides.join(),
                "--decoder": images.decoder,
                "--fused/--no-fused": None if load.fused == "auto" else load.fused,
                "--compile": compile or None,
                "--share-prefix": load.share_prefix or None,
                "--trust-remote-code": load.trust_remote_code or None,
                "--revision": load.revision,
            }
        )
        bench_canvas(images, ALL if sweep.policies is None else sweep.policies, load.device)
        return
    load = replace(load, family=family, compile=compile)
    if sweep.is_empty:
        from mmaccel.commands.bench.peers import bench_peers

        bench_peers(prompt, images, sides.join(), load)
        return
    from mmaccel.commands.bench.window import bench_window

    bench_window(prompt, images, sides.join(), load, sweep=sweep)


def _refuse_with_canvas(given: dict[str, Any]) -> None:
    """Raise OptionError for an option that the setups of canvas policies decide."""
    for name, value in given.items():
        if value is not None:
            raise OptionError(
                f"{name}: expected none with --family canvas, whose setups decide all but model, "
                "count, seed, batch size and device; leave it out"
            )
