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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmaccel.catalog import make_policy
from mmaccel.commands.bench.setup import (
    check_json,
    list_params,
    parse_scales,
    pick_prompts,
    read_card,
)
from mmaccel.commands.bench.window import Setup, measure
from mmaccel.commands.files import new_report, write_json
from mmaccel.commands.process import Stopped
from mmaccel.commands.terminal import count_of, make_table, stderr_console, wide_console
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
    *, prompt: str | None, model: str, guidance: str | None, count: int, seed: int,
    batch_size: int, temperature: float | None, size: str | None, decoder: Path | None,
    load: LoadOptions, json_file: Path | None,
) -> None:  # fmt: skip
    """Measure and print; the arguments are those of `mmaccel bench`.

    Raises:
        OptionError: a wrong option, before any measurement.
        Stopped: Ctrl-C; the file has what was measured.
    """
    scales = parse_scales(guidance)
    list_params(SamplingParams(), scales, temperature)
    load = place(replace(load, dtype=EXACT_DTYPE))
    pipe = open_pipeline(model, load, size=size, decoder=decoder)
    params = list_params(pipe.image_model.params, scales, temperature)
    prompts = pick_prompts(prompt, model, pipe.image_model, count)
    check_json(json_file)
    rows: list[dict[str, Any]] = []
    for own in params:
        try:
            found = _measure(pipe, prompts, own, seed, batch_size)
        except KeyboardInterrupt:  # while the first images were made, which count nowhere
            break
        rows += found
        if not found or found[0]["images"] < count:
            break
    coarse = getattr(pipe.model, "coarse", None)
    report = new_report(
        load.device, model=model, card=read_card(pipe.source), count=count, batch_size=batch_size,
        temperature=params[0].temperature, seed=seed, first_screen=rows,
        coarse=None if coarse is None else describe_coarse(coarse),
    )  # fmt: skip
    try:
        if rows:
            write_json(json_file, report)
    finally:
        _print(rows)
    done = sum(row["images"] for row in rows) // 4
    if done < count * len(params):
        raise Stopped(f"stopped; measured {done} of {count_of(count * len(params), 'image')} a row")


def _measure(
    pipe: TextToImage, prompts: Sequence[str], params: SamplingParams, seed: int, batch_size: int
) -> list[dict[str, Any]]:
    """The rows of one guidance scale, ready for JSON; none after an early Ctrl-C."""
    first, baseline = _open_baseline(pipe, prompts, params)
    setups = [first]
    for name, fields in _POLICIES.values():
        policy = make_policy(name, **fields)
        setups.append(Setup(name, policy, policy.window, EXACT_DTYPE))
    stderr_console().print(
        f"guidance {params.guidance_scale:g}: {first.name}, then images of all four in turn"
    )
    try:
        rows = measure(
            {EXACT_DTYPE: pipe}, prompts, setups, [params], seed, batch_size, other=baseline
        )
    finally:
        if baseline is not None:
            baseline.close()
    labels = [first.name, *_POLICIES]
    return [{"label": label, **row.to_dict()} for label, row in zip(labels, rows)]


def _open_baseline(
    pipe: TextToImage, prompts: Sequence[str], params: SamplingParams
) -> tuple[Setup, Any]:
    """The first row: transformers' `generate`, or the plain loop where that makes no images.

    Returns:
        The setup, whose name says what it is, and what decodes it; None for the plain loop.
    """
    from mmaccel.evaluation.speed.transformers_baseline import BaselineDecoding, find_obstacle

    generate = f"transformers {package_version('transformers')}"
    for name, how in (("compiled", "compiled"), ("static", "not compiled")):
        reason = find_obstacle(pipe, name, prompts[0], params)
        if not reason:
            decoding = BaselineDecoding(pipe, name, prompts)
            return Setup(f"{generate}, {how}", None, None, EXACT_DTYPE), decoding
        stderr_console().print(f"{generate}, {how}, is left out: {reason}")
    plain = make_policy("autoregressive")
    return Setup("the plain loop of mmaccel", plain, None, EXACT_DTYPE), None


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
