"""`--prompts` of `mmaccel generate`, `animate` and `speak`: every image, clip or text of a file
once, however often the job stops.

`run_batch` is the run; `Reports` shows it, as a progress bar on stderr and as JSON on stdout.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from typing import Any, Self

import typer

from mmaccel.batch.job import (
    Executor,
    Fingerprint,
    Job,
    Lost,
    Outcome,
    check_unknown,
    find_lost,
    find_missing,
    remove_temporaries,
)
from mmaccel.batch.manifest import (
    JOB_SEED,
    Manifest,
    Past,
    Record,
    WriteError,
    check_fresh,
    manifest_name,
    read_manifests,
)
from mmaccel.batch.prompts import Item, Row, make_items, read_prompts, show, take_shard
from mmaccel.batch.worker import Setup, Worker
from mmaccel.commands.files import first_of, open_folder
from mmaccel.commands.options import pick_seed, set_threads
from mmaccel.commands.process import Stopped, resume_collector
from mmaccel.commands.streams import stdout_error
from mmaccel.commands.terminal import (
    count_of,
    one_line,
    print_envelope,
    progress_bar,
    stderr_console,
)
from mmaccel.loading import place
from mmaccel.options import given
from mmaccel.pipelines.text_to_image.model import choose_params
from mmaccel.samplers.sampling_params import SamplingParams

DONE, FATAL, WITH_FAILURES = 0, 1, 3  # exit codes


@dataclass(frozen=True)
class BatchOptions:
    """Flags of the command, what workers need, the seed or None, the shard or None."""

    file: Any
    setup: Setup
    seed: int | None
    shard: tuple[int, int] | None


def run_batch(flags: Any) -> None:
    """Make what a prompt file asks for.

    Args:
        flags: of `mmaccel generate`, `mmaccel animate` or `mmaccel speak`.

    Raises:
        typer.Exit: with the code `WITH_FAILURES` or `FATAL` where items failed, or where images
            or records are gone at the end.
        Stopped: by a signal; finished images remain.
        OptionError: a wrong option or row, before any image is generated.
    """
    flags.check()
    shard = flags.file.read_shard()
    set_threads(flags.threads)
    choose_params(SamplingParams(), **given(flags.sampling))
    setup = flags.setup(place(flags.load))
    data, code = _run(BatchOptions(flags.file, setup, flags.seed, shard))
    if flags.file.as_json or flags.file.json_stream:
        print_envelope(data, _describe_error(data, code, setup.unit) if code else None)
    if code:
        raise typer.Exit(code)


def _describe_error(data: dict[str, Any], code: int, unit: str) -> dict[str, str]:
    """The error of a job that ended, for programs."""
    failed = data["failed"]
    missing = data["missing"]
    parts = [f"{count_of(failed, 'item')} failed"] if failed else []
    if missing:
        parts.append(f"{count_of(missing, unit)} missing in {data['out']} or in its manifest")
    name = "failures" if failed else "missing"
    if code == FATAL:
        name = "fatal"
    return {"code": name, "message": ", ".join(parts)}


def _run(options: BatchOptions) -> tuple[dict[str, Any], int]:
    rows = read_prompts(options.file.prompt_file)
    folder = options.setup.out
    past = read_manifests(folder) if folder.is_dir() else Past()
    seed, is_drawn = _choose_seed(rows, past, options)
    items = make_items(rows, seed, options.setup.suffix)
    if options.shard is not None:
        items = take_shard(items, *options.shard)
    if not options.file.resume:
        check_fresh(folder / manifest_name(options.shard))
    if not options.file.dry_run:
        open_folder(folder)  # before the model is loaded, which takes long
    executor = _open_executor(options)
    resume_collector()
    if is_drawn and any(row.seed is None for row in rows):
        _print_to_stderr(
            f"seed: {seed}, drawn and noted in the manifest; the same command with --seed {seed} "
            "makes the same again"
        )
    try:
        return _generate(items, past, executor, replace(options, seed=seed))
    finally:
        executor.close()


def _choose_seed(rows: list[Row], past: Past, options: BatchOptions) -> tuple[int, bool]:
    """The seed of a job, and whether it was drawn.

    Shards, which run on their own and cannot agree on one that is drawn, have 0. So had all jobs
    whose manifests do not note one.
    """
    seed, is_drawn = pick_seed(options.seed)
    if not is_drawn:
        return seed, False
    if options.shard is not None:
        return 0, False
    ids = {row.id for row in rows}
    noted = [record for (id, _), record in past.records.items() if id in ids]
    if options.file.resume and noted:
        return noted[-1].get(JOB_SEED, 0), False
    return seed, True


def _open_executor(options: BatchOptions) -> Executor:
    if options.file.executor == "local":
        return Worker(options.setup)
    from mmaccel.batch.ray_executor import RayExecutor

    return RayExecutor(options.setup, options.file.actors)


def _generate(
    items: list[Item], past: Past, executor: Executor, options: BatchOptions
) -> tuple[dict[str, Any], int]:
    """Check all items, and generate those that are missing."""
    folder = options.setup.out
    unit = options.setup.unit
    fingerprint = executor.check(items)
    if options.file.dry_run:
        missing, facts = _find_missing(items, fingerprint, past, options)
        return _show_plan(missing, facts, unit), DONE
    manifest = Manifest(folder / manifest_name(options.shard))
    began = time.perf_counter()
    try:
        # another process may have finished images while this one loaded its model
        past = read_manifests(folder)
        missing, facts = _find_missing(items, fingerprint, past, options)
        remove_temporaries(folder, items)
        with Reports(len(missing), unit, is_streaming=options.file.json_stream) as reports:
            reports.emit("start", **facts)
            for torn in past.torn:
                reports.note(f"{torn}: cannot be read; its {unit} is generated again")
            done = [i.key for i in missing if past.records.get(i.key, {}).get("status") == "ok"]
            if done:
                wrong = first_of([past.lines[key] for key in done])
                reports.note(f"{wrong}: not the files in {folder}; generated again")
            retries = options.file.retries
            job = Job(
                missing,
                fingerprint,
                manifest,
                reports,
                1 if retries is None else retries,
                options.file.max_failures,
                options.seed,
            )
            try:
                outcome = job.run(executor)
            except KeyboardInterrupt:
                raise Stopped(
                    _summary(job.outcome, facts, unit) + "; continue with --resume"
                ) from None
        lost = find_lost(job.list_finished(items), fingerprint, folder)
    finally:
        manifest.close()
    facts |= {"made": outcome.finished, "failed": outcome.failed, "is_cut": outcome.is_cut}
    facts |= {"missing": len(lost.names), "manifest": str(manifest.file)}
    facts["seconds"] = round(time.perf_counter() - began, 3)
    summary = _summary(outcome, facts, unit) + _describe_lost(lost, unit)
    if outcome.is_cut:
        summary += f": more than --max-failures {options.file.max_failures}, so the job ended"
    elif outcome.failed or lost.names:
        summary += "; try them again with --resume"
    _print_to_stderr(summary)
    if outcome.is_cut:
        return facts, FATAL
    return facts, WITH_FAILURES if outcome.failed or lost.names else DONE


def _find_missing(
    items: list[Item], fingerprint: Fingerprint, past: Past, options: BatchOptions
) -> tuple[list[Item], dict[str, Any]]:
    """The items to generate, and the facts of the job for its reports."""
    folder = options.setup.out
    if not options.file.resume:
        check_unknown(items, past, folder)  # in manifests of another number of shards
    missing = find_missing(items, fingerprint, past, folder)
    return missing, {
        "out": str(folder),
        "seed": options.seed,
        "items": len(items),
        "made_before": len(items) - len(missing),
    }


def _show_plan(missing: list[Item], facts: dict[str, Any], unit: str) -> dict[str, Any]:
    _print_to_stderr(
        f"{count_of(len(missing), unit)} to generate, {facts['made_before']} finished before, "
        f"in {facts['out']}"
    )
    rows = [{"id": i.row.id, "k": i.k, "seed": i.seed, "file": i.file} for i in missing]
    return {**facts, "to_make": len(missing), "plan": rows}


def _summary(outcome: Outcome, facts: dict[str, Any], unit: str) -> str:
    text = f"{count_of(outcome.finished, unit)} generated in {facts['out']}"
    text += f", {facts['made_before']} before" if facts["made_before"] else ""
    return text + (f", {outcome.failed} failed" if outcome.failed else "")


def _describe_lost(lost: Lost, unit: str) -> str:
    if not lost.names:
        return ""
    return (
        f", but {count_of(len(lost.files), unit)} and {count_of(len(lost.lines), 'record')} of "
        f"the manifest are missing there ({first_of(lost.names)}): something else changed the "
        "folder"
    )


def _print_to_stderr(text: str) -> None:
    stderr_console().print(text, markup=False, highlight=False, soft_wrap=True)


class Reports:
    """Progress on stderr, and one JSON event a line on stdout if streaming.

    Args:
        total: items of this run.
        unit: noun for an item.
        is_streaming: whether events go to stdout.

    Use it as a context manager, which shows the bar.
    """

    def __init__(self, total: int, unit: str = "image", *, is_streaming: bool) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._is_streaming = is_streaming
        self._unit = unit
        self._began = time.perf_counter()
        self._bar = progress_bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            refresh_per_second=10,
            disable=is_streaming and sys.stdout.isatty(),  # events and bar on one screen
        )
        self._task = self._bar.add_task(f"{unit}s", total=total, rate="")
        self._finished = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def finished(self, record: Record) -> None:
        self._finished += 1
        self._advance()
        self.emit("item", item=record)

    def failed(self, record: Record) -> None:
        self._advance()
        name = f"{record['id']}, {self._unit} {record['k']} ({show(record['prompt'])})"
        self._bar.console.print(
            f"failed: {name}: {one_line(record['error'])}", markup=False, highlight=False
        )
        self.emit("failed", item=record)

    def note(self, text: str) -> None:
        self._bar.console.print(f"note: {text}", markup=False, highlight=False)
        self.emit("note", text=text)

    def emit(self, event: str, **facts: Any) -> None:
        """Print an event as a line of JSON, if streaming.

        Raises:
            WriteError: the reader of stdout is gone, or has no space.
        """
        if not self._is_streaming:
            return
        print(json.dumps({"event": event, **facts}))
        error = stdout_error()
        if error is not None:
            raise WriteError(
                f"--json-stream: expected a reader of stdout, received: {error.strerror}; the "
                f"{self._unit}s in the manifest are complete, continue with --resume"
            )

    def _advance(self) -> None:
        rate = self._finished / max(time.perf_counter() - self._began, 1e-9)
        self._bar.update(self._task, advance=1, rate=f"{rate:.2f}/s")
