"""`mmaccel bench`: policies and windows, or canvas policies, measured in one run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mmaccel.commands import options as shared
from mmaccel.limits import MAX_BATCH, MAX_MEASURED
from mmaccel.pipelines.text_to_image.registry import IMAGE_MODELS

ALL = "all"

_WINDOWS, _DTYPES = "1,16,32,64,adaptive", "float32"
_HELP_DRAFTS = "draft sources with commas, such as neighbour,coarse, or folders of coarse models"
_HELP_FAMILY = f"one of {', '.join(IMAGE_MODELS)}; or canvas, for the masked models that ship"


def bench(
    prompt: Annotated[
        str | None, typer.Argument(help="of all images; without it, fresh prompts")
    ] = None,
    model: Annotated[str, typer.Option(help="demo model, path or hub id")] = "scenes",
    policies: Annotated[
        str, typer.Option(help="short names, or setups of canvas, with commas")
    ] = ALL,
    windows: Annotated[str, typer.Option(help="with commas")] = _WINDOWS,
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
    size: shared.Size = None,
    decoder: shared.Decoder = None,
    family: Annotated[str | None, typer.Option(help=_HELP_FAMILY)] = None,
    device: shared.Device = "auto",
    dtypes: Annotated[str, typer.Option(help="with commas; the first is the baseline")] = _DTYPES,
    fused: shared.Fused = None,
    compile: shared.CompileFirst = False,
    trust_remote_code: shared.TrustRemoteCode = False,
    json_file: shared.JsonFile = None,
) -> None:
    """Measure forward passes and seconds against token by token, interleaved image by image."""
    from mmaccel.errors import OptionError
    from mmaccel.outputs.whole_files import check_target

    shared.check_count("count", count, MAX_MEASURED)
    shared.check_count("batch-size", batch_size, MAX_BATCH)
    if json_file is not None:
        check_target(json_file, "--json")
    if family != "canvas":
        from mmaccel.commands.bench_window import bench_window

        return bench_window(
            prompt=prompt, model=model, policies=policies, windows=windows, drafts=drafts,
            guidance=guidance, count=count, seed=seed, batch_size=batch_size,
            temperature=temperature, size=size, decoder=decoder, family=family, device=device,
            dtypes=dtypes, fused=shared.read_switch(fused), compile=compile,
            json_file=json_file, trust_remote_code=trust_remote_code,
        )  # fmt: skip
    from mmaccel.commands.bench_canvas import bench_canvas

    given: dict[str, Any] = {
        "--windows": windows if windows != _WINDOWS else None,
        "--drafts": drafts,
        "--dtypes": dtypes if dtypes != _DTYPES else None,
        "a prompt": prompt,
        "--guidance": guidance,
        "--temperature": temperature,
        "--size": size,
        "--decoder": decoder,
        "--fused/--no-fused": fused,
        "--compile": compile or None,
        "--trust-remote-code": trust_remote_code or None,
    }
    for name, value in given.items():
        if value is not None:
            raise OptionError(
                f"{name}: expected none with --family canvas, whose setups decide all but model, "
                "count, seed, batch size and device; leave it out"
            )
    bench_canvas(model, policies, count, seed, batch_size, json_file, device)
