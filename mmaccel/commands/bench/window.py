"""`mmaccel bench` for window policies: measured against token by token, one table.

Every side (policy, window, draft source, dtype, guidance scale) runs batch by batch in a changing
order, so that slow moments of the machine affect all alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmaccel.catalog import find_policy, load, make_policy, policy_names
from mmaccel.commands.bench.flags import ALL, DTYPES, WINDOWS, ImageFlags, SweepFlags
from mmaccel.commands.bench.measure import measure_images
from mmaccel.commands.bench.setup import (
    check_json,
    check_some,
    list_params,
    parse_scales,
    pick_prompts,
    read_card,
    write_rows,
)
from mmaccel.commands.files import new_report
from mmaccel.commands.options import split_values
from mmaccel.commands.process import Stopped
from mmaccel.commands.terminal import count_of, make_table, wide_console
from mmaccel.contracts import check_window
from mmaccel.errors import OptionError
from mmaccel.evaluation.speed.measure import Side
from mmaccel.loading import open_pipeline, place
from mmaccel.options import LoadOptions, read_text
from mmaccel.own_code import TypedName
from mmaccel.results import exactness_in
from mmaccel.samplers.drafting.coarse import Coarse
from mmaccel.samplers.drafting.coarse_model import describe_coarse
from mmaccel.samplers.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mmaccel.pipelines.text_to_image.pipeline import TextToImage


def bench_window(
    prompt: str | None,
    images: ImageFlags,
    size: str | None,
    load: LoadOptions,
    *,
    sweep: SweepFlags,
) -> None:
    """Measure and print; the arguments are those of `mmaccel bench`.

    Raises:
        OptionError: a wrong option, before any measurement.
        Stopped: Ctrl-C; the file has what was measured.
    """
    policies = _list_policies(sweep)
    scales = parse_scales(images.guidance)
    dtypes = DTYPES if sweep.dtypes is None else sweep.dtypes
    check_some("dtypes", dtypes)
    loads = [place(replace(load, dtype=name)) for name in split_values("--dtypes", dtypes)]
    list_params(SamplingParams(), scales, images.temperature)
    pipes = {
        each.dtype: open_pipeline(images.model, each, size=size, decoder=images.decoder)
        for each in loads
    }
    first_pipe = next(iter(pipes.values()))
    params = list_params(first_pipe.image_model.params, scales, images.temperature)
    prompts = pick_prompts(prompt, images.model, first_pipe.image_model, images.count)
    check_json(images.json_file)
    card = read_card(first_pipe.source)
    sides = _list_sides(pipes, policies, params)
    rows = measure_images(sides, prompts, images.seed, images.batch_size)
    done = rows[0]["images"] if rows else 0
    if rows:
        report = new_report(
            loads[0].device,
            model=images.model,
            card=card,
            captions=prompts[:done],
            batch_size=images.batch_size,
            temperature=params[0].temperature,
            seed=images.seed,
            coarse=_describe_coarse(sides, rows, first_pipe.model),
            rows=rows,
        )
        write_rows(images.json_file, report, lambda: _print(rows, card, images.batch_size))
    if done < images.count:
        raise Stopped(f"stopped; measured {done} of {count_of(images.count, 'prompt')}")


def _list_policies(sweep: SweepFlags) -> list[tuple[str, Any]]:
    """Short names with policies, token by token first.

    Raises:
        OptionError: an unknown name, width or source, or none that can be measured.
    """
    policies = ALL if sweep.policies is None else sweep.policies
    listed = policy_names() if policies == ALL else split_values("--policies", policies)
    left_out = ["autoregressive"]
    if policies == ALL:
        left_out.append("speculative")  # without a draft model it equals prompt-lookup
    for text in listed:
        find_policy(TypedName(text), "window")
    names = [TypedName(text) for text in listed if text not in left_out]
    windows = WINDOWS if sweep.windows is None else sweep.windows
    widths = list(
        dict.fromkeys(
            read_text("--windows", text, int | str) for text in split_values("--windows", windows)
        )
    )
    for width in widths:
        check_window(width, adaptive=True)
    check_some("policies", policies)
    check_some("windows", windows)
    sources = None
    if sweep.drafts is not None:
        check_some("drafts", sweep.drafts)
        sources = [TypedName(source) for source in split_values("--drafts", sweep.drafts)]
    found = [("autoregressive", make_policy("autoregressive"))]
    for name in names:
        own = [width for width in widths if width != "adaptive" or name == "jacobi"]
        if not own and policies != ALL:
            raise OptionError(
                f"--windows: expected a fixed width for {name}, received {windows!r}; "
                "add one such as 32"
            )
        found += [(name, policy) for policy in _make_policies(name, own, sources)]
    if sources and not any(_has(name, "drafts") for name in names):
        raise OptionError(
            f"--drafts: expected a policy that has draft sources, received {', '.join(names)}; add "
            "jacobi, or leave --drafts out"
        )
    return found


def _list_sides(
    pipes: Mapping[str, TextToImage],
    policies: Sequence[tuple[str, Any]],
    params: Sequence[SamplingParams],
) -> list[Side]:
    """All policies in all dtypes at all guidance scales."""
    return [
        Side(name, pipe, policy, own, dtype)
        for own in params
        for dtype, pipe in pipes.items()
        for name, policy in policies
    ]


def _make_policies(
    name: str, windows: Sequence[int | str | None], sources: Sequence[str] | None
) -> list[Any]:
    """The policies to measure under a short name.

    Args:
        name: short name.
        windows: widths.
        sources: draft sources; None leaves the policy its own, and so does a policy without.
    """
    named = [{"drafts": source} for source in sources or ()] if _has(name, "drafts") else []
    sized = [{"window": width} for width in windows] if _has(name, "window") else [{}]
    return [make_policy(name, **size, **own) for size in sized for own in named or [{}]]


def _has(name: str, field: str) -> bool:
    """Whether the policy of a name has a field that the name leaves open."""
    entry = find_policy(name)
    known = {own.name for own in fields(load(entry.target))}
    return field in known - entry.preset.keys()


def _describe_coarse(
    sides: Sequence[Side], rows: Sequence[dict[str, Any]], model: Any
) -> dict[str, Any]:
    """The coarse models that drafted, by `drafts` of the rows."""
    sources = [getattr(side.policy, "drafts", None) for side in sides]
    folders = {source.folder: source.folder for source in sources if isinstance(source, Coarse)}
    if any(row["drafts"] == "coarse" for row in rows):
        folders["coarse"] = model.coarse
    return {source: describe_coarse(folder) for source, folder in folders.items()}


def _print(rows: list[dict[str, Any]], card: dict[str, Any], batch_size: int) -> None:
    heads = ("passes", "tok/pass", "s/image", "speed-up", "same", "sampler", "exactness")
    console = wide_console()
    for guidance, dtype in dict.fromkeys((row["guidance"], row["dtype"]) for row in rows):
        table = make_table("policy", *heads, title=f"guidance {guidance:g}, {dtype}")
        for row in rows:
            if (row["guidance"], row["dtype"]) == (guidance, dtype):
                table.add_row(*_cells(row))
        console.print(table, "")
    loss = card.get("generator", {}).get("validation_bits_per_token")
    is_known = isinstance(loss, int | float)
    quality = f"validation loss {loss:.3f} bits a token" if is_known else "no model card"
    console.print(f"{count_of(rows[0]['images'], 'prompt')}, batch size {batch_size}, {quality}.")
    if any(row["exactness"] == "relaxed" for row in rows):
        console.print("relaxed: with the total variation spent a token.")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    half = "" if row["half_width"] is None else f"±{row['half_width']:.2f}"
    drafts = None if row["drafts"] in (None, "neighbour") else Path(row["drafts"]).name
    spent = f" {row['total_variation']:.3f}" if row["exactness"] == "relaxed" else ""
    return (
        " ".join(str(part) for part in (row["policy"], row["window"], drafts) if part is not None),
        f"{row['passes']:.1f}",
        f"{row['tokens_per_pass']:.2f}{half}",
        f"{row['seconds']:.3f}",
        f"{row['speed_up']:.2f}",
        f"{row['identical']}/{row['images']}",
        f"{100 * row['sampler_share']:.0f} %",
        exactness_in(row["exactness"], row["dtype"]) + spent,
    )
