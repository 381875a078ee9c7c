"""`mmaccel evaluate words`: word error rate of transcripts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mmaccel.commands.evaluate.quality import ItemsFile
from mmaccel.commands.flags import as_command
from mmaccel.commands.options import JsonFile
from mmaccel.commands.terminal import say
from mmaccel.errors import OptionError, ShapeError
from mmaccel.limits import read_lines


@dataclass(frozen=True, kw_only=True)
class Words:
    """Word error rate: substituted, deleted and inserted words over words of the reference."""

    reference: Annotated[Path, typer.Argument(help="the texts spoken, an utterance a line")]
    heard: Annotated[Path, typer.Argument(help="transcripts, line by line")]
    simplify: Annotated[
        bool, typer.Option("--simplify", help="compare in lower case, without punctuation")
    ] = False
    json_file: JsonFile = None
    items_file: ItemsFile = None

    def run(self) -> None:
        """Count, write and print."""
        from mmaccel.commands.files import check_file, new_report, write_json, write_lines
        from mmaccel.evaluation.quality import word_errors

        for option, file in (("--json", self.json_file), ("--items", self.items_file)):
            check_file(option, file)
        plain = word_errors.simplify if self.simplify else str
        files = (self.reference, self.heard)
        texts = [[plain(line) for line in read_lines(file, "text")] for file in files]
        try:
            parts = word_errors.compare_transcripts(*texts)
        except ShapeError as error:  # of the files that were named
            raise OptionError(str(error)) from error
        total = word_errors.sum_word_errors(parts)
        figures: dict[str, Any] = {"utterances": len(parts), "simplified": self.simplify}
        write_json(self.json_file, new_report(**figures, rate=total.rate, **asdict(total)))
        lines = [
            {"line": k, "reference": a, "heard": b, **asdict(part)}
            for k, (a, b, part) in enumerate(zip(*texts, parts, strict=True), 1)
        ]
        write_lines(self.items_file, lines)
        name = "word error rate of simplified texts" if self.simplify else "word error rate"
        say(
            f"{name}: {100 * total.rate:.2f} % ({total.substitutions} substituted, "
            f"{total.deletions} deleted, {total.insertions} inserted; {total.words} words in "
            f"{len(parts)} utterances)"
        )


words = as_command(Words, pauses=False)
