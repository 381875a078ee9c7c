"""`mmaccel evaluate speed`: throughput of a policy and of token by token, in alternating order."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mmaccel.commands import options as shared
from mmaccel.commands.flags import Without, with_flags
from mmaccel.commands.options import PolicyFlags, SizeFlags
from mmaccel.limits import MAX_RUNS, check_most
from mmaccel.options import LoadOptions, SamplingOptions, given

_HELP_BASELINE = "another side: transformers, static (cache) or compiled; may be repeated"


@with_flags
def speed(
    model: Annotated[str, typer.Argument(help="demo model, path or hub id")] = "scenes",
    *,
    method: PolicyFlags,
    prompts: Annotated[
        Path | None, typer.Option(help="a prompt a line; by default the model's examples")
    ] = None,
    batch_sizes: Annotated[str, typer.Option(help="with commas")] = "1,2,4,8",
    runs: Annotated[int, typer.Option(help="of each side at each size; at least 20")] = 20,
    warm_up: Annotated[int, typer.Option(help="further runs, not measured")] = 2,
    baseline: Annotated[list[str] | None, typer.Option(help=_HELP_BASELINE)] = None,
    seed: Annotated[int, typer.Option(help="of the first image")] = 0,
    sampling: SamplingOptions,
    out: Annotated[
        Path, typer.Option(help="folder of the report", parser=shared.parse_path, metavar="PATH")
    ] = Path("speed"),
    plots: Annotated[bool, typer.Option(help="draw plots (matplotlib)")] = True,
    sides: SizeFlags,
    decoder: shared.Decoder = None,
    load: Annotated[LoadOptions, Without("compile")],
    compile: shared.CompileFirst = False,
) -> None:
    """Median, p90, p99, IQR, passes, tokens a pass, stages, memory, and the sizes where it loses;
    writes speed.md, speed.json, speed.jsonl and plots."""
    from mmaccel.checks import show
    from mmaccel.commands.evaluate.setup import (
        parse_sizes,
        pick_prompts,
        read_prompts,
        synchronise_for,
    )
    from mmaccel.commands.files import new_report, open_folder, write_lines
    from mmaccel.errors import OptionError
    from mmaccel.evaluation.speed.measure import LEAST_RUNS, measure_speed, summarise
    from mmaccel.evaluation.speed.report import check_plots
    from mmaccel.evaluation.speed.transformers_baseline import check_names
    from mmaccel.loading import open_pipeline, place
    from mmaccel.pipelines.text_to_image.contact_sheet import make_plain
    from mmaccel.pipelines.text_to_image.model import choose_params
    from mmaccel.results import exactness_in

    if runs < LEAST_RUNS or warm_up < 1:
        raise OptionError(
            f"--runs, --warm-up: expected at least {LEAST_RUNS} and 1, received {show(runs)} and "
            f"{show(warm_up)}; "
            "p90 needs them (mmaccel bench measures quickly)"
        )
    for option, value in (("--runs", runs), ("--warm-up", warm_up)):
        check_most(option, value, MAX_RUNS, "ask for fewer")
    sizes = parse_sizes(batch_sizes)
    check_names(baseline or [])
    if prompts is not None:
        read_prompts(prompts)
    if plots:
        check_plots()
    load = replace(place(load), compile=compile)
    method.read()
    open_folder(out)
    pipe = open_pipeline(model, load, size=sides.join(), decoder=decoder)
    chosen = method.choose(pipe.model.kind)[1]
    params = choose_params(pipe.image_model.params, **given(sampling))
    texts = pick_prompts(pipe, model, prompts, None)
    baselines, left_out = _open_baselines(pipe, baseline or [], texts, params)
    finished: list[Any] = []
    measured = measure_speed(
        pipe, {"plain": make_plain(chosen), "policy": chosen}, texts, params,
        batch_sizes=sizes, runs=runs, warm_up=warm_up, seed=seed, baselines=baselines,
        synchronise=synchronise_for(load.device),
    )  # fmt: skip
    each = (2 + len(baselines)) * (runs + warm_up)  # runs of a size
    failure: BaseException | None = None
    try:
        for _ in sizes:
            _collect(itertools.islice(measured, each), finished, each)
            write_lines(out / "speed.jsonl", [run.to_dict() for run in finished])
    except (KeyboardInterrupt, Exception) as error:  # reported after the finished runs are written
        failure = error
    finally:
        for other in baselines.values():
            other.close()
    done = len(finished) // each
    report = new_report(
        load.device, model=model, policy=repr(chosen), exactness=chosen.exactness,
        promise=exactness_in(chosen.exactness, load.dtype), dtype=load.dtype,
        cuda_graphs=load.cuda_graphs, fused=load.fused, compile=compile,
        guidance=params.guidance_scale,
        temperature=params.temperature, seed=seed,
        captions=texts, runs=runs, warm_up=warm_up, baselines=list(baselines),
        left_out=left_out, sizes_asked=sizes, sizes_done=sizes[:done],
        rows=summarise(finished[: done * each]),
    )  # fmt: skip
    _write_runs(out, report, finished, plots)
    if failure is not None:
        raise _with_progress(failure, sizes, done) from failure


def _open_baselines(
    pipe: Any, names: list[str], prompts: list[str], params: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    """Baselines by name, and the reasons why the others are left out, which are printed."""
    from mmaccel.commands.terminal import stderr_console
    from mmaccel.evaluation.speed.transformers_baseline import BaselineDecoding, find_obstacle

    found, left_out = {}, {}
    for name in names:
        reason = find_obstacle(pipe, name, prompts[0], params)
        if reason:
            left_out[name] = reason
            stderr_console().print(f"--baseline {name} is left out: {reason}", markup=False)
        else:
            found[name] = BaselineDecoding(pipe, name, prompts)
    return found, left_out


def _collect(measured: Any, finished: list[Any], total: int) -> None:
    from mmaccel.commands.terminal import progress_bar

    with progress_bar() as bar:
        task = bar.add_task(f"measuring after {len(finished)} runs", total=total)
        for run in measured:
            finished.append(run)
            bar.advance(task)


def _write_runs(out: Path, report: dict[str, Any], finished: list[Any], plots: bool) -> None:
    """Write all runs, and a report of the sizes whose runs are complete."""
    from mmaccel.commands.files import write_json, write_lines, write_text
    from mmaccel.evaluation.speed.report import plan_plots, write_speed
    from mmaccel.outputs.whole_files import write_whole

    lines = [run.to_dict() for run in finished]
    if lines:
        write_lines(out / "speed.jsonl", lines)
    if not report["rows"]:
        return
    write_json(out / "speed.json", report)
    write_text(out / "speed.md", write_speed(report))
    if plots:
        plan = plan_plots(report, lines)
        for file, write in plan.items():
            write_whole(out / file, write)
    _print(report, out)


def _with_progress(failure: BaseException, sizes: list[int], done: int) -> BaseException:
    """The exception that ended the runs, with the number of measured sizes in its message."""
    import torch

    from mmaccel.commands.process import Stopped

    progress = f"measured {done} of {len(sizes)} batch sizes"
    if isinstance(failure, KeyboardInterrupt):
        return Stopped(f"stopped; {progress}")
    reason = " ".join(str(failure).split())
    is_out_of_memory = isinstance(failure, MemoryError | torch.OutOfMemoryError) or (
        isinstance(failure, RuntimeError) and "allocate memory" in reason
    )
    if not is_out_of_memory:
        return failure
    return OSError(
        f"memory: expected memory for a batch of {sizes[done]}, received {reason[:120]!r}; "
        f"{progress}, which are written; leave the larger ones out of --batch-sizes"
    )


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
            f"{row['speed_up']:.2f}" + (f" loses to {row['loses_to'][0]}" if row["loses"] else ""),
            "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}",
        )
    console = wide_console()
    console.print(table)
    console.print(f"{report['runs']} runs each; see {out / 'speed.md'} for the rest.")
