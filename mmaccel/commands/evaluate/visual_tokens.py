"""`mmaccel evaluate visual-tokens`: what fewer visual tokens cost in answers, and save."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mmaccel.commands import options as shared
from mmaccel.commands.evaluate.measuring import MeasureFlags, RecordFile, measure_rounds
from mmaccel.commands.flags import with_flags
from mmaccel.errors import OptionError
from mmaccel.options import LoadOptions
from mmaccel.own_code import TypedName

_HELP_MODEL = "scenes-vqa, a folder with weights of it, or a vision-language model (with --data)"
_HELP_METHODS = (
    "with commas, also module:Name; by default all that the model takes. Controls are always "
    "measured"
)
_HELP_DATA = 'a line {"image": …, "question": …, "answer": …, "kind": …} for each question'
_HELP_TOKENS = "of an answer; by default 4 for scenes-vqa, 16 for others"
_HELP_PLOT = "draw accuracy against seconds and tokens (PNG)"
_KEEPS = "0.5,0.33,0.22,0.11"


@dataclass(frozen=True, kw_only=True)
class VisualTokensFlags(MeasureFlags):
    """Which methods are asked which questions, and where the figures go."""

    keep: Annotated[str, typer.Option(help="fractions that stay, with commas")] = _KEEPS
    methods: Annotated[str, typer.Option(help=_HELP_METHODS)] = ""
    data: Annotated[
        Path | None, typer.Option(help=_HELP_DATA, parser=shared.parse_path, metavar="FILE")
    ] = None
    max_new_tokens: Annotated[int | None, typer.Option(help=_HELP_TOKENS)] = None
    seed: Annotated[int, typer.Option(help="of methods that draw", callback=shared.read_seed)] = 0
    plot: Annotated[
        Path | None, typer.Option(help=_HELP_PLOT, parser=shared.parse_path, metavar="FILE")
    ] = None


@with_flags
def visual_tokens(
    model: Annotated[str, typer.Argument(help=_HELP_MODEL)] = "scenes-vqa",
    *,
    flags: VisualTokensFlags,
    device: shared.Device = "auto",
    dtype: shared.Dtype = "auto",
) -> None:
    """Accuracy by kind of question, visual tokens, FLOPs and seconds, of every method at every
    fraction, next to all tokens and controls."""
    from mmaccel.commands.files import new_report
    from mmaccel.evaluation.visual_tokens.methods import list_sides, parse_keeps, parse_methods
    from mmaccel.evaluation.visual_tokens.plots import draw_plots
    from mmaccel.evaluation.visual_tokens.prefill import FORMULA
    from mmaccel.evaluation.visual_tokens.questions import (
        digest_questions,
        digest_weights,
        draw_questions,
        open_model,
        read_questions,
    )
    from mmaccel.loading import place
    from mmaccel.outputs.whole_files import write_whole
    from mmaccel.pipelines.loading.placement import choose_dtype

    flags.check()
    load = place(LoadOptions(device=device, dtype=dtype))
    texts = [TypedName(text) for text in shared.split_values("--methods", flags.methods)]
    names = parse_methods(texts)
    keeps = parse_keeps(shared.split_values("--keep", flags.keep))
    asked = None if flags.data is None else read_questions(flags.data, flags.questions)
    vlm = open_model(model, load.device, choose_dtype(load.dtype))
    if asked is None:
        if not vlm.is_demo:
            raise OptionError(
                f"--data: expected questions for {model}, received none; only scenes-vqa has its "
                "own. Write a JSON object a line and give the file"
            )
        asked = draw_questions(flags.questions)
    sides, left_out = list_sides(vlm.model, names, keeps)
    kinds = sorted({question.kind for question in asked})
    report = new_report(
        load.device,
        model=model,
        weights=digest_weights(vlm.model),
        data=None if flags.data is None else flags.data.name,
        questions=len(asked),
        digest=digest_questions(asked),
        batch=flags.batch_size,
        max_new_tokens=flags.max_new_tokens or (4 if vlm.is_demo else 16),
        dtype=load.dtype,
        seed=flags.seed,
        left_out=left_out,
        keeps=keeps,
        flops_formula=FORMULA,
        kind_names=kinds,
    )
    report["device"] = load.device
    report["kinds"] = " ".join(str(kinds.index(question.kind)) for question in asked)
    _run(report, vlm, asked, sides, flags.json_file)
    if flags.plot is not None:
        write_whole(flags.plot, lambda path: draw_plots(path, report))
    _print(report)


def _run(report: dict[str, Any], vlm: Any, asked: Any, sides: Any, file: Path | None) -> None:
    """Measure what is not in the file yet; see `measure_rounds`."""
    from mmaccel.evaluation.visual_tokens.measure import (
        PER_ROUND,
        count_rounds,
        measure_sides,
        new_record,
    )
    from mmaccel.evaluation.visual_tokens.summary import summarise

    batch = report["batch"]
    kinds = [question.kind for question in asked]
    measure_rounds(
        report,
        RecordFile(file, _SAME, PER_ROUND),
        [side.key for side in sides],
        count_rounds(asked, batch),
        new_record=new_record,
        measure=lambda records, session: measure_sides(
            vlm,
            asked,
            sides,
            records,
            batch=batch,
            max_new_tokens=report["max_new_tokens"],
            seed=report["seed"],
            session=session,
        ),
        summarise=lambda records: {"sides": summarise(sides, records, kinds, batch)},
    )


_SAME = ("weights", "digest", "batch", "max_new_tokens", "dtype", "device", "seed")


_HEADS = (
    "keep",
    "right % (95 %)",
    "less all tokens",
    "over random",
    "informative %",
    "tokens",
    "GFLOP",
    "prefill ms",
    "all ms",
)


def _print(report: dict[str, Any]) -> None:
    from mmaccel.commands.terminal import make_table, wide_console
    from mmaccel.evaluation.tables import kind_cells, visual_tokens_cells

    console = wide_console()
    rows = report["sides"]
    names = report["kind_names"]
    title = f"{report['model']}: {report['questions']} questions of {len(names)} kinds"
    table = make_table("method", *_HEADS, title=title)
    for row in rows:
        table.add_row(*visual_tokens_cells(row))
    console.print(table)
    kinds = make_table("right, %", "keep", *names, title="by kind of question")
    for row in rows:
        shares = kind_cells(row, names)
        kinds.add_row(row["method"], f"{row['keep']:g}", *shares)
    console.print(kinds)
    for name, reason in report["left_out"].items():
        console.print(f"{name} is left out: {reason}")
    console.print(
        "less, over: points of accuracy (95 %). tokens: visual tokens after the last layer (mean "
        f"over layers). ms: medians a question, batch {report['batch']}. informative: right where "
        "all tokens are and downsampling is not (of how many). Answers are compared without case, "
        "extra blanks and final punctuation."
    )
    if len(report["sessions"]) > 1:
        console.print("Measured in several runs; seconds of different runs are hard to compare.")
