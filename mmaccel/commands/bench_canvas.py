"""`mmaccel bench --family canvas`: what canvas policies cost and make, a table per model."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mmaccel.catalog import find_policy, load, make_policy
from mmaccel.commands.canvas_setups import pick_setups
from mmaccel.errors import OptionError

MODELS = ("toys", "grammar-masked", "scenes-masked")


def bench_canvas(
    model: str, labels: str, count: int, seed: int, batch_size: int, json_file: Path | None,
    device: str,
) -> None:  # fmt: skip
    """Measure and print; the arguments are `mmaccel bench`'s.

    Args:
        model: one of `MODELS`, the folder of a masked model, or "all", which "scenes" (the default
            of the command) also means: it is no masked model.
        labels: keys of `mmaccel.commands.canvas_setups.SETUPS` with commas, or "all"; those by
            window have no row where there is no next-token model beside a masked one of images,
            those by `end_threshold` none where no token ends a row.
        count: captions, or prompts of each task.
        seed: of the first image, and of all answers.
        batch_size: images made together.
        json_file: where the figures go.
        device: where models run; the joints are on the processor.

    Raises:
        OptionError: no such model, setup or device, or none that can run there.
        Stopped: in the place of KeyboardInterrupt, with what was measured in the file.
    """
    import torch

    from mmaccel.commands.run_setup import open_folder
    from mmaccel.commands.terminal import Stopped, stderr_console
    from mmaccel.outputs.image_files import write_whole
    from mmaccel.outputs.machine import describe_machine
    from mmaccel.pipelines.loading.sources import check_device
    from mmaccel.pipelines.text_to_image.registry import find_source

    check_device(device, torch.float32)
    chosen, is_all = pick_setups(labels), model in ("all", "scenes")
    if json_file is not None:
        open_folder(json_file.parent, "--json")
    sources: dict[str, Path | None] = {}
    for name in MODELS if is_all else (model,):
        if name == "toys":
            sources[name] = None
            continue
        try:
            sources[name] = find_source(name)
        except OptionError:
            if not is_all:
                raise
    by_kind: dict[str, dict[str, Any]] = {"canvas": {}, "window": {}}
    for label, (short, options) in chosen.items():
        by_kind[find_policy(short).kind][label] = make_policy(short, **options)
    rows: list[dict[str, Any]] = []
    told, is_whole = stderr_console(), False
    report: dict[str, Any] = {
        "command": shlex.join(["mmaccel", *sys.argv[1:]]),
        "machine": describe_machine(device),
        "count": count,
        "seed": seed,
        "canvas": rows,
    }
    try:
        for row in _measure(sources.values(), by_kind, count, seed, batch_size, device):
            rows.append(row)
            told.print(f"{row['policy']}: {row['passes']:.1f} passes, {row['seconds']:.1f} s")
            if json_file is not None:  # whole behind every row, so that nothing measured is lost
                write_whole(json_file, partial(_write, report))
        is_whole = True
    except KeyboardInterrupt:
        pass
    if rows:
        _print(rows)
    if not is_whole:
        raise Stopped(f"stopped; measured {len(rows)} policies, the rest was not")
    if not rows:
        raise OptionError(
            f"--policies: expected one that can run on {model}, received {labels}; the others are "
            "for models with an end token or of another kind"
        )


def refuse_options(given: Mapping[str, bool]) -> None:
    """Refuse options of the bench by window; a setup says all that is measured here.

    Args:
        given: by the option's name whether it was given.

    Raises:
        OptionError: with the first that was.
    """
    for name, was_given in given.items():
        if was_given:
            raise OptionError(
                f"{name}: expected none beside --family canvas, whose setups say all but model, "
                "count, seed, batch size and device; leave it out"
            )


def _write(report: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _measure(
    sources: Iterable[Path | None],
    by_kind: dict[str, dict[str, Any]],
    count: int,
    seed: int,
    batch: int,
    device: str,
) -> Iterator[dict[str, Any]]:
    """Rows as they are made, model by model; None stands for the joints."""
    from mmaccel.pipelines.models.scenes_vocabulary import read_masked

    for source in sources:
        if source is None:
            module = "mmaccel.evaluation.exactness.canvas_enumeration:"
            yield from load(module + "measure_toys")(by_kind["canvas"])
        elif read_masked(source) is None:
            measure = load("mmaccel.demo.canvas_benchmark:measure_text")
            yield from measure(source, by_kind["canvas"], count, seed, device)
        else:
            yield from _images(source, by_kind, count, seed, batch, device)


def _images(
    source: Path, by_kind: dict[str, dict[str, Any]], count: int, seed: int, batch: int, device: str
) -> Iterator[dict[str, Any]]:
    from mmaccel.loading import open_pipeline
    from mmaccel.pipelines.models.scenes_vocabulary import tokenizer_folder

    make = load("mmaccel.demo.scenes.data:make_captions")
    captions = make(load("mmaccel.demo.scenes.data:EVALUATION_SEED"), range(count))
    measure = load("mmaccel.demo.canvas_benchmark:measure_images")
    beside = tokenizer_folder(source)
    canvas = {  # no token ends an image
        label: policy
        for label, policy in by_kind["canvas"].items()
        if getattr(policy, "end_threshold", None) is None
    }
    window = by_kind["window"] if beside != source else {}
    for folder, policies in ((source, canvas), (beside, window)):
        if policies:
            pipe = open_pipeline(str(folder), device)
            yield from measure(pipe, source.name, policies, captions, seed, batch)


def _print(rows: list[dict[str, Any]]) -> None:
    from mmaccel.commands.terminal import make_table, wide_console

    known = load("mmaccel.evaluation.tables:SHOWN")
    console = wide_console()
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        shown = {head: name for head, name in known.items() if name in own[0]["quality"]}
        table = make_table(
            "policy", "passes", "tok/pass", "positions", "nats", "same", *shown, "promise",
            title=model,
        )  # fmt: skip
        for row in own:
            same = "" if row["same"] is None else f"{row['same']}/{row['rows']}"
            table.add_row(
                row["policy"],
                f"{row['passes']:.1f}",
                f"{row['tokens_per_pass']:.2f}",
                f"{row['positions']:.0f}",
                f"{row['nats']:.3f}",
                same,
                *(f"{row['quality'][name]:.3f}" for name in shown.values()),
                row["exactness"],
            )
        console.print(table, "")
    console.print(
        "Means over rows; positions: entries that went into the model; nats: the bound on what "
        "committing several at once cost a row."
    )
