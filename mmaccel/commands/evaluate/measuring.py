"""What `evaluate cache` and `evaluate visual-tokens` share: flags, and rounds that a stopped run
goes on with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mmaccel.commands import options as shared
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_BATCH, MAX_MEASURED

_HELP_JSON = "write figures here; a run that was stopped goes on from them"
Records = dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class MeasureFlags:
    """Which methods are asked which questions, and where the figures go."""

    methods: Annotated[str, typer.Option(help="names, with commas")] = ""
    questions: Annotated[int, typer.Option(help="of each kind, at most")] = 100
    data: Annotated[
        Path | None, typer.Option(help="questions", parser=shared.parse_path, metavar="FILE")
    ] = None
    batch_size: Annotated[int, typer.Option("--batch", help="questions answered together")] = 16
    max_new_tokens: Annotated[int | None, typer.Option(help="of an answer")] = None
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help=_HELP_JSON, parser=shared.parse_path, metavar="FILE"),
    ] = None
    plot: Annotated[
        Path | None, typer.Option(help="draw it (PNG)", parser=shared.parse_path, metavar="FILE")
    ] = None

    def check(self) -> None:
        """Look at all that can be checked without a model.

        Raises:
            OptionError: a value outside its domain, or a file that cannot be written.
            MissingBackendError: a plot without matplotlib.
        """
        from mmaccel.commands.files import check_file
        from mmaccel.evaluation.visual_tokens.plots import check_plots

        shared.check_count("questions", self.questions, MAX_MEASURED)
        shared.check_count("batch", self.batch_size, MAX_BATCH)
        if self.max_new_tokens is not None:
            shared.check_count("max-new-tokens", self.max_new_tokens, MAX_MEASURED)
        for option, file in (("--json", self.json_file), ("--plot", self.plot)):
            check_file(option, file)
        if self.plot is not None:
            check_plots()


@dataclass(frozen=True)
class RecordFile:
    """How the records of a command are kept in the file of `--json`.

    Attributes:
        file: None where nothing is kept.
        same: what has to be the same in a report to go on from.
        per_round: lists of a record, with an entry a round.
        added: those of them that reports of earlier releases lack; None stands for their entries.
    """

    file: Path | None
    same: Sequence[str]
    per_round: Sequence[str]
    added: Sequence[str] = ()

    def read(self, report: Mapping[str, Any]) -> tuple[Records, list[dict[str, Any]]]:
        """The records and runs of an earlier report; empty where there is no file.

        Args:
            report: the new one.

        Raises:
            OptionError: a report of other questions, settings or weights, or no report.
        """
        from mmaccel.checks import show
        from mmaccel.limits import parse_json, read_whole

        if self.file is None or not self.file.exists():
            return {}, []
        try:
            found = parse_json(read_whole(self.file, "--json"))
            records = {key: dict(record) for key, record in found["records"].items()}
            for record in records.values():
                for name in self.added:
                    record.setdefault(name, [None] * len(record["seconds"]))
            sessions = list(found["sessions"])
            lengths = [
                {len(record[name]) for name in self.per_round} for record in records.values()
            ]
            is_whole = all(len(own) == 1 for own in lengths)
        except (ValueError, KeyError, TypeError, AttributeError):
            is_whole = False
        if not is_whole:
            raise OptionError(
                "--json: expected no file yet, or a report of this command to go on from, received "
                f"{str(self.file)!r}; choose another name"
            )
        for name in self.same:
            if found.get(name) != report[name]:
                raise OptionError(
                    f"--json: expected a report with the same {name} ({show(report[name])}) to go "
                    f"on from, received {show(found.get(name))} in {str(self.file)!r}; choose "
                    "another name"
                )
        return records, sessions


def measure_rounds(
    report: dict[str, Any],
    records_file: RecordFile,
    keys: Sequence[str],
    n_rounds: int,
    *,
    new_record: Callable[[], dict[str, Any]],
    measure: Callable[[Records, int], Iterator[str]],
    summarise: Callable[[Records], dict[str, Any]],
) -> None:
    """Measure what is not in the file yet, and put the records and their summary into the report.

    Args:
        report: the new one; changed.
        records_file: where it is kept, after every round.
        keys: of all sides.
        n_rounds: of each side.
        new_record: makes a record of nothing.
        measure: fills the records, of this run's number; yields once a side and round.
        summarise: the fields of the report that follow from the records.

    Raises:
        OptionError: see `RecordFile.read`.
        Stopped: by a signal; what was measured is in the file.
    """
    from mmaccel.commands.files import write_json
    from mmaccel.commands.process import Stopped
    from mmaccel.commands.terminal import watch

    file = records_file.file
    records, sessions = records_file.read(report)
    for key in keys:
        records.setdefault(key, new_record())
    missing = sum(n_rounds - len(records[key]["seconds"]) for key in keys)
    if missing:
        sessions.append({"command": report["command"], "machine": report["machine"]})
    report |= {"sessions": sessions, "records": records}

    def keep() -> None:
        report.update(summarise(records))
        write_json(file, report)

    measured = measure(records, len(sessions) - 1)
    done = 0
    try:
        for done, _ in enumerate(watch(measured, missing, "answering"), 1):
            if done % len(keys) == 0:
                keep()
    except KeyboardInterrupt:
        remains = f"the same command with --json {file} goes on" if file else "nothing is kept"
        raise Stopped(f"stopped; {done} of {missing} batches answered, {remains}") from None
    finally:
        keep()
