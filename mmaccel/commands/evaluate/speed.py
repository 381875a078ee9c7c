"""`mmaccel evaluate speed`: throughput of a policy and of token by token, in alternating order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mmaccel.checks import check_choice, check_int
from mmaccel.commands import options as shared
from mmaccel.commands.evaluate.setup import TextFlags
from mmaccel.commands.flags import Without, as_command
from mmaccel.commands.options import PolicyFlags
from mmaccel.limits import MAX_BATCH, MAX_RUNS
from mmaccel.options import LoadOptions, read_text

_HELP_BASELINE = (
    "another side: transformers, prompt-lookup, static (cache), compiled or assisted; may be "
    "repeated; by default transformers for a causal LM"
)


@dataclass(frozen=True, kw_only=True)
class Speed(TextFlags):
    """Median, p90, p99, IQR, passes, tokens a pass, stages, memory, and the sizes where it loses;
    writes speed.md, speed.json, speed.jsonl and plots."""

    method: PolicyFlags
    batch_sizes: Annotated[str, typer.Option(help="with commas")] = "1,2,4,8"
    runs: Annotated[int, typer.Option(help="of each side at each size; at least 20")] = 20
    warm_up: Annotated[int, typer.Option(help="further runs, not measured")] = 2
    baseline: Annotated[list[str] | None, typer.Option(help=_HELP_BASELINE)] = None
    out: Annotated[
        Path, typer.Option(help="folder of the report", parser=shared.parse_path, metavar="PATH")
    ] = Path("speed")
    plots: Annotated[bool, typer.Option(help="draw plots (matplotlib)")] = True
    load: Annotated[LoadOptions, Without("compile", "share_prefix")]
    compile: shared.CompileFirst = False

    def check(self) -> list[int]:
        """The batch sizes, after a look at all that can be checked without a model.

        Raises:
            OptionError: a value outside its domain.
            MissingBackendError: plots without matplotlib.
        """
        from mmaccel.evaluation.measure import check_plots
        from mmaccel.evaluation.speed import LEAST_RUNS
        from mmaccel.evaluation.transformers_baseline import BASELINES

        self.check_texts()
        check_int("--runs", self.runs, LEAST_RUNS, MAX_RUNS, hint="p90 needs as many")
        check_int("--warm-up", self.warm_up, 1, MAX_RUNS, hint="the first run is slower")
        sizes = shared.split_values("--batch-sizes", self.batch_sizes)
        found = [read_text("--batch-sizes", text, int) for text in sizes or [""]]
        for size in found:
            check_int("--batch-sizes", size, 1, MAX_BATCH, hint="write 1,2,4,8")
        for name in self.baseline or []:
            check_choice("--baseline", name, BASELINES)
        if self.plots:
            check_plots("--plots")
        self.method.read()
        return list(dict.fromkeys(found))

    def run(self) -> None:
        """Measure size by size, write and print."""
        from mmaccel.commands.files import new_report, open_folder
        from mmaccel.commands.terminal import stderr_console
        from mmaccel.evaluation.speed import PLAIN, POLICY, Side, summarise_speed
        from mmaccel.evaluation.transformers_baseline import BaselineDecoding, find_obstacle
        from mmaccel.loading import place
        from mmaccel.pipelines.text_to_image.contact_sheet import make_plain
        from mmaccel.results import exactness_in

        sizes = self.check()
        load = replace(place(self.load), compile=self.compile)
        open_folder(self.out)
        pipe, params, texts = self.open(load, None)
        policy = self.method.choose(pipe.model.kind)[1]
        sides = [Side(PLAIN, pipe, make_plain(policy), params), Side(POLICY, pipe, policy, params)]
        left_out = {}
        usual = ["transformers"] if self.is_text(pipe) else []
        for name in dict.fromkeys(self.baseline or usual):
            reason = find_obstacle(pipe, name, texts[0], params)
            if reason:
                left_out[name] = reason
                stderr_console().print(f"--baseline {name} is left out: {reason}")
            else:
                sides.append(Side(name, BaselineDecoding(pipe, name, texts), None, params))
        baselines = sides[2:]
        runs: list[dict[str, Any]] = []
        failure: BaseException | None = None
        try:
            self.measure(sides, texts, sizes, runs)
        except (
            KeyboardInterrupt,
            Exception,
        ) as error:  # reported after what is finished is written
            failure = error
        finally:
            for side in baselines:
                side.source.close()
        each = len(sides) * (self.runs + self.warm_up)
        done = len(runs) // each
        report = new_report(
            load.device,
            model=self.model,
            policy=repr(policy),
            exactness=policy.exactness,
            promise=exactness_in(policy.exactness, load.dtype),
            dtype=load.dtype,
            cuda_graphs=load.cuda_graphs,
            fused=load.fused,
            compile=self.compile,
            guidance=params.guidance_scale,
            temperature=params.temperature,
            seed=self.seed,
            captions=texts,
            max_new_tokens=pipe.length if self.is_text(pipe) else None,
            runs=self.runs,
            warm_up=self.warm_up,
            baselines=[side.name for side in baselines],
            left_out=left_out,
            sizes_asked=sizes,
            sizes_done=sizes[:done],
            rows=summarise_speed(runs[: done * each]),
        )
        self.write(report, runs)
        if failure is not None:
            raise _with_progress(failure, sizes, done) from failure

    def measure(
        self, sides: list[Any], texts: list[str], sizes: list[int], runs: list[dict[str, Any]]
    ) -> None:
        """Runs of every size, which are appended to `runs` and written after each size."""
        from mmaccel.commands.files import write_lines
        from mmaccel.commands.terminal import watch
        from mmaccel.evaluation.measure import Case, measure
        from mmaccel.evaluation.speed import take_turns

        for size in sizes:
            inputs = take_turns(texts, self.seed, size)
            cases = [Case(side.name, side.make, inputs) for side in sides]
            device = sides[0].source.model.device
            made = measure(cases, self.runs, warm_up=self.warm_up, device=device)
            total = len(sides) * (self.runs + self.warm_up)
            for run in watch(made, total, f"measuring batches of {size}"):
                del run["made"]
                runs.append(run)
            write_lines(self.out / "speed.jsonl", runs)

    def write(self, report: dict[str, Any], runs: list[dict[str, Any]]) -> None:
        """Write all runs, and a report of the sizes whose runs are complete; print it."""
        from mmaccel.commands.files import write_json, write_lines, write_text
        from mmaccel.commands.terminal import print_rows, say
        from mmaccel.evaluation.speed import COLUMNS, plan_plots, write_speed
        from mmaccel.outputs.whole_files import write_whole

        if runs:
            write_lines(self.out / "speed.jsonl", runs)
        if not report["rows"]:
            return
        write_json(self.out / "speed.json", report)
        write_text(self.out / "speed.md", write_speed(report))
        for name, draw in plan_plots(report, runs).items() if self.plots else ():
            write_whole(self.out / name, draw)
        print_rows(report["policy"], COLUMNS, report["rows"])
        say(f"{self.runs} runs each; see {self.out / 'speed.md'} for the rest.")


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


speed = as_command(Speed, pauses=False)
