"""The run of `mmaccel generate`, `animate` and `speak`: a few items of the command line, or every
item of a prompt file once, however often the job stops.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Self

import typer

from mmaccel.batch.job import Job, find_missing, remove_temporaries
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
from mmaccel.batch.modalities import Modality
from mmaccel.batch.prompts import Item, Row, make_items, read_prompts, take_shard
from mmaccel.batch.worker import ItemsFailed, Worker
from mmaccel.commands.files import check_folder, first_of, open_folder
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
from mmaccel.outputs.sound_streams import check_standard_output, open_standard_output
from mmaccel.pipelines.call_options import DecodingOptions
from mmaccel.pipelines.text_to_image.model import choose_params
from mmaccel.results import EXACT_DTYPE, Stats, add_stats
from mmaccel.samplers.noise import check_seed
from mmaccel.samplers.sampling_params import SamplingParams

_CODES = {"fatal": 1, "failures": 3}  # of a job that did not do all
_NOT_IN_NAME = ("id", "k", "seed", "model", "versions", "exactness", "policy", "policy_options")


def run(flags: Any) -> None:
    """Make what is asked for; what is done remains. Exit codes 3 and 1: items of a file failed."""
    flags.check()
    set_threads(flags.threads)
    choose_params(SamplingParams(), **given(flags.sampling))
    modality = flags.modality(place(flags.load))
    if flags.file.prompt_file is None:
        _make_few(flags, replace(modality, layers=flags.layer.read(), has_manifest=False))
    elif code := _make_file(flags, modality):
        raise typer.Exit(code)


def _make_few(flags: Any, modality: Modality) -> None:
    """Make the items of the command line, whose files say what they cost."""
    unit, out = modality.unit, modality.out
    seed, is_drawn = pick_seed(flags.seed)
    if flags.stdout:
        check_standard_output()
    else:
        check_folder(out)
    worker = Worker(modality)
    resume_collector()
    items = make_items(flags.ask(worker.pipe, seed), seed, modality.suffix)
    items = [_name(item, worker, len(items)) for item in items]
    check_seed(seed + len(items) - 1)
    if modality.layers:  # before the folder is made
        policy = worker.plan(items[0]).policy
        worker.pipe.choose(DecodingOptions(policy=policy, **modality.layers))
    drawn = seed if is_drawn else None
    if flags.stdout:
        _listen(items, worker, drawn)
        return
    if drawn is not None:
        say_drawn(drawn)
    open_folder(out)
    records: list[Record] = []
    parts: list[Stats] = []
    sheet = Sheet(flags, worker, items) if unit == "image" else None
    look = None if sheet is None else sheet.keep
    try:
        with Reports(unit, len(items) * (1 + flags.compare)) as reports:

            def finish(record: Record) -> None:
                records.append(record)
                reports.report("item", record)

            for part in [items] if sheet is None else sheet.begin(reports):
                parts.append(worker.run_all(part, finish, on_step=reports.update, look=look))
    except KeyboardInterrupt:
        count = count_of(len(items), unit)
        raise Stopped(f"stopped; {len(records)} of {count} are in {out}") from None
    except ItemsFailed as error:
        assert error.__cause__ is not None
        raise error.__cause__ from None
    stats = add_stats(parts)
    what = f"{count_of(len(records), unit)}{_seconds(records)} in {out}"
    if sheet is None:
        say(f"{what}: {stats.summary}")
        say(stats)
    else:
        say(sheet.finish(what, stats))
    _say_notes(records, () if sheet is None else stats.notes)


def _name(item: Item, worker: Worker, count: int) -> Item:
    """An item whose file has a readable name, which differs where anything it depends on does.

    Where results are equal up to rounding only (other formats than float32, acceptances that may
    depend on the last bit) that is also the number of rows, and of items made together.
    """
    facts = worker.describe(item)
    modality = worker.modality
    settings = worker.plan(item)
    hashed = {name: value for name, value in facts.items() if name not in _NOT_IN_NAME}
    hashed |= {"prompt": item.row.prompt.strip(), "policy": repr(settings.policy)}
    if modality.load.dtype != EXACT_DTYPE or settings.policy.exactness != "bitwise":
        hashed |= {"rows": modality.rows, "beside": count if modality.rows > 1 else 1}
    title = modality.title_of(item)
    return replace(item, name=image_name(item.seed, title, settings.name, hashed, modality.suffix))


def _seconds(records: Sequence[Record]) -> str:
    seconds = [record["seconds"] for record in records if "seconds" in record]
    return f", {sum(seconds):.1f} s of sound," if seconds else ""


def _say_notes(records: Sequence[Record], notes: Sequence[str] = ()) -> None:
    """Print notes, and which utterances were cut."""
    cuts = [each for each in records if not each.get("is_finished", True)]
    for note in notes:
        say(f"note: {note}")
    for each in cuts:
        cut = f"{each['prompt'][:40]!r} was cut at {each['seconds']:.1f} s"
        say(f"note: {cut}; see --max-seconds")


def _listen(items: Sequence[Item], worker: Worker, drawn: int | None) -> None:
    """Speak texts one after the other to standard output; there are no files. A seed that was drawn
    is said where the sound does not go."""
    modality, pipe = worker.modality, worker.pipe
    records: list[Record] = []
    streams: list[Any] = []
    try:
        with open_standard_output(pipe.speech.sample_rate) as write:
            if drawn is not None:
                say_drawn(drawn)
            with Reports("utterance", len(items)) as reports:
                for item in items:
                    settings = worker.plan(item)
                    stream = pipe.stream(
                        item.row.prompt, policy=settings.policy, seed=item.seed,
                        **modality.layers, **dict(settings.options),
                    )  # fmt: skip
                    with stream:
                        if not all(write(chunk.waveform) for chunk in stream):
                            break
                    streams.append(stream.stats)
                    made = stream.utterance
                    records.append({"prompt": made.text, **modality.measure(made)})
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
            _say_notes(records)
    except KeyboardInterrupt:
        count = count_of(len(items), "utterance")
        raise Stopped(f"stopped; {len(records)} of {count} were spoken to their end") from None


def _make_file(flags: Any, modality: Modality) -> int:
    """Make what a prompt file asks for, and say what came of it; returns the exit code."""
    file, folder, unit = flags.file, modality.out, modality.unit
    rows = read_prompts(file.prompt_file)
    past = read_manifests(folder) if folder.is_dir() else Past()
    seed, is_drawn = _choose_seed(rows, past, flags)
    items = make_items(rows, seed, modality.suffix)
    items = take_shard(items, *file.shard) if file.shard else items
    manifest_file = folder / manifest_name(file.shard)
    if not file.resume:
        check_fresh(manifest_file)
    if not file.dry_run:
        check_folder(folder)  # before the model is loaded, which takes long
    worker = Worker(modality)
    resume_collector()
    facts: dict[str, Any] = {"out": str(folder), "seed": seed, "items": len(items)}
    error = None
    fingerprint = worker.check(items)
    if is_drawn and any(row.seed is None for row in rows):
        noted = "drawn" if file.dry_run else "drawn and noted in the manifest"
        again = f"the same command with --seed {seed} makes the same again"
        _say_aside(f"seed: {seed}, {noted}; {again}")
    if file.dry_run:
        missing = find_missing(items, fingerprint, past, folder, file.resume)
        facts |= {"made_before": len(items) - len(missing), "to_make": len(missing)}
        facts["plan"] = [
            {"id": item.row.id, "k": item.k, "seed": item.seed, "file": item.file}
            for item in missing
        ]
        made = f"{count_of(len(missing), unit)} to generate"
        _say_aside(f"{made}, {facts['made_before']} finished before, in {folder}")
    else:
        open_folder(folder)  # rows that are refused leave none
        with closing(Manifest(manifest_file)) as manifest:
            error = _finish_file(items, fingerprint, manifest, worker, flags, facts, unit)
    if file.as_json or file.json_stream:
        print_envelope(facts, error)
    return _CODES[error["code"]] if error else 0


def _choose_seed(rows: list[Row], past: Past, flags: Any) -> tuple[int, bool]:
    """The seed of a job, and whether it was drawn; shards, which cannot agree on one, and jobs
    whose manifests note none have 0.
    """
    seed, is_drawn = pick_seed(flags.seed)
    if not is_drawn:
        return seed, False
    if flags.file.shard:
        return 0, False
    ids = {row.id for row in rows}
    noted = [record for (id, _), record in past.records.items() if id in ids]
    if flags.file.resume and noted:
        return noted[-1].get(JOB_SEED, 0), False
    return seed, True


def _finish_file(
    items: list[Item],
    fingerprint: Any,
    manifest: Manifest,
    worker: Worker,
    flags: Any,
    facts: dict[str, Any],
    unit: str,
) -> dict[str, str] | None:
    """Make the missing items under the manifest's lock; says why the job did not do all."""
    began = time.perf_counter()
    folder, file = flags.out, flags.file
    past = read_manifests(folder)  # another process may have finished items in the meantime
    missing = find_missing(items, fingerprint, past, folder, file.resume)
    before = facts["made_before"] = len(items) - len(missing)
    remove_temporaries(folder, items)

    def say_made() -> str:
        text = f"{count_of(job.finished, unit)} generated in {folder}"
        text += f", {before} before" if before else ""
        return text + (f", {len(job.failed)} failed" if job.failed else "")

    with Reports(unit, len(missing), file.json_stream) as reports:
        reports.emit("start", **facts)
        for torn in past.torn:
            reports.report("note", f"{torn}: cannot be read; its {unit} is generated again")
        done = [i.file for i in missing if past.records.get(i.key, {}).get("status") == "ok"]
        if done:
            reports.report("note", f"{first_of(done)}: not the files in {folder}; generated again")
        limits = file.retries, file.max_failures
        job = Job(fingerprint, manifest, reports.report, *limits, facts["seed"])
        try:
            job.run(missing, worker)
        except KeyboardInterrupt:
            raise Stopped(f"{say_made()}; continue with --resume") from None
    summary, code = say_made(), ""
    if job.is_cut:
        code = "fatal"
        summary += f": more than --max-failures {file.max_failures}, so the job ended"
    elif job.failed:
        code = "failures"
        summary += "; try them again with --resume"
    _say_aside(summary)
    facts |= {"made": job.finished, "failed": len(job.failed), "is_cut": job.is_cut}
    seconds = round(time.perf_counter() - began, 3)
    facts |= {"manifest": str(manifest.file), "seconds": seconds}
    return {"code": code, "message": summary} if code else None


def _say_aside(text: str) -> None:
    stderr_console().print(text, highlight=False, soft_wrap=True)


class Reports:
    """Progress on stderr, and one JSON event a line on stdout if streaming; a bar of `unit`s."""

    def __init__(self, unit: str, total: int, is_streaming: bool = False) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as Left

        self._unit, self._is_streaming = unit, is_streaming
        self._finished, self._total = 0, total
        self._bar = progress_bar(
            *("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
            *("left", Left()),
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
        self._bar.update(self._task, completed=min(self._finished + running, self._total))

    def report(self, event: str, content: Any) -> None:
        """Show that an item is finished or failed for the last time, with its record, or a note."""
        if event == "note":
            self._bar.console.print(f"note: {content}", highlight=False, soft_wrap=True)
            self.emit(event, text=content)
            return
        self._finished += 1
        self._bar.update(self._task, completed=self._finished)
        if event == "failed":
            name = f"{content['id']}, {self._unit} {content['k']} ({content['prompt'][:60]!r})"
            self._bar.console.print(
                f"failed: {name}: {one_line(content['error'])}", highlight=False
            )
        self.emit(event, item=content)

    def emit(self, event: str, **facts: Any) -> None:
        if not self._is_streaming:
            return
        print(json.dumps({"event": event, **facts}))
        error = stdout_error()
        if error is not None:
            raise WriteError(
                f"--json-stream: expected a reader of stdout, received: {error.strerror}; the "
                f"{self._unit}s in the manifest are complete, continue with --resume"
            )
