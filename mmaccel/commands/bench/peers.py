"""`mmaccel bench`: Jacobi as it comes beside transformers and a published rule, in four rows.

The rows, measured in one run and interleaved image by image, at every guidance scale:

1. transformers' own `generate` with a static cache, its pass of one token compiled where a compiler
   is there; the others are compared with it;
2. `Jacobi()`, the default;
3. the relaxed policy that makes most tokens a second on `scenes`;
4. speculative Jacobi decoding as published: windows of 16, redraws independent of the drafts, first
   drafts uniformly at random (Y. Teng et al., ICLR 2025, arXiv 2410.01699). Its released code
   records a random draft as certain; ours records its distribution, which accepts no less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mmaccel.catalog import make_policy
from mmaccel.commands.bench.flags import ImageFlags
from mmaccel.commands.bench.measure import measure_images
from mmaccel.commands.bench.setup import (
    check_json,
    list_params,
    parse_scales,
    pick_prompts,
    read_card,
    write_rows,
)
from mmaccel.commands.files import new_report
from mmaccel.commands.process import Stopped
from mmaccel.commands.terminal import count_of, make_table, stderr_console, wide_console
from mmaccel.evaluation.speed.measure import Side
from mmaccel.loading import open_pipeline, place
from mmaccel.options import LoadOptions
from mmaccel.outputs.machine import package_version
from mmaccel.results import EXACT_DTYPE, exactness_in
from mmaccel.samplers.drafting.coarse_model import describe_coarse
from mmaccel.samplers.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mmaccel.pipelines.text_to_image.pipeline import TextToImage

_POLICIES: dict[str, tuple[str, dict[str, Any]]] = {  # label -> short name, fields
    "Jacobi, as it comes": ("jacobi", {}),
    "GSD, fastest relaxed": ("gsd", {"window": 16, "drafts": "auto"}),
    "SJD, as published": ("sjd", {"window": 16, "drafts": "random"}),
}


def bench_peers(
    prompt: str | None, images: ImageFlags, size: str | None, load: LoadOptions
) -> None:
    """Measure and print; the arguments are those of `mmaccel bench`.

    Raises:
        OptionError: a wrong option, before any measurement.
        Stopped: Ctrl-C; the file has what was measured.
    """
    scales = parse_scales(images.guidance)
    list_params(SamplingParams(), scales, images.temperature)
    load = place(replace(load, dtype=EXACT_DTYPE))
    pipe = open_pipeline(images.model, load, size=size, decoder=images.decoder)
    params = list_params(pipe.image_model.params, scales, images.temperature)
    prompts = pick_prompts(prompt, images.model, pipe.image_model, images.count)
    check_json(images.json_file)
    rows: list[dict[str, Any]] = []
    for own in params:
        try:
            found = _measure(pipe, prompts, own, images.seed, images.batch_size)
        except KeyboardInterrupt:  # while the first images were made, which count nowhere
            break
        rows += found
        if not found or found[0]["images"] < images.count:
            break
    coarse = getattr(pipe.model, "coarse", None)
    report = new_report(
        load.device,
        model=images.model,
        card=read_card(pipe.source),
        count=images.count,
        batch_size=images.batch_size,
        temperature=params[0].temperature,
        seed=images.seed,
        first_screen=rows,
        coarse=None if coarse is None else describe_coarse(coarse),
    )
    write_rows(images.json_file if rows else None, report, lambda: _print(rows))
    done = sum(row["images"] for row in rows) // 4
    wanted = images.count * len(params)
    if done < wanted:
        raise Stopped(f"stopped; measured {done} of {count_of(wanted, 'image')} a row")


def _measure(
    pipe: TextToImage, prompts: Sequence[str], params: SamplingParams, seed: int, batch_size: int
) -> list[dict[str, Any]]:
    """The rows of one guidance scale, ready for JSON; none after an early Ctrl-C."""
    first = _open_baseline(pipe, prompts, params)
    sides = [first]
    for name, fields in _POLICIES.values():
        sides.append(Side(name, pipe, make_policy(name, **fields), params))
    stderr_console().print(
        f"guidance {params.guidance_scale:g}: {first.name}, then images of all four in turn"
    )
    try:
        rows = measure_images(sides, prompts, seed, batch_size)
    finally:
        if first.policy is None:
            first.source.close()
    labels = [first.name, *_POLICIES]
    return [{"label": label, **row} for label, row in zip(labels, rows)]


def _open_baseline(pipe: TextToImage, prompts: Sequence[str], params: SamplingParams) -> Side:
    """The first row: transformers' `generate`, or the plain loop where that makes no images."""
    from mmaccel.evaluation.speed.transformers_baseline import BaselineDecoding, find_obstacle

    generate = f"transformers {package_version('transformers')}"
    for name, how in (("compiled", "compiled"), ("static", "not compiled")):
        reason = find_obstacle(pipe, name, prompts[0], params)
        if not reason:
            decoding = BaselineDecoding(pipe, name, prompts)
            return Side(f"{generate}, {how}", decoding, None, params)
        stderr_console().print(f"{generate}, {how}, is left out: {reason}")
    return Side("the plain loop of mmaccel", pipe, make_policy("autoregressive"), params)


def _print(rows: Sequence[dict[str, Any]]) -> None:
    console = wide_console()
    heads = ("tok/pass", "s/image", "speed-up", "same tokens", "exactness")
    for guidance in dict.fromkeys(row["guidance"] for row in rows):
        table = make_table("decoding", *heads, title=f"guidance {guidance:g}")
        for row in rows:
            if row["guidance"] == guidance:
                table.add_row(*_cells(row))
        console.print(table, "")
    if rows:
        console.print(
            f"{count_of(rows[0]['images'], 'image')} a row. transformers: generate with a static "
            "cache. relaxed: with the total variation spent a token. All policies and windows: "
            "mmaccel bench --policies all"
        )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    half = "" if row["half_width"] is None else f"±{row['half_width']:.2f}"
    spent = f" {row['total_variation']:.3f}" if row["exactness"] == "relaxed" else ""
    return (
        row["label"],
        f"{row['tokens_per_pass']:.2f}{half}",
        f"{row['seconds']:.3f}",
        f"{row['speed_up']:.2f}",
        f"{row['identical']}/{row['images']}",
        exactness_in(row["exactness"], row["dtype"]) + spent,
    )
