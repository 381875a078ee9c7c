"""`mmaccel evaluate speed`: throughput of a policy against the plain loop, in A/B order."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any

import typer

_HELP_BASELINE = "another side: transformers, static (cache) or compiled; may be repeated"


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
    baseline: Annotated[list[str] | None, typer.Option(help=_HELP_BASELINE)] = None,
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
    cuda_graphs: Annotated[str, typer.Option(help="auto, on or off; on needs a GPU")] = "auto",
) -> None:
    """Median, p90, p99, IQR, passes, tokens a pass, stages, memory, and the sizes where it loses;
    writes speed.md, speed.json, speed.jsonl and plots."""
    from mmaccel.canvas_contracts import kind_of
    from mmaccel.catalog import load, make_policy
    from mmaccel.commands.evaluate_setup import parse_sizes, pick_captions, read_captions
    from mmaccel.commands.evaluate_speed_files import tell_failure, write_runs
    from mmaccel.commands.report_files import new_report, write_lines
    from mmaccel.commands.run_setup import open_folder, parse_fields
    from mmaccel.errors import OptionError
    from mmaccel.opening import open_pipeline, pick_name
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
    load("mmaccel.evaluation.baseline_checks:check_names")(baseline or [])
    if prompts is not None:
        read_captions(prompts)
    if plots:
        load("mmaccel.evaluation.speed_plots:check_plots")()
    options = parse_fields(set_fields or [])
    if policy is not None:
        make_policy(policy, **options)
    open_folder(out)
    pipe = open_pipeline(
        model, device, dtype, size=size, decoder=decoder, family=family, cuda_graphs=cuda_graphs
    )
    name, options = pick_name(policy, options, kind_of(pipe.model))
    chosen = make_policy(name, **options)
    filters = choose_filters(
        pipe.pictures.filters, guidance_scale=guidance, temperature=temperature
    )
    captions = pick_captions(pipe, model, prompts, None)
    baselines, left_out = _open_baselines(pipe, baseline or [], captions, filters)
    made: list[Any] = []
    measured = load("mmaccel.evaluation.speed:measure_speed")(
        pipe, {"plain": make_plain(chosen), "policy": chosen}, captions, filters,
        batch_sizes=sizes, runs=runs, warm_up=warm_up, seed=seed, synchronise=_waits_for(device),
        baselines=baselines,
    )  # fmt: skip
    each = (2 + len(baselines)) * (runs + warm_up)  # runs of a size
    failure: BaseException | None = None
    try:
        for _ in sizes:
            _collect(itertools.islice(measured, each), made, each)
            write_lines(out / "speed.jsonl", [run.to_dict() for run in made])
    except (KeyboardInterrupt, Exception) as error:  # what was made is kept, and then it is told
        failure = error
    finally:
        for other in baselines.values():
            other.close()
    done = len(made) // each
    report = new_report(
        device, model=model, policy=repr(chosen), exactness=chosen.exactness,
        promise=promise_in(chosen.exactness, dtype), dtype=dtype, cuda_graphs=cuda_graphs,
        guidance=filters.guidance_scale, temperature=filters.temperature, seed=seed,
        captions=captions, runs=runs, warm_up=warm_up, baselines=list(baselines),
        left_out=left_out, sizes_asked=sizes, sizes_done=sizes[:done],
        rows=load("mmaccel.evaluation.speed_rows:summarise")(made[: done * each]),
    )  # fmt: skip
    write_runs(out, report, made, plots)
    if failure is not None:
        raise tell_failure(failure, sizes, done) from failure


def _open_baselines(
    pipe: Any, names: list[str], captions: list[str], filters: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    """Baselines by name, and why the others are left out, which is said at once."""
    from mmaccel.catalog import load
    from mmaccel.commands.terminal import stderr_console

    found, left_out = {}, {}
    for name in names:
        reason = load("mmaccel.evaluation.baseline_checks:find_obstacle")(
            pipe, name, captions[0], filters
        )
        if reason:
            left_out[name] = reason
            stderr_console().print(f"--baseline {name} is left out: {reason}", markup=False)
        else:
            make = load("mmaccel.evaluation.baseline_decoding:BaselineDecoding")
            found[name] = make(pipe, name, captions)
    return found, left_out


def _waits_for(device: str) -> Any:
    import torch

    if device.startswith("cuda"):
        return lambda: torch.cuda.synchronize(device)  # of that device, not of the current one
    return lambda: None


def _collect(measured: Any, made: list[Any], total: int) -> None:
    from mmaccel.commands.terminal import progress_bar

    with progress_bar() as bar:
        task = bar.add_task(f"measuring behind {len(made)} runs", total=total)
        for run in measured:
            made.append(run)
            bar.advance(task)
