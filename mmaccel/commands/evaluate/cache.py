"""`mmaccel evaluate cache`: what smaller caches and sparse attention cost in answers, and save."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from mmaccel.catalog import METHODS, read_named
from mmaccel.commands import options as shared
from mmaccel.commands.evaluate.measuring import MeasureFlags, RecordFile, measure_rounds
from mmaccel.commands.flags import with_flags
from mmaccel.errors import OptionError
from mmaccel.options import LoadOptions
from mmaccel.own_code import TypedName

_HELP_MODEL = "recall, a folder with weights of it, or a causal LM (with --suite or --data)"
_HELP_METHODS = (
    "NAME[:field=value…] with commas, also module:Name; by default all that the model takes. "
    "Controls are always measured"
)
_HELP_BUDGETS = "fractions of a prompt, with commas: entries that stay, or blocks that are read"
_HELP_DATA = 'a line {"prompt": …, "answer": …, "task": …} for each question'
_HELP_SUITE = "documents: about texts of Python's own; questions count that the full cache answers"
_HELP_LENGTH = "tokens of a document of recall"
_HELP_TOKENS = "of an answer; by default 10 for recall and suites, 16 for others"
_HELP_PLOT = "draw accuracy against budget and bytes (PNG)"
_BUDGETS = "0.5,0.25,0.1"
_LONGEST = 65_536  # tokens of a document, sixteen times what `recall` reads


class Suite(StrEnum):
    """Questions that come with the package, for any model."""

    DOCUMENTS = "documents"


@dataclass(frozen=True, kw_only=True)
class CacheFlags(MeasureFlags):
    """Which methods are asked which questions, and where the figures go."""

    budgets: Annotated[str, typer.Option(help=_HELP_BUDGETS)] = _BUDGETS
    methods: Annotated[str, typer.Option(help=_HELP_METHODS)] = ""
    questions: Annotated[int, typer.Option(help="of each task, at most")] = 40
    length: Annotated[int, typer.Option(help=_HELP_LENGTH)] = 2048
    suite: Annotated[Suite | None, typer.Option(help=_HELP_SUITE)] = None
    data: Annotated[
        Path | None, typer.Option(help=_HELP_DATA, parser=shared.parse_path, metavar="FILE")
    ] = None
    batch_size: Annotated[int, typer.Option("--batch", help="questions answered together")] = 8
    max_new_tokens: Annotated[int | None, typer.Option(help=_HELP_TOKENS)] = None
    plot: Annotated[
        Path | None, typer.Option(help=_HELP_PLOT, parser=shared.parse_path, metavar="FILE")
    ] = None
    threads: shared.Threads = None
    revision: Annotated[str | None, typer.Option(help="of a download")] = None

    def check(self) -> None:
        """See `MeasureFlags.check`."""
        from mmaccel.checks import check_int
        from mmaccel.demo.recall.documents import SHORTEST

        super().check()
        if self.suite is not None and self.data is not None:
            raise OptionError("--suite, --data: expected one of them, received both; leave one out")
        check_int("--length", self.length, SHORTEST, _LONGEST, hint="recall reads 4096 at most")


@with_flags
def cache(
    model: Annotated[str, typer.Argument(help=_HELP_MODEL)] = "recall",
    *,
    flags: CacheFlags,
    device: shared.Device = "auto",
    dtype: shared.Dtype = "auto",
) -> None:
    """Accuracy by task, cached entries, bytes and seconds, of every method for caches and attention
    at every budget, next to the full cache and controls."""
    from mmaccel.commands.files import new_report
    from mmaccel.evaluation.cache.documents import (
        check_lengths,
        draw_questions,
        open_model,
        read_questions,
    )
    from mmaccel.evaluation.cache.methods import list_sides, parse_budgets, parse_methods
    from mmaccel.evaluation.cache.plots import draw_plots
    from mmaccel.evaluation.cache.questions import digest_questions
    from mmaccel.evaluation.cache.suite import draw_suite
    from mmaccel.evaluation.visual_tokens.questions import digest_weights
    from mmaccel.loading import place
    from mmaccel.outputs.whole_files import write_whole
    from mmaccel.pipelines.loading.placement import choose_dtype

    flags.check()
    shared.set_threads(flags.threads)
    load = place(LoadOptions(device=device, dtype=dtype))
    texts = shared.split_values("--methods", flags.methods)
    known = METHODS["kv_cache"] | METHODS["attention"]
    methods = parse_methods(read_named("--methods", TypedName(text), known) for text in texts)
    budgets = parse_budgets(shared.split_values("--budgets", flags.budgets))
    asked = None if flags.data is None else read_questions(flags.data, flags.questions)
    text_model = open_model(model, load.device, choose_dtype(load.dtype), flags.revision)
    if flags.suite is not None:
        asked = draw_suite(flags.questions)
    elif asked is None:
        if not text_model.is_demo:
            raise OptionError(
                f"--data: expected questions for {model}, received none; only recall has its own. "
                "Write a JSON object a line and give the file, or --suite documents"
            )
        asked = draw_questions(flags.questions, flags.length)
    max_new_tokens = flags.max_new_tokens or (10 if text_model.is_demo or flags.suite else 16)
    prompts = text_model.encode(asked)
    check_lengths(text_model, prompts, max_new_tokens)
    lengths = sorted(len(prompt) for prompt in prompts)
    sides, left_out = list_sides(text_model.model, methods, budgets, lengths[0])
    tasks = sorted({question.task for question in asked})
    report = new_report(
        load.device,
        model=model,
        weights=digest_weights(text_model.model),
        data=None if flags.data is None else flags.data.name,
        suite=flags.suite,
        chat_template=flags.suite is not None and text_model.tokenizer.chat_template is not None,
        questions=len(asked),
        digest=digest_questions(asked),
        prompt_tokens=[lengths[0], lengths[-1]],
        batch=flags.batch_size,
        max_new_tokens=max_new_tokens,
        dtype=load.dtype,
        left_out=left_out,
        budgets=budgets,
        task_names=tasks,
    )
    report["device"] = load.device
    report["tasks"] = " ".join(str(tasks.index(question.task)) for question in asked)
    _run(report, text_model, asked, sides, flags.json_file)
    if flags.plot is not None:
        write_whole(flags.plot, lambda path: draw_plots(path, report))
    _print(report)


def _run(
    report: dict[str, Any], text_model: Any, asked: Any, sides: Any, file: Path | None
) -> None:
    """Measure what is not in the file yet; see `measure_rounds`."""
    from mmaccel.evaluation.cache.measure import (
        ADDED,
        PER_ROUND,
        count_rounds,
        measure_sides,
        new_record,
    )
    from mmaccel.evaluation.cache.summary import summarise

    batch = report["batch"]
    tasks = [question.task for question in asked]
    measure_rounds(
        report,
        RecordFile(file, _SAME, PER_ROUND, added=ADDED),
        [side.key for side in sides],
        count_rounds(len(asked), batch),
        new_record=new_record,
        measure=lambda records, session: measure_sides(
            text_model,
            asked,
            sides,
            records,
            batch=batch,
            max_new_tokens=report["max_new_tokens"],
            session=session,
        ),
        summarise=lambda records: {
            "cache_sides": summarise(
                sides, records, tasks, batch, informative=report["suite"] is not None
            )
        },
    )


_SAME = ("weights", "digest", "batch", "max_new_tokens", "dtype", "device")
_HEADS = (
    "budget",
    "right % (95 %)",
    "less full",
    "over random",
    "entries kept %",
    "blocks read %",
    "KiB a row",
    "pass ms",
    "prefill ms",
)


def _print(report: dict[str, Any]) -> None:
    from mmaccel.commands.terminal import make_table, wide_console
    from mmaccel.evaluation.tables import cache_cells, kind_cells

    console = wide_console()
    rows = report["cache_sides"]
    names = report["task_names"]
    shortest, longest = report["prompt_tokens"]
    title = (
        f"{report['model']}: {report['questions']} questions of {len(names)} tasks, prompts of "
        f"{shortest} to {longest} tokens"
    )
    table = make_table("method", *_HEADS, title=title)
    for row in rows:
        table.add_row(*cache_cells(row))
    console.print(table)
    tasks = make_table("right, %", "budget", *names, title="by task")
    for row in rows:
        cells = cache_cells(row)
        tasks.add_row(*cells[:2], *kind_cells(row, names))
    console.print(tasks)
    for name, reason in report["left_out"].items():
        console.print(f"{name} is left out: {reason}")
    console.print(
        "less, over: points of accuracy (95 %). budget: entries that stay, or blocks that are "
        "read, of a prompt's. kept: cached entries, mean over layers. blocks read: by all passes, "
        "mean over layers. KiB: keys and values as "
        "allocated, a row. ms: medians, a pass of one token, and the prompt a question, batch "
        f"{report['batch']}. Answers are compared without case, extra blanks and final punctuation."
    )
    if len(report["sessions"]) > 1:
        console.print("Measured in several runs; seconds of different runs are hard to compare.")
