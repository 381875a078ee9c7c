"""`mmaccel bench`: all policies and windows in one run, on one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmaccel.catalog import policy_names
from mmaccel.pipelines.text_to_image.registry import IMAGE_MODELS

if TYPE_CHECKING:
    from mmaccel.commands.measure import Row

_ALL, _WINDOWS, _DTYPES = "all", "1,16,32,64,adaptive", "float32"
_HELP_FAMILY = f"one of {', '.join(IMAGE_MODELS)}; or canvas, for the masked models that ship"


def bench(
    prompt: Annotated[
        str | None, typer.Argument(help="caption of all images; without it, fresh captions")
    ] = None,
    model: Annotated[str, typer.Option(help="demo model, path or hub id")] = "scenes",
    policies: Annotated[str, typer.Option(help="short names with commas")] = _ALL,
    windows: Annotated[str, typer.Option(help="with commas")] = _WINDOWS,
    guidance: Annotated[
        str | None, typer.Option(help="scales with commas; by default 1 and the model's own")
    ] = None,
    count: Annotated[int, typer.Option(help="number of fresh captions")] = 16,
    seed: Annotated[int, typer.Option(help="of the first image")] = 0,
    batch_size: Annotated[int, typer.Option(help="images made together")] = 1,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; by default the model's own")
    ] = None,
    size: Annotated[str | None, typer.Option(help="pixels, 768 or 1024x768")] = None,
    decoder: Annotated[Path | None, typer.Option(help="image decoder, where it is apart")] = None,
    family: Annotated[str | None, typer.Option(help=_HELP_FAMILY)] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    dtypes: Annotated[str, typer.Option(help="with commas; the first is the measure")] = _DTYPES,
    json_file: Annotated[Path | None, typer.Option("--json", help="write results here")] = None,
) -> None:
    """Measure forward passes and seconds against token by token, interleaved image by image."""
    from mmaccel.catalog import MODELS, find_policy, load, make_policy
    from mmaccel.commands.measure import Setup, measure
    from mmaccel.commands.report_files import new_report, write_json
    from mmaccel.commands.run_setup import check_count, check_file_name, open_folder, parse_window
    from mmaccel.commands.terminal import Stopped
    from mmaccel.contracts import check_window
    from mmaccel.errors import OptionError
    from mmaccel.loading import open_pipeline
    from mmaccel.outputs.image_files import write_whole
    from mmaccel.pipelines.models.scenes import WordImages
    from mmaccel.pipelines.text_to_image.model import choose_params
    from mmaccel.samplers.sampling_params import SamplingParams

    check_count("count", count)
    check_count("batch-size", batch_size)
    check_file_name("--json", json_file)
    if family == "canvas":
        from mmaccel.commands.bench_canvas import bench_canvas, refuse_options

        unfit = {"--windows": windows != _WINDOWS, "--dtypes": dtypes != _DTYPES}
        unset: dict[str, Any] = {
            "a caption": prompt,
            "--guidance": guidance,
            "--temperature": temperature,
        }
        unset |= {"--size": size, "--decoder": decoder}
        refuse_options(unfit | {name: value is not None for name, value in unset.items()})
        return bench_canvas(model, policies, count, seed, batch_size, json_file, device)
    names = policy_names() if policies == _ALL else _split(policies)
    for name in names:
        find_policy(name, "window")
    names = [name for name in names if name != "autoregressive"]
    if policies == _ALL:
        names.remove("speculative")  # without a draft model it is prompt-lookup
    widths = list(dict.fromkeys(parse_window(text) for text in _split(windows)))
    for width in widths:
        check_window(width, adaptive=True)
    asked = None if guidance is None else [_number("guidance", text) for text in _split(guidance)]
    lists = {"policies": policies, "windows": windows, "guidance": guidance, "dtypes": dtypes}
    for name, text in lists.items():
        if text is not None and not _split(text):
            raise OptionError(f"--{name}: expected at least one, received none; leave it out")
    setups = []
    for dtype in _split(dtypes):
        setups.append(Setup("autoregressive", make_policy("autoregressive"), None, dtype))
        for name in names:
            own = [width for width in widths if width != "adaptive" or name == "jacobi"]
            if not own and policies != _ALL:
                raise OptionError(
                    f"--windows: expected a fixed width for {name}, received {windows!r}; "
                    "add one such as 32"
                )
            for width in own:
                setups.append(Setup(name, make_policy(name, window=width), width, dtype))
    for scale in asked or ():
        choose_params(SamplingParams(), guidance_scale=scale, temperature=temperature)
    pipes = {
        dtype: open_pipeline(model, device, dtype, size=size, decoder=decoder, family=family)
        for dtype in _split(dtypes)
    }
    images = next(iter(pipes.values())).image_model
    scales = dict.fromkeys(asked or (1.0, images.params.guidance_scale))
    params = [
        choose_params(images.params, guidance_scale=scale, temperature=temperature)
        for scale in scales
    ]
    if prompt is not None:
        captions = [prompt] * count
    elif isinstance(images, WordImages):
        source = MODELS.get(model, MODELS["scenes"])
        captions = load(source.captions)(load(source.fresh), range(count))
    else:
        captions = [images.examples[k % len(images.examples)] for k in range(count)]
    for caption in captions:
        images.encode(caption)
    if json_file is not None:
        open_folder(json_file.parent, "--json")
        write_whole(json_file.with_name(f"{json_file.name}.trial"), Path.touch)
        json_file.with_name(f"{json_file.name}.trial").unlink()
    rows = measure(pipes, captions, setups, params, seed, batch_size)
    done = rows[0].images if rows else 0
    if rows:
        card = _read_card(next(iter(pipes.values())).source)
        report = new_report(
            device,
            model=model,
            card=card,
            captions=captions[:done],
            batch_size=batch_size,
            temperature=params[0].temperature,
            seed=seed,
            rows=[row.to_dict() for row in rows],
        )
        try:
            write_json(json_file, report)
        finally:
            _print(rows, card, batch_size)
    if done < count:
        raise Stopped(f"stopped; measured {done} of {count} captions")


def _split(text: str) -> list[str]:
    """The parts between commas, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _number(name: str, text: str) -> float:
    from mmaccel.errors import OptionError

    try:
        return float(text)
    except ValueError as error:
        raise OptionError(
            f"--{name}: expected numbers with commas, received {text!r}; write 1.0,2.0"
        ) from error


def _read_card(folder: Path | None) -> dict[str, Any]:
    file = None if folder is None else folder / "card.json"
    card = json.loads(file.read_text(encoding="utf-8")) if file and file.is_file() else {}
    return {name: card[name] for name in ("name", "parameters", "generator") if name in card}


def _print(rows: list[Row], card: dict[str, Any], batch_size: int) -> None:
    from mmaccel.commands.terminal import make_table, wide_console

    heads = ("passes", "tok/pass", "s/image", "speed-up", "same", "sampler", "promise")
    console = wide_console()
    for guidance, dtype in dict.fromkeys((row.guidance, row.dtype) for row in rows):
        table = make_table("policy", *heads, title=f"guidance {guidance:g}, {dtype}")
        for row in rows:
            if (row.guidance, row.dtype) == (guidance, dtype):
                table.add_row(*_cells(row))
        console.print(table, "")
    loss = card.get("generator", {}).get("validation_bits_per_token")
    said = "no model card" if loss is None else f"validation loss {loss:.3f} bits a token"
    console.print(f"{rows[0].images} captions, batch size {batch_size}, {said}.")
    if any(row.exactness == "relaxed" for row in rows):
        console.print("relaxed: with the total variation spent a token.")


def _cells(row: Row) -> tuple[str, ...]:
    from mmaccel.results import exactness_in

    half = "" if row.half_width is None else f"±{row.half_width:.2f}"
    spent = f" {row.total_variation:.3f}" if row.exactness == "relaxed" else ""
    return (
        row.policy if row.window is None else f"{row.policy} {row.window}",
        f"{row.passes:.1f}",
        f"{row.tokens_per_pass:.2f}{half}",
        f"{row.seconds:.3f}",
        f"{row.speed_up:.2f}",
        f"{row.identical}/{row.images}",
        f"{100 * row.sampler_share:.0f} %",
        exactness_in(row.exactness, row.dtype) + spent,
    )
