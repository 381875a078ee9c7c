"""`mmaccel evaluate speed`: throughput of a policy and of token by token, in alternating order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mmaccel.checks import check_most
from mmaccel.commands import options as shared
from mmaccel.commands.evaluate.setup import NewTokens
from mmaccel.commands.flags import Without, with_flags
from mmaccel.commands.options import PolicyFlags, SizeFlags
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_MEASURED, MAX_RUNS
from mmaccel.options import LoadOptions, SamplingOptions, given

_HELP_PROMPTS = "a prompt a line; by default the model's examples"
_HELP_BASELINE = (
    "another side: transformers, prompt-lookup, static (cache), compiled or assisted; may be "
    "repeated; by default transformers for a causal LM"
)


@dataclass(frozen=True, kw_only=True)
class SpeedFlags:
    """How often what is run, and where the report goes."""

    prompts: Annotated[Path | None, typer.Option(help=_HELP_PROMPTS)] = None
    batch_sizes: Annotated[str, typer.Option(help="with commas")] = "1,2,4,8"
    runs: Annotated[int, typer.Option(help="of each side at each size; at least 20")] = 20
    warm_up: Annotated[int, typer.Option(help="further runs, not measured")] = 2
    baseline: Annotated[list[str] | None, typer.Option(help=_HELP_BASELINE)] = None
    seed: Annotated[int, typer.Option(help="of the first row", callback=shared.read_seed)] = 0
    max_new_tokens: NewTokens = None
    out: Annotated[
        Path, typer.Option(help="folder of the report", parser=shared.parse_path, metavar="PATH")
    ] = Path("speed")
    plots: Annotated[bool, typer.Option(help="draw plots (matplotlib)")] = True
    decoder: shared.Decoder = None

    def read(self) -> list[int]:
        """The batch sizes, after a look at all that can be checked without a model.

        Raises:
            OptionError: a value outside its domain.
            MissingBackendError: plots without matplotlib.
        """
        from mmaccel.checks import show
        from mmaccel.commands.evaluate.setup import parse_sizes, read_prompts
        from mmaccel.evaluation.speed.measure import LEAST_RUNS
        from mmaccel.evaluation.speed.report import check_plots
        from mmaccel.evaluation.speed.transformers_baseline import check_names

        if self.runs < LEAST_RUNS or self.warm_up < 1:
            raise OptionError(
                f"--runs, --warm-up: expected at least {LEAST_RUNS} and 1, received "
                f"{show(self.runs)} and {show(self.warm_up)}; p90 needs them (mmaccel bench "
                "measures quickly)"
            )
        for option, value in (("--runs", self.runs), ("--warm-up", self.warm_up)):
            check_most(option, value, MAX_RUNS, "ask for fewer")
        if self.max_new_tokens is not None:
            shared.check_count("max-new-tokens", self.max_new_tokens, MAX_MEASURED)
        sizes = parse_sizes(self.batch_sizes)
        check_names(self.baseline or [])
        if self.prompts is not None:
            read_prompts(self.prompts)
        if self.plots:
            check_plots()
        return sizes


@with_flags
def speed(
    model: Annotated[
        str, typer.Argument(help="of images or a causal LM: a name, path or hub id")
    ] = "scenes",
    *,
    method: PolicyFlags,
    flags: SpeedFlags,
    sampling: SamplingOptions,
    sides: SizeFlags,
    load: Annotated[LoadOptions, Without("compile", "share_prefix")],
    compile: shared.CompileFirst = False,
) -> None:
    """Median, p90, p99, IQR, passes, tokens a pass, stages, memory, and the sizes where it loses;
    writes speed.md, speed.json, speed.jsonl and plots."""
    from mmaccel.commands.evaluate.setup import open_measured, pick_prompts
    from mmaccel.commands.files import new_report, open_folder
    from mmaccel.evaluation.speed.measure import Side
    from mmaccel.evaluation.speed.rows import SIDES, summarise
    from mmaccel.evaluation.texts import ContinuedTexts
    from mmaccel.loading import place
    from mmaccel.pipelines.text_to_image.contact_sheet import make_plain
    from mmaccel.pipelines.text_to_image.model import choose_params
    from mmaccel.results import exactness_in

    sizes = flags.read()
    load = replace(place(load), compile=compile)
    method.read()
    open_folder(flags.out)
    pipe = open_measured(
        model,
        load,
        max_new_tokens=flags.max_new_tokens,
        size=sides.join(),
        decoder=flags.decoder,
        guidance_scale=sampling.guidance_scale,
    )
    is_text = isinstance(pipe.image_model, ContinuedTexts)
    chosen = method.choose(pipe.model.kind)[1]
    params = choose_params(pipe.image_model.params, **given(sampling))
    texts = pick_prompts(pipe, model, flags.prompts, None)
    wanted = flags.baseline or (["transformers"] if is_text else [])
    baselines, left_out = _open_baselines(pipe, wanted, texts, params)
    plain, policy = SIDES
    measured = [
        Side(plain, pipe, make_plain(chosen), params),
        Side(policy, pipe, chosen, params),
        *(Side(name, other, None, params) for name, other in baselines.items()),
    ]
    finished: list[Any] = []
    failure: BaseException | None = None
    try:
        _measure_sizes(measured, texts, sizes, flags, finished)
    except (KeyboardInterrupt, Exception) as error:  # reported after the finished runs are written
        failure = error
    finally:
        for other in baselines.values():
            other.close()
    each = _runs_of_size(measured, flags)
    done = len(finished) // each
    report = new_report(
        load.device,
        model=model,
        policy=repr(chosen),
        exactness=chosen.exactness,
        promise=exactness_in(chosen.exactness, load.dtype),
        dtype=load.dtype,
        cuda_graphs=load.cuda_graphs,
        fused=load.fused,
        compile=compile,
        guidance=params.guidance_scale,
        temperature=params.temperature,
        seed=flags.seed,
        captions=texts,
        max_new_tokens=pipe.length if is_text else None,
        runs=flags.runs,
        warm_up=flags.warm_up,
        baselines=list(baselines),
        left_out=left_out,
        sizes_asked=sizes,
        sizes_done=sizes[:done],
        rows=summarise(finished[: done * each]),
    )
    _write_runs(flags.out, report, finished, flags.plots)
    if failure is not None:
        raise _with_progress(failure, sizes, done) from failure


def _runs_of_size(sides: list[Any], flags: SpeedFlags) -> int:
    return len(sides) * (flags.runs + flags.warm_up)


def _measure_sizes(
    sides: list[Any], prompts: list[str], sizes: list[int], flags: SpeedFlags, finished: list[Any]
) -> None:
    """Runs of every size, which are appended to `finished` and written after each size."""
    from mmaccel.commands.files import write_lines
    from mmaccel.commands.terminal import watch
    from mmaccel.evaluation.speed.measure import measure, repeat_batches, synchronise_for

    synchronise = synchronise_for(str(sides[0].source.model.device))
    for size in sizes:
        batches = repeat_batches(
            prompts, flags.seed, size, rounds=flags.runs, warm_up=flags.warm_up
        )
        said = f"measuring after {len(finished)} runs"
        runs = measure(sides, batches, synchronise)
        for each in watch(runs, _runs_of_size(sides, flags), said):
            finished.append(each.run)
        write_lines(flags.out / "speed.jsonl", [run.to_dict() for run in finished])


def _open_baselines(
    pipe: Any, names: list[str], prompts: list[str], params: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    """Baselines by name, and the reasons why the others are left out, which are printed."""
    from mmaccel.commands.terminal import stderr_console
    from mmaccel.evaluation.speed.transformers_baseline import BaselineDecoding, find_obstacle

    found = {}
    left_out = {}
    for name in names:
        reason = find_obstacle(pipe, name, prompts[0], params)
        if reason:
            left_out[name] = reason
            stderr_console().print(f"--baseline {name} is left out: {reason}", markup=False)
        else:
            found[name] = BaselineDecoding(pipe, name, prompts)
    return found, left_out


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
