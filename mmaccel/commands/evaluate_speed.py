"""`mmaccel evaluate speed`: throughput of a policy against the plain loop, in A/B order."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def speed(
    model: Annotated[str, typer.Argument(help="demo model, path or hub id")] = "scenes",
    policy: Annotated[str | None, typer.Option(help="see mmaccel models")] = None,
    set_fields: Annotated[
        list[str] | None, typer.Option("--set", help="a field of the policy as name=value")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="a caption a line; by default the model's examples")
    ] = None,
    batch_sizes: Annotated[str, typer.Option(help="with commas")] = "1,2,4,8",
    runs: Annotated[int, typer.Option(help="of each side at each size; at least 20")] = 20,
    warm_up: Annotated[int, typer.Option(help="further runs, not measured")] = 2,
    seed: Annotated[int, typer.Option(help="of the first picture")] = 0,
    guidance: Annotated[float | None, typer.Option(help="1 is off")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy")] = None,
    out: Annotated[Path, typer.Option(help="folder of the report")] = Path("speed"),
    plots: Annotated[bool, typer.Option(help="draw plots (matplotlib)")] = True,
    size: Annotated[str | None, typer.Option(help="pixels, 768 or 1024x768")] = None,
    decoder: Annotated[Path | None, typer.Option(help="picture decoder, where it is apart")] = None,
    family: Annotated[str | None, typer.Option(help="of the checkpoint")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    engine: Annotated[str, typer.Option(help="auto, eager or graph (a captured step)")] = "auto",
) -> None:
    """Median, p90, p99, IQR, passes, tokens a pass, stages, memory, and the sizes where it loses;
    writes speed.md, speed.json, speed.jsonl and plots."""
    from mmaccel.canvas_contracts import kind_of
    from mmaccel.catalog import load, make_policy
    from mmaccel.commands.evaluate_files import new_report, write_json, write_lines, write_text
    from mmaccel.commands.evaluate_setup import parse_sizes, pick_captions
    from mmaccel.commands.picture_files import write_whole
    from mmaccel.commands.run_setup import open_folder, open_pipeline, parse_fields, pick_name
    from mmaccel.commands.terminal import Stopped
    from mmaccel.errors import OptionError
    from mmaccel.pipelines.comparison import make_plain
    from mmaccel.pipelines.picture_model import choose_filters
    from mmaccel.results import promise_in

    least = load("mmaccel.evaluation.speed:LEAST_RUNS")
    if runs < least or warm_up < 1:
        raise OptionError(
            f"--runs, --warm-up: expected at least {least} and 1, received {runs} and {warm_up}; "
            "fewer say nothing about p90 (mmaccel bench measures quickly)"
        )
    sizes = parse_sizes(batch_sizes)
    if plots:
        load("mmaccel.evaluation.speed_plots:check_plots")()
    options = parse_fields(set_fields or [])
    if policy is not None:
        make_policy(policy, **options)
    open_folder(out)
    pipe = open_pipeline(
        model, device, dtype, size=size, decoder=decoder, family=family, engine=engine
    )
    name, options = pick_name(policy, options, kind_of(pipe.model))
    chosen = make_policy(name, **options)
    filters = choose_filters(
        pipe.pictures.filters, guidance_scale=guidance, temperature=temperature
    )
    captions = pick_captions(pipe, model, prompts, None)
    made: list[Any] = []
    is_whole = False
    measured = load("mmaccel.evaluation.speed:measure_speed")(
        pipe, {"plain": make_plain(chosen), "policy": chosen}, captions, filters,
        batch_sizes=sizes, runs=runs, warm_up=warm_up, seed=seed, synchronise=_waits_for(device),
    )  # fmt: skip
    try:
        _collect(measured, made, 2 * runs * len(sizes))
        is_whole = True
    except KeyboardInterrupt:  # sizes that were finished are kept
        made = made[: len(made) // (2 * runs) * 2 * runs]
    if made:
        report = new_report(
            device, model=model, policy=repr(chosen), exactness=chosen.exactness,
            promise=promise_in(chosen.exactness, dtype), dtype=dtype, engine=engine,
            guidance=filters.guidance_scale, temperature=filters.temperature, seed=seed,
            captions=captions, runs=runs, warm_up=warm_up,
            rows=load("mmaccel.evaluation.speed:summarise")(made),
        )  # fmt: skip
        lines = [run.to_dict() for run in made]
        text = load("mmaccel.evaluation.speed_report:write_speed")(report)
        write_lines(out / "speed.jsonl", lines)
        write_json(out / "speed.json", report)
        write_text(out / "speed.md", text)
        if plots:
            plan = load("mmaccel.evaluation.speed_plots:plan_plots")(report, lines)
            for file, write in plan.items():
                write_whole(out / file, write)
        _print(report, out)
    if not is_whole:
        done = len(made) // (2 * runs)
        raise Stopped(f"stopped; measured {done} of {len(sizes)} batch sizes")


def _waits_for(device: str) -> Any:
    import torch

    return torch.cuda.synchronize if device.startswith("cuda") else lambda: None


def _collect(measured: Any, made: list[Any], total: int) -> None:
    from rich.progress import Progress

    from mmaccel.commands.terminal import stderr_console

    with Progress(console=stderr_console()) as bar:
        task = bar.add_task("measuring", total=total)
        for run in measured:
            made.append(run)
            bar.advance(task)


def _print(report: dict[str, Any], out: Path) -> None:
    from mmaccel.commands.terminal import make_table, wide_console

    heads = ("side", "median s", "p90", "p99", "IQR", "passes", "tok/pass", "speed-up", "MiB")
    table = make_table("batch", *heads, title=report["policy"])
    for row in report["rows"]:
        seconds = row["seconds"]
        table.add_row(
            str(row["batch_size"]),
            row["side"],
            *(f"{seconds[name]:.3f}" for name in ("median", "p90", "p99", "iqr")),
            f"{row['passes']:.1f}",
            f"{row['tokens_per_pass']:.2f}",
            f"{row['speed_up']:.2f}" + (" loses" if row["loses"] else ""),
            "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}",
        )
    console = wide_console()
    console.print(table)
    console.print(f"{report['runs']} runs each; {out / 'speed.md'} says the rest.")
