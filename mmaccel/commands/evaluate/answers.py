"""`mmaccel evaluate visual-tokens | cache`: what fewer visual tokens, smaller caches and sparse
attention cost in answers, and save.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from mmaccel.commands import options as shared
from mmaccel.commands.flags import as_command
from mmaccel.commands.process import Stopped
from mmaccel.commands.terminal import make_table, print_rows, say, watch, wide_console
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_BATCH, MAX_MEASURED
from mmaccel.options import LoadOptions, option
from mmaccel.own_code import TypedName

if TYPE_CHECKING:
    from mmaccel.evaluation.answers import AskedModel
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


class Suite(StrEnum):
    """Questions that come with the package, for any model."""

    DOCUMENTS = "documents"


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Which methods are asked which questions, and where the figures go."""

    model: str
    methods: str = option("", _HELP_REDUCERS)
    questions: int = option(100, "of each kind, at most", min=1, max=MAX_MEASURED)
    data: Annotated[Path | None, typer.Option(help="questions, an object a line", **_PATH)] = None
    batch_size: int = option(
        16, "questions answered together", names=("--batch",), min=1, max=MAX_BATCH
    )
    max_new_tokens: int | None = option(
        None, "of an answer; by default as the questions want it", min=1, max=MAX_MEASURED
    )
    json_file: Annotated[Path | None, typer.Option("--json", help=_HELP_JSON, **_PATH)] = None
    device: shared.Device = "auto"
    dtype: shared.Dtype = "auto"
    seed: ClassVar[int] = 0
    suite: ClassVar[Suite | None] = None

    def ask(
        self,
        kind: type[AskedModel],
        levels: str,
        open_model: Callable[[str, Any], Any],
        draw: Callable[[], list[Question]],
        **facts: Any,
    ) -> None:
        """Ask every side what the file lacks, write after every round, and print."""
        from mmaccel.commands.files import check_file, new_report, write_json
        from mmaccel.evaluation.answers import (
            digest_weights,
            measure_answers,
            parse_levels,
            summarise,
            try_sides,
        )
        from mmaccel.evaluation.questions import digest_questions, read_questions
        from mmaccel.loading import place
        from mmaccel.pipelines.hosts.loading.placement import choose_dtype

        check_file("--json", self.json_file)
        load = place(LoadOptions(device=self.device, dtype=self.dtype))
        fractions = parse_levels(kind.option, shared.split_values(kind.option, levels))
        texts = list(map(TypedName, shared.split_values("--methods", self.methods)))
        wanted = kind.list_sides(texts, fractions)
        given = None
        if self.data is not None:
            given = read_questions(self.data, self.questions, kind.fields)
        asked = open_model(load.device, choose_dtype(load.dtype))
        is_own = asked.is_demo or self.suite is not None
        if given is None and not is_own:
            raise OptionError(
                f"--data: expected questions for {self.model}, received none; only {kind.demo} "
                "has its own. Write a JSON object a line and give the file"
            )
        questions = given or draw()
        max_new_tokens = self.max_new_tokens or (kind.short if is_own else 16)
        seen = asked.look_at(questions, max_new_tokens)
        sides, left_out = try_sides(asked, wanted, seen.get("prompt_tokens", [0])[0])
        kinds = [question.kind for question in questions]
        names = sorted(set(kinds))
        report = new_report(
            load.device,
            model=self.model,
            weights=digest_weights(asked.model),
            data=None if self.data is None else self.data.name,
            questions=len(questions),
            digest=digest_questions(questions),
            batch=self.batch_size,
            max_new_tokens=max_new_tokens,
            dtype=load.dtype,
            left_out=left_out,
            **seen,
            **facts,
        )
        report |= {
            "device": load.device,
            f"{kind.level}s": fractions,
            f"{kind.kind}_names": names,
            f"{kind.kind}s": " ".join(str(names.index(each)) for each in kinds),
        }
        records, sessions = _read_records(self.json_file, kind, report)
        for side in sides:
            records.setdefault(side.key, kind.new_record())
        n_rounds = -(-len(questions) // self.batch_size)
        missing = sum(n_rounds - len(records[side.key]["seconds"]) for side in sides)
        if missing:
            sessions.append({"command": report["command"], "machine": report["machine"]})
        report |= {"sessions": sessions, "records": records}

        def keep() -> None:
            is_suite = self.suite is not None
            rows = summarise(kind, sides, records, kinds, self.batch_size, only_answered=is_suite)
            report[kind.rows] = rows
            write_json(self.json_file, report)

        done = 0
        measured = measure_answers(
            asked,
            questions,
            sides,
            records,
            batch=self.batch_size,
            max_new_tokens=max_new_tokens,
            seed=self.seed,
            session=len(sessions) - 1,
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
        _print(kind, report, names)


def _read_records(
    file: Path | None, kind: type[AskedModel], report: Mapping[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The records and runs of an earlier report, of the same questions, settings and weights."""
    from mmaccel.checks import show
    from mmaccel.limits import parse_json, read_whole

    if file is None or not file.exists():
        return {}, []
    try:
        before = parse_json(read_whole(file, "--json"))
        records, sessions = dict(before["records"]), list(before["sessions"])
        for record in records.values():
            lengths = {len(record[name]) for name in (*kind.figures(), "sessions")}
            if len(lengths) > 1:
                raise ValueError(f"lists of {lengths} rounds")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise OptionError(
            "--json: expected no file yet, or a report of this command to go on from, received "
            f"{str(file)!r}; choose another name"
        ) from None
    for name in kind.same:
        if before.get(name) != report[name]:
            raise OptionError(
                f"--json: expected a report with the same {name} ({show(report[name])}) to go "
                f"on from, received {show(before.get(name))} in {str(file)!r}; choose another name"
            )
    return records, sessions


def _print(kind: type[AskedModel], report: dict[str, Any], names: list[str]) -> None:
    from mmaccel.evaluation.measure import tabulate
    from mmaccel.evaluation.tables import kind_cells

    rows = report[kind.rows]
    title = f"{report['model']}: {report['questions']} questions of {len(names)} {kind.kind}s"
    print_rows(title, kind.columns, rows)
    columns = dict(list(kind.columns.items())[:2])
    table = make_table(*columns, *names, title=f"right, by {kind.kind}, %")
    for cells, row in zip(tabulate(columns, rows), rows):
        table.add_row(*cells, *kind_cells(row, names))
    wide_console().print(table, "")
    for name, reason in report["left_out"].items():
        say(f"{name} is left out: {reason}")
    say(
        f"less, over: points of accuracy (95 %). {kind.note} Batch {report['batch']}. Answers are "
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
    seed: Annotated[int, typer.Option(help="of methods that draw", callback=shared.read_seed)] = 0  # type: ignore[misc]

    def run(self) -> None:
        from mmaccel.evaluation import visual_tokens as topic

        open_model = partial(topic.open_model, self.model)
        draw = partial(topic.draw_questions, self.questions)
        facts = {"seed": self.seed, "flops_formula": topic.FORMULA}
        self.ask(topic.VisionModel, self.keep, open_model, draw, **facts)


@dataclass(frozen=True, kw_only=True)
class Cache(Answers):
    """Accuracy by task, cached entries, bytes and seconds, of every method for caches and attention
    at every budget, next to the full cache and controls."""

    model: Annotated[str, typer.Argument(help=_HELP_TEXT)] = "recall"
    methods: str = option("", _HELP_METHODS)
    budgets: str = option("0.5,0.25,0.1", _HELP_BUDGETS)
    questions: int = option(40, "of each task, at most", min=1, max=MAX_MEASURED)
    length: int = option(2048, "tokens of a document of recall")
    suite: Suite | None = option(None, _HELP_SUITE)  # type: ignore[misc]
    batch_size: int = option(
        8, "questions answered together", names=("--batch",), min=1, max=MAX_BATCH
    )
    threads: shared.Threads = None
    revision: str | None = option(None, "of a download")

    def run(self) -> None:
        from mmaccel.checks import check_int
        from mmaccel.demo.recall.documents import SHORTEST
        from mmaccel.evaluation import cache as topic
        from mmaccel.evaluation.suite import draw_suite

        if self.suite is not None and self.data is not None:
            raise OptionError("--suite, --data: expected one of them, received both; leave one out")
        check_int("--length", self.length, SHORTEST, _LONGEST, hint="recall reads 4096 at most")
        shared.set_threads(self.threads)
        open_model = partial(topic.open_model, self.model, revision=self.revision)
        draw = partial(topic.draw_questions, self.questions, self.length)
        if self.suite is not None:
            draw = partial(draw_suite, self.questions)
        self.ask(topic.TextModel, self.budgets, open_model, draw, suite=self.suite)


visual_tokens = as_command(VisualTokens, pauses=False)
cache = as_command(Cache, pauses=False)
