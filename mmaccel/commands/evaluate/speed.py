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
from mmaccel.commands.process import Stopped
from mmaccel.commands.terminal import print_rows, say, stderr_console, watch
from mmaccel.limits import MAX_BATCH, MAX_RUNS
from mmaccel.options import LoadOptions, option, read_text

_HELP_BASELINE = (
    "another side: transformers, prompt-lookup, static (cache), compiled or assisted; may be "
    "repeated; by default transformers for a causal LM"
)


@dataclass(frozen=True, kw_only=True)
class Speed(TextFlags):
    """Median, p90, p99, IQR, passes, tokens a pass, stages, memory, and the sizes where it loses;
    writes speed.md, speed.json, speed.jsonl and plots."""

    method: PolicyFlags
    batch_sizes: str = option("1,2,4,8", "with commas")
    runs: int = option(20, "of each side at each size; at least 20")
    warm_up: int = option(2, "further runs, not measured")
    baseline: list[str] | None = option(None, _HELP_BASELINE)
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
        from mmaccel.commands.files import open_folder
        from mmaccel.evaluation.speed import PLAIN, POLICY, Side
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
        facts = {
            "device": load.device,
            "policy": repr(policy),
            "exactness": policy.exactness,
            "promise": exactness_in(policy.exactness, load.dtype),
            "dtype": load.dtype,
            "cuda_graphs": load.cuda_graphs,
            "fused": load.fused,
            "compile": self.compile,
            "guidance": params.guidance_scale,
            "temperature": params.temperature,
            "captions": texts,
            "max_new_tokens": pipe.length if self.is_text(pipe) else None,
            "left_out": left_out,
        }
        runs: list[dict[str, Any]] = []
        is_stopped = False
        try:
            self.measure(sides, texts, sizes, runs)
        except KeyboardInterrupt:
            is_stopped = True
        finally:  # a size that does not fit into memory ends it, too
            for side in baselines:
                side.source.close()
            done = self.finish(sides, sizes, runs, facts)
        if is_stopped:
            raise Stopped(f"stopped; measured {done} of {len(sizes)} batch sizes")

    def finish(
        self,
        sides: list[Any],
        sizes: list[int],
        runs: list[dict[str, Any]],
        facts: dict[str, Any],
    ) -> int:
        """Write all runs, and a report of the sizes whose runs are complete, whose number is
        returned; print it."""
        from mmaccel.commands.files import new_report, write_json, write_lines, write_text
        from mmaccel.evaluation.speed import COLUMNS, plan_plots, summarise_speed, write_speed
        from mmaccel.outputs.whole_files import write_whole

        each = len(sides) * (self.runs + self.warm_up)
        done = len(runs) // each
        if runs:
            write_lines(self.out / "speed.jsonl", runs)
        if not done:
            return done
        report = new_report(
            **facts,
            model=self.model,
            seed=self.seed,
            runs=self.runs,
            warm_up=self.warm_up,
            baselines=[side.name for side in sides[2:]],
            sizes_asked=sizes,
            sizes_done=sizes[:done],
            rows=summarise_speed(runs[: done * each]),
        )
        write_json(self.out / "speed.json", report)
        write_text(self.out / "speed.md", write_speed(report))
        for name, draw in plan_plots(report, runs).items() if self.plots else ():
            write_whole(self.out / name, draw)
        print_rows(report["policy"], COLUMNS, report["rows"])
        say(f"{self.runs} runs each; see {self.out / 'speed.md'} for the rest.")
        return done

    def measure(
        self, sides: list[Any], texts: list[str], sizes: list[int], runs: list[dict[str, Any]]
    ) -> None:
        """Runs of every size, which are appended to `runs` and written after each size."""
        from mmaccel.batch.job import is_out_of_memory
        from mmaccel.commands.files import write_lines
        from mmaccel.evaluation.measure import Case, measure
        from mmaccel.evaluation.speed import take_turns

        for size in sizes:
            inputs = take_turns(texts, self.seed, size)
            cases = [Case(side.name, side.make, inputs) for side in sides]
            device = sides[0].source.model.device
            made = measure(cases, self.runs, warm_up=self.warm_up, device=device)
            total = len(sides) * (self.runs + self.warm_up)
            try:
                for run in watch(made, total, f"measuring batches of {size}"):
                    del run["made"]
                    runs.append(run)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error) and "allocate memory" not in str(error):
                    raise
                raise OSError(
                    f"memory: expected memory for a batch of {size}, received {str(error)[:120]!r};"
                    " what was measured is written; leave the larger ones out of --batch-sizes"
                ) from error
            write_lines(self.out / "speed.jsonl", runs)


speed = as_command(Speed, pauses=False)
