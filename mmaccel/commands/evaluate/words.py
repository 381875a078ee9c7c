"""`mmaccel evaluate words`: word error rate of transcripts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from mmaccel.commands.options import JsonFile, parse_path
from mmaccel.errors import OptionError, ShapeError
from mmaccel.limits import read_lines


def words(
    reference: Annotated[Path, typer.Argument(help="the texts spoken, an utterance a line")],
    heard: Annotated[Path, typer.Argument(help="transcripts, line by line")],
    simplify: Annotated[
        bool, typer.Option("--simplify", help="compare in lower case, without punctuation")
    ] = False,
    json_file: JsonFile = None,
    items_file: Annotated[
        Path | None,
        typer.Option(
            "--items",
            help="write a line for each utterance here",
            parser=parse_path,
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Word error rate: substituted, deleted and inserted words over words of the reference."""
    from mmaccel.commands.files import check_file, new_report, write_json, write_lines
    from mmaccel.commands.terminal import say
    from mmaccel.evaluation.quality import word_errors

    for option, file in (("--json", json_file), ("--items", items_file)):
        check_file(option, file)
    plain = word_errors.simplify if simplify else str
    texts = [[plain(line) for line in read_lines(file, "text")] for file in (reference, heard)]
    try:
        parts = word_errors.compare_transcripts(*texts)
    except ShapeError as error:  # of the files that were named
        raise OptionError(str(error)) from error
    total = word_errors.sum_word_errors(parts)
    figures: dict[str, Any] = {"utterances": len(parts), "simplified": simplify, "rate": total.rate}
    write_json(json_file, new_report(**figures, **asdict(total)))
    lines = [
        {"line": k, "reference": a, "heard": b, **asdict(part)}
        for k, (a, b, part) in enumerate(zip(*texts, parts, strict=True), 1)
    ]
    write_lines(items_file, lines)
    name = "word error rate of simplified texts" if simplify else "word error rate"
    say(
        f"{name}: {100 * total.rate:.2f} % ({total.substitutions} substituted, {total.deletions} "
        f"deleted, {total.insertions} inserted; {total.words} words in {len(parts)} utterances)"
    )
