"""`mmaccel evaluate exactness | speed`: what a policy, or a caller's own loop, guarantees; and the
throughput of a policy and of token by token, in alternating order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmaccel.catalog import MODELS
from mmaccel.checks import check_choice, check_int
from mmaccel.commands import options as shared
from mmaccel.commands.flags import Without, as_command
from mmaccel.commands.options import PolicyFlags, SizeFlags
from mmaccel.commands.process import Stopped
from mmaccel.commands.terminal import print_rows, say, stderr_console, watch
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_BATCH, MAX_MEASURED, MAX_RUNS, MAX_SAMPLES, read_lines
from mmaccel.options import LoadOptions, SamplingOptions, given, option, read_text

if TYPE_CHECKING:
    from mmaccel.pipelines.text_to_image.pipeline import TextToImage
    from mmaccel.samplers.sampling_params import SamplingParams

_BROKEN = 3  # exit code
_NEW_TOKENS = 64
_TEXT_POLICIES = ("jacobi", "prompt-lookup")  # where none is named
_HELP_MODEL = "of images or a causal LM: a name, path or hub id"
_HELP_PROMPTS = "a prompt a line; by default the model's examples"
_HELP_COUNT = (
    "images or texts; prompts repeat; by default 32 images, or 8 of a model that fills a canvas, "
    "and each text once"
)
_HELP_FEATURES = "scenes or module:function, for images; by default scenes for that model"
_HELP_GENERATE = (
    "module:function, a loop of your own to test instead of a policy: from the prompt's tokens (of "
    "--reference: its text) and a seed to the new tokens; that module's code is run"
)
_HELP_REFERENCE = (
    "module:function, what --generate is held against; by default the plain loop on MODEL; that "
    "module's code is run"
)
_HELP_BASELINE = (
    "another side: transformers, prompt-lookup, static (cache) or compiled; may be repeated; by "
    "default transformers for a causal LM"
)


@dataclass(frozen=True, kw_only=True)
class TextFlags:
    """A model of images or texts, and what it makes."""

    model: Annotated[str, typer.Argument(help=_HELP_MODEL)] = "scenes"
    prompts: Path | None = option(None, _HELP_PROMPTS)
    seed: Annotated[
        int,
        typer.Option(help="of the first row; the next has the next", callback=shared.read_seed),
    ] = 0
    max_new_tokens: int | None = option(
        None, f"of a text at most; by default {_NEW_TOKENS}", min=1, max=MAX_MEASURED
    )
    decoder: shared.Decoder = None
    sampling: SamplingOptions
    sides: SizeFlags
    load: LoadOptions
    method: PolicyFlags

    def check_texts(self) -> None:
        """Look at all that can be checked without a model."""
        self.read_prompts()
        self.method.read()

    def read_prompts(self) -> list[str]:
        """The lines of the file that are not empty; none without a file."""
        if self.prompts is None:
            return []
        lines = [line.strip() for line in read_lines(self.prompts, "--prompts") if line.strip()]
        if not lines:
            raise OptionError(
                f"--prompts: expected a prompt a line, received none in {str(self.prompts)!r}; "
                "write some"
            )
        return lines

    def open(
        self, load: LoadOptions, count: int | None
    ) -> tuple[TextToImage, SamplingParams, list[str], bool]:
        """A model of images, or a causal LM, whose `image_model` is a `ContinuedTexts`; how it
        draws; the prompts of a run, `count` in turn or each once; and whether these are texts that
        it continues.
        """
        from transformers.utils import logging

        from mmaccel.evaluation.texts import find_causal_lm, open_texts
        from mmaccel.loading import load_keywords, open_pipeline
        from mmaccel.pipelines.pipeline import read_loading
        from mmaccel.pipelines.text_to_image.model import choose_params, encode_prompts

        engine, config = read_loading(load_keywords(load))
        source = None if load.family else find_causal_lm(self.model, config)
        if source is None:
            size = self.sides.join()
            pipe = open_pipeline(self.model, load, size=size, decoder=self.decoder)
        else:
            logging.disable_progress_bar()
            pipe = open_texts(source, engine, config, self.max_new_tokens or _NEW_TOKENS)
        images = pipe.image_model
        examples = MODELS[self.model].examples if self.model in MODELS else images.examples
        texts = self.read_prompts() or list(examples)
        texts = [texts[k % len(texts)] for k in range(count or len(texts))]
        encode_prompts(images, list(dict.fromkeys(texts)), None, images.params)
        params = choose_params(images.params, **given(self.sampling))
        return pipe, params, texts, source is not None


@dataclass(frozen=True, kw_only=True)
class Exactness(TextFlags):
    """Exactness report: greedy tokens, first divergence, batches, distributions; or whether a loop
    of your own is lossless (--generate). Exit code 3 if a guarantee is broken."""

    generate: str | None = option(None, _HELP_GENERATE)
    reference: str | None = option(None, _HELP_REFERENCE)
    count: int | None = option(None, _HELP_COUNT, min=1, max=MAX_MEASURED)
    batch_size: int = option(8, "rows generated together", min=1, max=MAX_BATCH)
    samples: int = option(50_000, "sequences of the toy, or of --generate; 0: no G-test")
    features: str | None = option(None, _HELP_FEATURES)
    json_file: shared.JsonFile = None
    load: Annotated[LoadOptions, Without("compile")]

    def run(self) -> None:
        from mmaccel.commands.files import check_file, new_report
        from mmaccel.loading import place

        least = 1000 if self.samples or self.generate else 0
        check_int("--samples", self.samples, least, MAX_SAMPLES, hint="fewer have no power")
        check_file("--json", self.json_file)
        self.check_texts()
        if self.reference is not None and self.generate is None:
            raise OptionError(
                "--reference: expected --generate with it, received none; name your loop there"
            )
        # "auto" could compile between the two sides of a comparison
        load = replace(place(self.load), compile=False)
        report = new_report(
            load.device,
            model=self.model,
            dtype=load.dtype,
            seed=self.seed,
            batch_size=self.batch_size,
            checks=[],
            broken=[],
        )
        if self.generate is None:
            self.report_policies(report, load)
        else:
            self.report_loop(report, load, self.generate)
        if report["broken"]:
            raise typer.Exit(_BROKEN)

    def report_loop(self, report: dict[str, Any], load: LoadOptions, name: str) -> None:
        from mmaccel.evaluation.exactness.own_loop import compare_loops, draw_by, draw_plain
        from mmaccel.evaluation.quality.features import load_callable
        from mmaccel.pipelines.text_to_image.contact_sheet import make_plain

        loop = load_callable(name, "--generate", items="tokens of a prompt")
        fields = self.method.fields() or None
        named = {"--policy": self.method.policy, "--set": fields, "--features": self.features}
        shared.refuse(named, "with --generate")
        if self.reference is not None:
            drawn = {f"--{option}": value for option, value in given(self.sampling).items()}
            shared.refuse(drawn, "with --reference, whose loops draw by themselves")
            texts = self.read_prompts() or [""]
            length = self.max_new_tokens or _NEW_TOKENS
            other = load_callable(self.reference, "--reference", items="characters of a prompt")
            draw = draw_by(loop, "--generate", texts, length)
            reference = draw_by(other, "--reference", texts, length)
            report |= {"reference": self.reference, "model": None}
        else:
            pipe, params, texts, _ = self.open(load, self.count)
            params = self._drawing(params)
            texts = list(dict.fromkeys(texts))
            ends = getattr(pipe.image_model, "ends", ())
            prompts = [pipe.image_model.encode(text) for text in texts]
            length = pipe.length
            draw = draw_by(loop, "--generate", prompts, length, ends)
            plain = make_plain(self.method.choose(pipe.model)[1])
            reference = draw_plain(pipe, plain, params, texts, self.batch_size, ends)
            report |= {"reference": f"the plain loop on {self.model}", "params": repr(params)}
        report |= {"policy": name, "captions": texts}
        report |= {"samples": self.samples, "max_new_tokens": length}
        checks = compare_loops(draw, reference, len(texts), self.samples, self.seed)
        title = f"{name} against {report['reference']}"
        self.tell(report, checks, name, title, f"guarantee of {name}: lossless")

    def _drawing(self, params: SamplingParams) -> SamplingParams:
        """Greedy tokens have a check of their own."""
        is_greedy = params.temperature == 0 and self.sampling.temperature is None
        return replace(params, temperature=1.0) if is_greedy else params

    def report_policies(self, report: dict[str, Any], load: LoadOptions) -> None:
        from mmaccel.evaluation.exactness.report import Plan, check_all
        from mmaccel.evaluation.quality.features import open_extractor
        from mmaccel.evaluation.transformers_baseline import BaselineDecoding
        from mmaccel.pipelines.text_to_image.contact_sheet import make_plain
        from mmaccel.results import exactness_in

        features = self.features or ("scenes" if self.model in MODELS else None)
        if features is not None and self.count == 1 and self.sampling.temperature != 0:
            raise OptionError(
                f"--count: expected at least 2 to compare features, received {self.count}; ask "
                "for more"
            )
        extract = None if features is None else open_extractor(features)
        pipe, params, texts, is_text = self.open(load, self.count)
        params, kind = self._drawing(params), pipe.model.kind
        if is_text:
            shared.refuse({"--features": self.features}, "with a model of texts")
        elif self.count is None:
            texts = [texts[k % len(texts)] for k in range(32 if kind == "window" else 8)]
        is_open = is_text and self.method.policy is None and not self.method.fields()
        names: tuple[Any, ...] = _TEXT_POLICIES if is_open else (self.method.policy,)
        policies = [replace(self.method, policy=name).choose(pipe.model)[1] for name in names]
        report |= {
            "policy": ", ".join(map(repr, policies)),
            "exactness": ", ".join(policy.exactness for policy in policies),
            "guidance": params.guidance_scale,
            "temperature": params.temperature,
            "captions": texts,
            "max_new_tokens": pipe.length if is_text else None,
            "features": features,
        }
        library = BaselineDecoding(pipe, "transformers", texts) if is_text else None
        for policy in policies:
            plan = Plan(
                pipe,
                policy,
                make_plain(policy),
                texts,
                self.seed,
                params,
                self.batch_size,
                load.dtype,
                self.samples,
                extract,
                library,
            )
            said = f"guarantee in {load.dtype}: {exactness_in(policy.exactness, load.dtype)}"
            self.tell(report, check_all(plan), repr(policy), repr(policy), said)

    def tell(
        self, report: dict[str, Any], checks: Iterable[Any], policy: str, title: str, said: str
    ) -> None:
        """Write checks as they come, and print those that are done, also after an interrupt."""
        from mmaccel.commands.files import write_json

        rows: list[Any] = []
        try:
            for check in watch(checks, None, f"checking {policy}"):
                rows.append(check)
                report["checks"].append({"policy": policy, **check.to_dict()})
                report["broken"] += [check.name] * check.is_broken
                write_json(self.json_file, report)  # what is known outlives an interrupt
        finally:
            if rows:
                yes_no = ("no", "yes")
                columns = {
                    "check": lambda check: check.name,
                    "guaranteed": lambda check: yes_no[check.guaranteed],
                    "holds": lambda check: "BROKEN" if check.is_broken else yes_no[check.holds],
                    "measured": lambda check: check.said,
                }
                print_rows(title, columns, rows)
                names = ", ".join(check.name for check in rows if check.is_broken)
                say(f"{said}; {f'broken here: {names}' if names else 'all hold here'}.")


@dataclass(frozen=True, kw_only=True)
class Speed(TextFlags):
    """Median, p90, p99, IQR, passes, tokens a pass, stages, memory, and the sizes where it loses;
    writes speed.json and speed.jsonl."""

    batch_sizes: str = option("1,2,4,8", "with commas")
    runs: int = option(20, "of each side at each size; at least 20", max=MAX_RUNS)
    warm_up: int = option(2, "further runs, not measured", min=1, max=MAX_RUNS)
    baseline: list[str] | None = option(None, _HELP_BASELINE)
    out: Annotated[
        Path, typer.Option(help="folder of the report", parser=shared.parse_path, metavar="PATH")
    ] = Path("speed")
    load: Annotated[LoadOptions, Without("compile", "share_prefix")]
    compile: shared.CompileFirst = False

    def check(self) -> list[int]:
        """The batch sizes, after a look at all that can be checked without a model."""
        from mmaccel.evaluation.speed import LEAST_RUNS
        from mmaccel.evaluation.transformers_baseline import BASELINES

        check_int("--runs", self.runs, LEAST_RUNS, hint="p90 needs as many")
        sizes = shared.split_values("--batch-sizes", self.batch_sizes)
        batch_sizes = [read_text("--batch-sizes", text, int) for text in sizes or [""]]
        for size in batch_sizes:
            check_int("--batch-sizes", size, 1, MAX_BATCH, hint="write 1,2,4,8")
        for name in self.baseline or []:
            check_choice("--baseline", name, BASELINES)
        self.check_texts()
        return list(dict.fromkeys(batch_sizes))

    def run(self) -> None:
        from mmaccel.commands.files import new_report, open_folder, write_lines
        from mmaccel.evaluation.speed import PLAIN, POLICY, Side
        from mmaccel.evaluation.transformers_baseline import BaselineDecoding, find_obstacle
        from mmaccel.loading import place
        from mmaccel.pipelines.text_to_image.contact_sheet import make_plain
        from mmaccel.results import exactness_in

        sizes = self.check()
        load = replace(place(self.load), compile=self.compile)
        open_folder(self.out)
        pipe, params, texts, is_text = self.open(load, None)
        policy = self.method.choose(pipe.model)[1]
        sides = [Side(PLAIN, pipe, make_plain(policy), params), Side(POLICY, pipe, policy, params)]
        left_out = {}
        usual = ["transformers"] if is_text else []
        for name in dict.fromkeys(self.baseline or usual):
            reason = find_obstacle(pipe, name, texts[0], params)
            if reason:
                left_out[name] = reason
                stderr_console().print(f"--baseline {name} is left out: {reason}")
            else:
                sides.append(Side(name, BaselineDecoding(pipe, name, texts), None, params))
        report = new_report(
            load.device,
            model=self.model,
            seed=self.seed,
            policy=repr(policy),
            exactness=policy.exactness,
            promise=exactness_in(policy.exactness, load.dtype),
            dtype=load.dtype,
            cuda_graphs=load.cuda_graphs,
            fused=load.fused,
            compile=self.compile,
            guidance=params.guidance_scale,
            temperature=params.temperature,
            captions=texts,
            max_new_tokens=pipe.length if is_text else None,
            left_out=left_out,
            runs=self.runs,
            warm_up=self.warm_up,
            baselines=[side.name for side in sides[2:]],
            sizes_asked=sizes,
        )
        runs: list[dict[str, Any]] = []
        done = 0
        try:
            for size in sizes:
                self.measure(sides, texts, size, runs)
                done += 1
                write_lines(self.out / "speed.jsonl", runs)
        except KeyboardInterrupt:
            raise Stopped(f"stopped; measured {done} of {len(sizes)} batch sizes") from None
        finally:  # a size that does not fit into memory ends it, too
            for side in sides[2:]:
                side.source.close()
            self.write(report, runs, sizes[:done])

    def measure(
        self, sides: list[Any], texts: list[str], size: int, runs: list[dict[str, Any]]
    ) -> None:
        """Runs of a size, which are appended to `runs`."""
        from mmaccel.batch.job import is_out_of_memory
        from mmaccel.evaluation.measure import Case, measure
        from mmaccel.evaluation.speed import take_turns

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
                f"memory: expected memory for a batch of {size}, received {str(error)[:120]!r}; "
                "what was measured is written; leave the larger ones out of --batch-sizes"
            ) from error

    def write(self, report: dict[str, Any], runs: list[dict[str, Any]], sizes: list[int]) -> None:
        """Write all runs, and the report of the sizes that are done; print it."""
        from mmaccel.commands.files import write_json, write_lines
        from mmaccel.evaluation.speed import COLUMNS, PARTS, summarise_speed

        if runs:
            write_lines(self.out / "speed.jsonl", runs)
        if not sizes:
            return
        rows = summarise_speed([run for run in runs if run["batch_size"] in sizes])
        report |= {"sizes_done": sizes, "rows": rows}
        write_json(self.out / "speed.json", report)
        print_rows(report["policy"], COLUMNS, rows)
        print_rows("first run and stages, seconds a run", PARTS, rows)
        lost = [f"{row['batch_size']} ({row['loses_to'][0]})" for row in rows if row["loses"]]
        where = f"at batch {', '.join(lost)}" if lost else "at none of these sizes"
        say(
            f"It loses {where}. {self.runs} runs each; exactness: {report['promise']}; see "
            f"{self.out / 'speed.json'}."
        )


exactness = as_command(Exactness, pauses=False)
speed = as_command(Speed, pauses=False)
