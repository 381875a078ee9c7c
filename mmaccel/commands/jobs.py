"""The run of `mmaccel generate`, `animate` and `speak`: a few items of the command line, or every
item of a prompt file once, however often the job stops.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import typer

from mmaccel.batch.job import (
    Executor,
    Job,
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
    names_of,
    read_manifests,
)
from mmaccel.batch.modalities import Modality
from mmaccel.batch.prompts import Item, Row, make_items, read_prompts, show, take_shard
from mmaccel.batch.worker import ItemsFailed, Worker
from mmaccel.commands.files import check_folder, check_written, first_of, open_folder
from mmaccel.commands.options import pick_seed, say_drawn, set_threads
from mmaccel.commands.process import Stopped, resume_collector
from mmaccel.commands.sheets import Sheet
from mmaccel.commands.streams import stdout_error
from mmaccel.commands.terminal import (
    count_of,
    one_line,
    print_envelope,
    progress_bar,
    say,
    stderr_console,
)
from mmaccel.loading import place
from mmaccel.options import given
from mmaccel.outputs.image_files import image_name
from mmaccel.outputs.sound_streams import (
    check_pipe,
    find_loudspeaker,
    open_loudspeaker,
    open_standard_output,
)
from mmaccel.pipelines.text_to_image.model import choose_params
from mmaccel.results import EXACT_DTYPE, Stats, add_stats
from mmaccel.samplers.sampling_params import SamplingParams

DONE, FATAL, WITH_FAILURES = 0, 1, 3  # exit codes
_NOT_IN_NAME = ("id", "k", "seed", "model", "versions", "exactness", "policy", "policy_options")


def run(flags: Any) -> None:
    """Make what the command line or a prompt file asks for.

    Args:
        flags: a `mmaccel.commands.media.FileCommand`.

    Raises:
        typer.Exit: with the code `WITH_FAILURES` or `FATAL` where items of a file failed, or where
            files or records are gone at the end.
        Stopped: by a signal; what is finished remains.
        Incomplete: written files are gone.
        OptionError: a wrong option, input or row, before anything is made.
        WriteError: a file cannot be written; what is finished remains.
    """
    flags.check()
    set_threads(flags.threads)
    choose_params(SamplingParams(), **given(flags.sampling))
    is_few = flags.file.prompt_file is None
    modality = flags.modality(place(flags.load))
    if is_few:
        _make_few(flags, replace(modality, layers=flags.layer.read(), has_manifest=False))
        return
    data, code = _make_file(flags, modality)
    if flags.file.as_json or flags.file.json_stream:
        print_envelope(data, _describe_error(data, code, modality.unit) if code else None)
    if code:
        raise typer.Exit(code)


def _make_few(flags: Any, modality: Modality) -> None:
    """Make the items of the command line, whose files say what they cost."""
    seed, is_drawn = pick_seed(flags.seed)
    sound = flags.open_sound()
    if sound is None:
        check_folder(modality.out)
    worker = Worker(modality)
    resume_collector()
    items = [_name(item, worker) for item in flags.items(worker.pipe, seed)]
    unit = modality.unit
    if is_drawn:
        say_drawn(seed)
    if sound is not None:
        _listen(items, worker, sound)
        return
    open_folder(modality.out)
    records: list[Record] = []
    parts: list[Stats] = []
    sheet = Sheet(flags, worker, items) if unit == "image" else None
    try:
        with Reports(unit, len(items) * (1 + flags.compare)) as reports:

            def finish(record: Record) -> None:
                records.append(record)
                reports.report("item", record)

            for part in [items] if sheet is None else sheet.begin(reports):
                look = None if sheet is None else sheet.keep
                stats = worker.run_all(part, finish, on_step=reports.update, look=look)
                parts.append(stats)
    except KeyboardInterrupt:
        raise Stopped(
            f"stopped; {len(records)} of {count_of(len(items), unit)} are in {modality.out}"
        ) from None
    except ItemsFailed as error:
        assert error.__cause__ is not None
        raise error.__cause__ from None
    stats = add_stats(parts)
    check_written([modality.out / name for each in records for name in names_of(each["file"])],
                  modality.out)  # fmt: skip
    what = f"{count_of(len(records), unit)}{_seconds(records)} in {modality.out}"
    if sheet is None:
        say(f"{what}: {stats.summary}")
        say(stats)
    else:
        say(sheet.finish(what, stats))
    for note in (*stats.notes, *_cuts(records)):
        say(f"note: {note}")


def _name(item: Item, worker: Worker) -> Item:
    """An item whose file has a readable name, which differs where anything it depends on does.

    The number of rows is a part where results are equal up to rounding only: outside float32, and
    where an acceptance may depend on the last bit of a probability.
    """
    facts = worker.describe(item)
    modality = worker.modality
    settings = worker.plan(item)
    own = {name: value for name, value in facts.items() if name not in _NOT_IN_NAME}
    own |= {"policy": repr(settings.policy)}
    if modality.load.dtype != EXACT_DTYPE or settings.policy.exactness != "bitwise":
        own |= {"rows": modality.rows}
    title = modality.title_of(item)
    return replace(item, name=image_name(item.seed, title, settings.name, own, modality.suffix))


def _seconds(records: Sequence[Record]) -> str:
    seconds = [record["seconds"] for record in records if "seconds" in record]
    return f", {sum(seconds):.1f} s of sound," if seconds else ""


def _cuts(records: Sequence[Record]) -> list[str]:
    """Notes on utterances that were cut."""
    return [
        f"{each['prompt'][:40]!r} was cut at {each['seconds']:.1f} s; see --max-seconds"
        for each in records
        if not each.get("is_finished", True)
    ]


def open_sound(is_played: bool) -> Any:
    """What opens a place for sound that is heard while it is decoded, of a sample rate.

    Args:
        is_played: by the loudspeaker; else it goes to standard output.
    """
    if is_played:
        return partial(open_loudspeaker, find_loudspeaker())
    check_pipe()
    return open_standard_output


def _listen(items: Sequence[Item], worker: Worker, open_sink: Any) -> None:
    """Speak texts one after the other into a sink; there are no files."""
    records: list[Record] = []
    streams: list[Any] = []
    try:
        with open_sink(worker.pipe.speech.sample_rate) as sink:
            with Reports("utterance", len(items)) as reports:
                for item in items:
                    settings = worker.plan(item)
                    stream = worker.pipe.stream(
                        item.row.prompt, policy=settings.policy, seed=item.seed,
                        **worker.modality.layers, **dict(settings.options),
                    )  # fmt: skip
                    with stream:
                        if not all(sink.write(chunk.waveform) for chunk in stream):
                            break
                    streams.append(stream.stats)
                    made = stream.utterance
                    records.append({"prompt": made.text, **worker.modality.measure(made)})
                    reports.report("item", records[-1])
            if streams:
                stats = add_stats(streams)
                seconds = sum(record["seconds"] for record in records)
                factor = (stats.seconds + stats.pixel_seconds) / seconds if seconds else 0.0
                say(
                    f"{count_of(len(records), 'utterance')}{_seconds(records)} the first after "
                    f"{streams[0].first_audio_seconds:.2f} s, real-time factor {factor:.2f}: "
                    f"{stats.summary}"
                )
            for note in _cuts(records):
                say(f"note: {note}")
    except KeyboardInterrupt:
        count = count_of(len(items), "utterance")
        raise Stopped(f"stopped; {len(records)} of {count} were spoken to their end") from None


def _make_file(flags: Any, modality: Modality) -> tuple[dict[str, Any], int]:
    """Make what a prompt file asks for; returns the facts of the job, and its exit code."""
    file = flags.file
    shard = file.read_shard()
    rows = read_prompts(file.prompt_file)
    folder = modality.out
    past = read_manifests(folder) if folder.is_dir() else Past()
    seed, is_drawn = _choose_seed(rows, past, flags, shard)
    items = make_items(rows, seed, modality.suffix)
    items = items if shard is None else take_shard(items, *shard)
    if not file.resume:
        check_fresh(folder / manifest_name(shard))
    if not file.dry_run:
        open_folder(folder)  # before the model is loaded, which takes long
    executor = _open_executor(file, modality)
    resume_collector()
    if is_drawn and any(row.seed is None for row in rows):
        _say_aside(
            f"seed: {seed}, drawn and noted in the manifest; the same command with --seed {seed} "
            "makes the same again"
        )
    try:
        fingerprint = executor.check(items)
        facts = {"out": str(folder), "seed": seed, "items": len(items)}
        if file.dry_run:
            return _plan(items, fingerprint, past, flags, facts, modality.unit), DONE
        manifest = Manifest(folder / manifest_name(shard))
        try:
            return _finish_file(items, fingerprint, manifest, executor, flags, facts, modality.unit)
        finally:
            manifest.close()
    finally:
        executor.close()


def _choose_seed(
    rows: list[Row], past: Past, flags: Any, shard: tuple[int, int] | None
) -> tuple[int, bool]:
    """The seed of a job, and whether it was drawn.

    Shards, which run on their own and cannot agree on one that is drawn, have 0. So had all jobs
    whose manifests do not note one.
    """
    seed, is_drawn = pick_seed(flags.seed)
    if not is_drawn:
        return seed, False
    if shard is not None:
        return 0, False
    ids = {row.id for row in rows}
    noted = [record for (id, _), record in past.records.items() if id in ids]
    if flags.file.resume and noted:
        return noted[-1].get(JOB_SEED, 0), False
    return seed, True


def _open_executor(file: Any, modality: Modality) -> Executor:
    if file.executor == "local":
        return Worker(modality)
    from mmaccel.batch.ray_executor import RayExecutor

    return RayExecutor(modality, file.actors)


def _missing_of(
    items: list[Item], fingerprint: Any, past: Past, flags: Any, facts: dict[str, Any]
) -> list[Item]:
    """The items to make; `facts` gets the number of the others."""
    folder = flags.out
    if not flags.file.resume:
        check_unknown(items, past, folder)  # in manifests of another number of shards
    missing = find_missing(items, fingerprint, past, folder)
    facts["made_before"] = len(items) - len(missing)
    return missing


def _plan(
    items: list[Item], fingerprint: Any, past: Past, flags: Any, facts: dict[str, Any], unit: str
) -> dict[str, Any]:
    """What a job would make."""
    missing = _missing_of(items, fingerprint, past, flags, facts)
    _say_aside(
        f"{count_of(len(missing), unit)} to generate, {facts['made_before']} finished before, "
        f"in {facts['out']}"
    )
    rows = [{"id": i.row.id, "k": i.k, "seed": i.seed, "file": i.file} for i in missing]
    return {**facts, "to_make": len(missing), "plan": rows}


def _finish_file(
    items: list[Item],
    fingerprint: Any,
    manifest: Manifest,
    executor: Executor,
    flags: Any,
    facts: dict[str, Any],
    unit: str,
) -> tuple[dict[str, Any], int]:
    """Make the missing items under the lock of the manifest."""
    began = time.perf_counter()
    folder, file = flags.out, flags.file
    past = read_manifests(folder)  # another process may have finished items in the meantime
    missing = _missing_of(items, fingerprint, past, flags, facts)
    remove_temporaries(folder, items)
    with Reports(unit, len(missing), file.json_stream) as reports:
        reports.emit("start", **facts)
        for torn in past.torn:
            reports.report("note", f"{torn}: cannot be read; its {unit} is generated again")
        done = [i.key for i in missing if past.records.get(i.key, {}).get("status") == "ok"]
        if done:
            wrong = first_of([past.lines[key] for key in done])
            reports.report("note", f"{wrong}: not the files in {folder}; generated again")
        retries = 1 if file.retries is None else file.retries
        job = Job(fingerprint, manifest, reports.report, retries, file.max_failures, facts["seed"])
        try:
            job.run(missing, executor)
        except KeyboardInterrupt:
            raise Stopped(f"{_summary(job, facts, unit)}; continue with --resume") from None
    without = {item.key for item in missing} - job.finished
    files, lines = find_lost([i for i in items if i.key not in without], fingerprint, folder)
    lost = list(dict.fromkeys(files + lines))
    summary = _summary(job, facts, unit)
    if lost:
        summary += (
            f", but {count_of(len(files), unit)} and {count_of(len(lines), 'record')} of the "
            f"manifest are missing there ({first_of(lost)}): something else changed the folder"
        )
    if job.is_cut:
        summary += f": more than --max-failures {file.max_failures}, so the job ended"
    elif job.failed or lost:
        summary += "; try them again with --resume"
    _say_aside(summary)
    facts |= {"made": len(job.finished), "failed": len(job.failed), "is_cut": job.is_cut}
    facts |= {"missing": len(lost), "manifest": str(manifest.file)}
    facts["seconds"] = round(time.perf_counter() - began, 3)
    if job.is_cut:
        return facts, FATAL
    return facts, WITH_FAILURES if job.failed or lost else DONE


def _describe_error(data: dict[str, Any], code: int, unit: str) -> dict[str, str]:
    """The error of a job that ended, for programs."""
    failed, missing = data["failed"], data["missing"]
    parts = [f"{count_of(failed, 'item')} failed"] if failed else []
    if missing:
        parts.append(f"{count_of(missing, unit)} missing in {data['out']} or in its manifest")
    name = "fatal" if code == FATAL else "failures" if failed else "missing"
    return {"code": name, "message": ", ".join(parts)}


def _summary(job: Job, facts: dict[str, Any], unit: str) -> str:
    text = f"{count_of(len(job.finished), unit)} generated in {facts['out']}"
    text += f", {facts['made_before']} before" if facts["made_before"] else ""
    return text + (f", {len(job.failed)} failed" if job.failed else "")


def _say_aside(text: str) -> None:
    stderr_console().print(text, highlight=False, soft_wrap=True)


class Reports:
    """Progress on stderr, and one JSON event a line on stdout if streaming. Use it as a context
    manager, which shows the bar.

    Args:
        unit: noun for an item.
        total: items of this run.
        is_streaming: whether events go to stdout.
    """

    def __init__(self, unit: str, total: int, is_streaming: bool = False) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._unit = unit
        self._is_streaming = is_streaming
        self._finished = 0
        self._bar = progress_bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            disable=is_streaming and sys.stdout.isatty(),  # events and bar on one screen
        )
        self._task = self._bar.add_task(f"{unit}s", total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def update(self, progress: Any) -> None:
        """Show the state after a pass, a `mmaccel.results.Progress`; a row is a part of an item."""
        length = progress.tokens.shape[1]
        running = sum(n for n in progress.lengths.tolist() if n < length) / length
        self._bar.update(self._task, completed=self._finished + running)

    def report(self, event: str, content: Any) -> None:
        """Show that an item is finished or failed for the last time, with its record, or a note."""
        if event == "note":
            self._bar.console.print(f"note: {content}", highlight=False)
            self.emit(event, text=content)
            return
        self._finished += 1
        self._bar.update(self._task, completed=self._finished)
        if event == "failed":
            name = f"{content['id']}, {self._unit} {content['k']} ({show(content['prompt'])})"
            self._bar.console.print(
                f"failed: {name}: {one_line(content['error'])}", highlight=False
            )
        self.emit(event, item=content)

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
