"""`mmaccel evaluate visual-tokens | cache`: what fewer visual tokens, smaller caches and sparse
attention cost in answers, and save.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmaccel.catalog import METHODS, read_named
from mmaccel.commands import options as shared
from mmaccel.commands.flags import as_command
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_BATCH, MAX_MEASURED
from mmaccel.options import LoadOptions, option
from mmaccel.own_code import TypedName

if TYPE_CHECKING:
    from mmaccel.evaluation.answers import Side, Topic
    from mmaccel.evaluation.questions import Question

_HELP_JSON = "write figures here; a run that was stopped goes on from them"
_HELP_VISION = "scenes-vqa, a folder with weights of it, or a vision-language model (with --data)"
_HELP_TEXT = "recall, a folder with weights of it, or a causal LM (with --suite or --data)"
_HELP_REDUCERS = (
    "with commas, also module:Name; by default all that the model takes. Controls are always "
    "measured"
)
_HELP_METHODS = f"NAME[:field=value…] {_HELP_REDUCERS}"
_HELP_BUDGETS = "fractions of a prompt, with commas: entries that stay, or blocks that are read"
_HELP_SUITE = "documents: about texts of Python's own; questions count that the full cache answers"
_LONGEST = 65_536  # tokens of a document, sixteen times what `recall` reads
_PATH: dict[str, Any] = {"parser": shared.parse_path, "metavar": "FILE"}


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Which methods are asked which questions, and where the figures go."""

    methods: str = option("", _HELP_REDUCERS)
    questions: int = option(100, "of each kind, at most")
    data: Annotated[Path | None, typer.Option(help="questions, an object a line", **_PATH)] = None
    batch_size: int = option(16, "questions answered together", names=("--batch",))
    max_new_tokens: int | None = option(None, "of an answer; by default as the questions want it")
    json_file: Annotated[Path | None, typer.Option("--json", help=_HELP_JSON, **_PATH)] = None
    plot: Annotated[
        Path | None, typer.Option(help="draw accuracy against what is saved (PNG)", **_PATH)
    ] = None
    device: shared.Device = "auto"
    dtype: shared.Dtype = "auto"

    def check(self) -> LoadOptions:
        """Where the model goes, after a look at all that can be checked without it.

        Raises:
            OptionError: a value outside its domain, or a file that cannot be written.
            MissingBackendError: a plot without matplotlib.
        """
        from mmaccel.commands.files import check_file
        from mmaccel.evaluation.measure import check_plots
        from mmaccel.loading import place

        shared.check_count("questions", self.questions, MAX_MEASURED)
        shared.check_count("batch", self.batch_size, MAX_BATCH)
        if self.max_new_tokens is not None:
            shared.check_count("max-new-tokens", self.max_new_tokens, MAX_MEASURED)
        check_file("--json", self.json_file)
        check_file("--plot", self.plot)
        if self.plot is not None:
            check_plots("--plot")
        return place(LoadOptions(device=self.device, dtype=self.dtype))

    def measure(
        self,
        topic: Topic,
        load: LoadOptions,
        host: Any,
        asked: Sequence[Question],
        sides: Sequence[Side],
        *,
        inputs: Callable[[Sequence[Question], int, Sequence[Side]], Any],
        answer: Callable[[Side, Any], Mapping[str, Any]],
        **facts: Any,
    ) -> None:
        """Measure what the file lacks, write after every round, draw and print.

        Args:
            topic: see `mmaccel.evaluation.answers`.
            load: how the model was opened.
            host: the model, of transformers.
            asked: all questions.
            sides: who answers.
            inputs, answer: see `mmaccel.evaluation.answers.measure_answers`.
            **facts: further ones of the report.

        Raises:
            OptionError: a file of other questions, settings or weights, or no report.
            Stopped: by a signal; what was measured is in the file.
        """
        from mmaccel.commands.files import new_report, write_json
        from mmaccel.commands.process import Stopped
        from mmaccel.commands.terminal import watch
        from mmaccel.evaluation.answers import (
            digest_weights,
            draw_rows,
            measure_answers,
            summarise,
        )
        from mmaccel.evaluation.questions import digest_questions
        from mmaccel.outputs.whole_files import write_whole

        kinds = [question.kind for question in asked]
        names = sorted(set(kinds))
        report = new_report(
            load.device,
            weights=digest_weights(host),
            data=None if self.data is None else self.data.name,
            questions=len(asked),
            digest=digest_questions(asked),
            batch=self.batch_size,
            dtype=load.dtype,
            **{
                f"{topic.kind}_names": names,
                f"{topic.kind}s": " ".join(str(names.index(kind)) for kind in kinds),
            },
            **facts,
        )
        report["device"] = load.device
        records, sessions = _read_records(self.json_file, topic, report)
        for side in sides:
            records.setdefault(side.key, topic.new_record())
        n_rounds = -(-len(asked) // self.batch_size)
        missing = sum(n_rounds - len(records[side.key]["seconds"]) for side in sides)
        if missing:
            sessions.append({"command": report["command"], "machine": report["machine"]})
        report |= {"sessions": sessions, "records": records}

        def keep() -> None:
            only = report.get("suite") is not None
            rows = summarise(topic, sides, records, kinds, self.batch_size, only_answered=only)
            report[topic.rows] = rows
            write_json(self.json_file, report)

        done = 0
        measured = measure_answers(
            topic,
            asked,
            sides,
            records,
            batch=self.batch_size,
            session=len(sessions) - 1,
            inputs=inputs,
            answer=answer,
            device=host.device,
        )
        try:
            for done, _ in enumerate(watch(measured, missing, "answering"), 1):
                if done % len(sides) == 0:
                    keep()
        except KeyboardInterrupt:
            same = f"the same command with --json {self.json_file} goes on"
            raise Stopped(
                f"stopped; {done} of {missing} batches answered, "
                f"{same if self.json_file else 'nothing is kept'}"
            ) from None
        finally:
            keep()
        if self.plot is not None:
            write_whole(self.plot, lambda path: draw_rows(topic, path, report))
        _print(topic, report, names)


def _read_records(
    file: Path | None, topic: Topic, report: Mapping[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The records and runs of an earlier report; empty where there is no file. Lists that reports
    of earlier releases lack are filled with None.

    Raises:
        OptionError: a report of other questions, settings or weights, or no report.
    """
    from mmaccel.checks import show
    from mmaccel.limits import parse_json, read_whole

    if file is None or not file.exists():
        return {}, []
    try:
        found = parse_json(read_whole(file, "--json"))
        records, sessions = dict(found["records"]), list(found["sessions"])
        for record in records.values():
            for name in topic.figures:
                record.setdefault(name, [None] * len(record["seconds"]))
            lengths = {len(record[name]) for name in (*topic.figures, "sessions")}
            if len(lengths) > 1:
                raise ValueError(f"lists of {lengths} rounds")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise OptionError(
            "--json: expected no file yet, or a report of this command to go on from, received "
            f"{str(file)!r}; choose another name"
        ) from None
    for name in topic.same:
        if found.get(name) != report[name]:
            raise OptionError(
                f"--json: expected a report with the same {name} ({show(report[name])}) to go "
                f"on from, received {show(found.get(name))} in {str(file)!r}; choose another name"
            )
    return records, sessions


def _print(topic: Topic, report: dict[str, Any], names: list[str]) -> None:
    from mmaccel.commands.terminal import print_rows, say
    from mmaccel.evaluation.tables import kind_cells

    rows = report[topic.rows]
    title = f"{report['model']}: {report['questions']} questions of {len(names)} {topic.kind}s"
    print_rows(title, topic.columns, rows)
    columns = dict(list(topic.columns.items())[:2])
    for name in names:
        columns[name] = lambda row, name=name: kind_cells(row, [name])[0]  # type: ignore[misc]
    print_rows(f"right, %, by {topic.kind}", columns, rows)
    for name, reason in report["left_out"].items():
        say(f"{name} is left out: {reason}")
    say(
        f"less, over: points of accuracy (95 %). {topic.note} Batch {report['batch']}. Answers are "
        "compared without case, extra blanks and final punctuation."
    )
    if len(report["sessions"]) > 1:
        say("Measured in several runs; seconds of different runs are hard to compare.")


@dataclass(frozen=True, kw_only=True)
class VisualTokens(Answers):
    """Accuracy by kind of question, visual tokens, FLOPs and seconds, of every method at every
    fraction, next to all tokens and controls."""

    model: Annotated[str, typer.Argument(help=_HELP_VISION)] = "scenes-vqa"
    keep: str = option("0.5,0.33,0.22,0.11", "fractions that stay, with commas")
    seed: Annotated[int, typer.Option(help="of methods that draw", callback=shared.read_seed)] = 0

    def run(self) -> None:
        """Ask every side, write and print."""
        from mmaccel.evaluation import visual_tokens as topic
        from mmaccel.evaluation.answers import parse_levels, try_sides
        from mmaccel.evaluation.questions import IMAGE_FIELDS, read_questions
        from mmaccel.pipelines.loading.placement import choose_dtype

        load = self.check()
        texts = shared.split_values("--methods", self.methods)
        names = topic.parse_methods(map(TypedName, texts))
        keeps = parse_levels("--keep", shared.split_values("--keep", self.keep))
        asked = None
        if self.data is not None:
            asked = read_questions(self.data, self.questions, IMAGE_FIELDS)
        vlm = topic.open_model(self.model, load.device, choose_dtype(load.dtype))
        if asked is None:
            _check_demo(vlm.is_demo, self.model, topic.DEMO)
            asked = topic.draw_questions(self.questions)
        groups = topic.list_groups(names, keeps)
        sides, left_out = try_sides(
            vlm.model, topic.WHOLE, groups, 0, lambda method: {"visual_tokens": method}
        )
        max_new_tokens = self.max_new_tokens or (4 if vlm.is_demo else 16)

        def prepare(part: Sequence[Question], first: int, _: Any) -> Any:
            return vlm.encode(part), [self.seed + first + k for k in range(len(part))]

        self.measure(
            topic.TOPIC,
            load,
            vlm.model,
            asked,
            sides,
            inputs=prepare,
            answer=lambda side, part: topic.answer_round(vlm, part, side.make(0), max_new_tokens),
            model=self.model,
            max_new_tokens=max_new_tokens,
            seed=self.seed,
            left_out=left_out,
            keeps=keeps,
            flops_formula=topic.FORMULA,
        )


class Suite(StrEnum):
    """Questions that come with the package, for any model."""

    DOCUMENTS = "documents"


@dataclass(frozen=True, kw_only=True)
class Cache(Answers):
    """Accuracy by task, cached entries, bytes and seconds, of every method for caches and attention
    at every budget, next to the full cache and controls."""

    model: Annotated[str, typer.Argument(help=_HELP_TEXT)] = "recall"
    methods: str = option("", _HELP_METHODS)
    budgets: str = option("0.5,0.25,0.1", _HELP_BUDGETS)
    questions: int = option(40, "of each task, at most")
    length: int = option(2048, "tokens of a document of recall")
    suite: Suite | None = option(None, _HELP_SUITE)
    batch_size: int = option(8, "questions answered together", names=("--batch",))
    threads: shared.Threads = None
    revision: str | None = option(None, "of a download")

    def run(self) -> None:
        """Ask every side, write and print."""
        from mmaccel.checks import check_int
        from mmaccel.demo.recall.documents import SHORTEST
        from mmaccel.evaluation import cache as topic
        from mmaccel.evaluation.answers import parse_levels, try_sides
        from mmaccel.evaluation.questions import TEXT_FIELDS, read_questions
        from mmaccel.evaluation.suite import draw_suite
        from mmaccel.pipelines.causal_lm.model import CausalLMWindow
        from mmaccel.pipelines.loading.placement import choose_dtype

        load = self.check()
        if self.suite is not None and self.data is not None:
            raise OptionError("--suite, --data: expected one of them, received both; leave one out")
        check_int("--length", self.length, SHORTEST, _LONGEST, hint="recall reads 4096 at most")
        shared.set_threads(self.threads)
        texts = map(TypedName, shared.split_values("--methods", self.methods))
        known = METHODS["kv_cache"] | METHODS["attention"]
        methods = topic.parse_methods(read_named("--methods", text, known) for text in texts)
        budgets = parse_levels("--budgets", shared.split_values("--budgets", self.budgets))
        asked = None
        if self.data is not None:
            asked = read_questions(self.data, self.questions, TEXT_FIELDS)
        elif self.suite is not None:
            asked = draw_suite(self.questions)
        text_model = topic.open_model(
            self.model, load.device, choose_dtype(load.dtype), self.revision
        )
        if asked is None:
            _check_demo(text_model.is_demo, self.model, topic.DEMO)
            asked = topic.draw_questions(self.questions, self.length)
        is_short = text_model.is_demo or self.suite is not None
        max_new_tokens = self.max_new_tokens or (10 if is_short else 16)
        prompts = text_model.encode(asked)
        topic.check_lengths(text_model, prompts, max_new_tokens)
        lengths = sorted(len(prompt) for prompt in prompts)
        groups = topic.list_groups(methods, budgets)
        sides, left_out = try_sides(
            text_model.model,
            topic.WHOLE,
            groups,
            lengths[0],
            lambda made: {"kv_cache": made.kv_cache, "attention": made.attention},
        )
        window = CausalLMWindow(text_model.model)
        self.measure(
            topic.TOPIC,
            load,
            text_model.model,
            asked,
            sides,
            inputs=lambda part, _, left: topic.prepare_round(window, text_model.encode(part), left),
            answer=lambda side, part: topic.answer_round(
                text_model, window, side, part, max_new_tokens
            ),
            model=self.model,
            suite=self.suite,
            chat_template=self.suite is not None and text_model.tokenizer.chat_template is not None,
            prompt_tokens=[lengths[0], lengths[-1]],
            max_new_tokens=max_new_tokens,
            left_out=left_out,
            budgets=budgets,
        )


def _check_demo(is_demo: bool, model: str, demo: str) -> None:
    if not is_demo:
        raise OptionError(
            f"--data: expected questions for {model}, received none; only {demo} has its own. "
            "Write a JSON object a line and give the file"
        )


visual_tokens = as_command(VisualTokens, pauses=False)
cache = as_command(Cache, pauses=False)
