"""`mmaccel generate --prompts`: many images, each once, however often the job is stopped."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import typer

from mmaccel.batch.item import Item, make_items, take_shard
from mmaccel.batch.job import Job, Maker, Outcome, check_unknown, still_to_make
from mmaccel.batch.manifest import Key, Manifest, Past, check_fresh, manifest_name, read_manifests
from mmaccel.batch.prompt_file import read_prompts
from mmaccel.batch.setup import Setup
from mmaccel.batch.temporaries import sweep
from mmaccel.batch.worker import Worker
from mmaccel.commands.batch_options import LOCAL, stopped_by_terminate
from mmaccel.commands.batch_reports import Reports, print_envelope
from mmaccel.commands.collector import wake_collector
from mmaccel.commands.run_setup import open_folder
from mmaccel.commands.terminal import Stopped, stderr_console

DONE, FATAL, WITH_FAILURES = 0, 1, 3


@dataclass(frozen=True)
class Wish:
    """What the command line says of a batch.

    Attributes:
        prompts: file, or `-`.
        setup: model, policy and folder.
        seed: of the job.
        shard: part and number of parts, or None.
        is_resumed, is_dry, is_json, is_streaming: the flags.
        retries, max_failures: see `Job`.
        executor: what makes the images: this process, or Ray's actors.
        actors: of Ray; None chooses.
    """

    prompts: str
    setup: Setup
    seed: int
    shard: tuple[int, int] | None
    is_resumed: bool
    is_dry: bool
    is_json: bool
    is_streaming: bool
    retries: int
    max_failures: int | None
    executor: str = LOCAL
    actors: int | None = None


def run_batch(wish: Wish) -> None:
    """Make the images of a prompt file.

    Raises:
        typer.Exit: with the code of `WITH_FAILURES` or `FATAL` where items failed.
        Stopped: Ctrl-C, or a request to terminate; what was finished is kept.
        OptionError: something is wrong with what was asked, before any work.
    """
    with stopped_by_terminate():
        data, code = _run(wish)
    if wish.is_json or wish.is_streaming:
        name = "fatal" if code == FATAL else "failures"
        message = f"{data.get('failed', 0)} items failed"
        print_envelope(data, {"code": name, "message": message} if code else None)
    if code:
        raise typer.Exit(code)


def _run(wish: Wish) -> tuple[dict[str, Any], int]:
    items = make_items(read_prompts(wish.prompts), wish.seed)
    if wish.shard is not None:
        items = take_shard(items, *wish.shard)
    folder = wish.setup.out
    past = read_manifests(folder) if folder.is_dir() else Past()
    if not wish.is_resumed:
        check_fresh(folder / manifest_name(wish.shard))
    if not wish.is_dry:
        open_folder(folder)  # before a model is loaded for long
    worker = _open(wish)
    wake_collector()
    try:
        return _make(items, past, worker, wish)
    finally:
        worker.close()


def _open(wish: Wish) -> Maker:
    """What makes the images: this process, or Ray's actors."""
    if wish.executor == LOCAL:
        return Worker(wish.setup)
    from mmaccel.batch.ray_maker import RayMaker

    return RayMaker(wish.setup, wish.actors)


def _make(items: list[Item], past: Past, worker: Maker, wish: Wish) -> tuple[dict[str, Any], int]:
    """Check all items, and make what is left of them."""
    folder = wish.setup.out
    recipes = worker.check(items)
    if wish.is_dry:
        left, facts = _left(items, recipes, past, wish)
        return _show_plan(left, facts), DONE
    manifest = Manifest(folder / manifest_name(wish.shard))
    began = time.perf_counter()
    try:
        # another process may have ended while this one loaded its model; nobody writes it now
        left, facts = _left(items, recipes, read_manifests(folder), wish)
        sweep(folder, items)
        with Reports(len(left), is_streaming=wish.is_streaming) as reports:
            reports.tell("start", **facts)
            for torn in past.torn:
                reports.note(f"{torn}: could not be read; what it stood for is made again")
            job = Job(left, recipes, manifest, reports, wish.retries, wish.max_failures)
            try:
                made = job.run(worker)
            except KeyboardInterrupt:
                raise Stopped(_say(job.outcome, facts) + "; go on with --resume") from None
    finally:
        manifest.close()
    facts |= {"made": made.made, "failed": made.failed, "is_cut": made.is_cut}
    facts |= {"manifest": str(manifest.file), "seconds": round(time.perf_counter() - began, 3)}
    _say_to_people(_say(made, facts) + _why(made, wish))
    return facts, FATAL if made.is_cut else WITH_FAILURES if made.failed else DONE


def _left(
    items: list[Item], recipes: dict[Key, str], past: Past, wish: Wish
) -> tuple[list[Item], dict[str, Any]]:
    """What is to be made, and what is said of it."""
    folder = wish.setup.out
    if not wish.is_resumed:
        check_unknown(items, past, folder)  # another number of shards has another manifest
    left = still_to_make(items, recipes, past, folder)
    return left, {
        "out": str(folder),
        "items": len(items),
        "made_before": len(items) - len(left),
    }


def _show_plan(left: list[Item], facts: dict[str, Any]) -> dict[str, Any]:
    _say_to_people(
        f"{len(left)} images to make, {facts['made_before']} made before, in {facts['out']}"
    )
    rows = [{"id": i.row.id, "k": i.k, "seed": i.seed, "file": i.file} for i in left]
    return {**facts, "to_make": len(left), "plan": rows}


def _say(made: Outcome, facts: dict[str, Any]) -> str:
    text = f"{made.made} images made in {facts['out']}"
    text += f", {facts['made_before']} before" if facts["made_before"] else ""
    return text + (f", {made.failed} failed" if made.failed else "")


def _why(made: Outcome, wish: Wish) -> str:
    if made.is_cut:
        return f": more than --max-failures {wish.max_failures}, so the job ended"
    return "; try them again with --resume" if made.failed else ""


def _say_to_people(text: str) -> None:
    stderr_console().print(text, markup=False, highlight=False, soft_wrap=True)
