"""`mmaccel bench --family canvas`: what canvas policies cost and make, a table per model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mmaccel.catalog import find_policy, load, make_policy
from mmaccel.errors import OptionError

SETUPS: dict[str, tuple[str, dict[str, Any]]] = {  # label -> short name, options
    "stepwise": ("stepwise", {}),
    "stepwise halton": ("stepwise", {"order": "halton"}),
    "stepwise left": ("stepwise", {"order": "left"}),
    "lossless-unmask": ("lossless-unmask", {}),
    "lossless-unmask halton": ("lossless-unmask", {"order": "halton"}),
    "lossless-unmask left": ("lossless-unmask", {"order": "left"}),
    "lossless-unmask halton 16": ("lossless-unmask", {"order": "halton", "drafts": 16}),
    "entropy-bounded 0.1": ("entropy-bounded", {"gamma": 0.1}),
    "entropy-bounded 0.5": ("entropy-bounded", {"gamma": 0.5}),
    "entropy-bounded 0.6": ("entropy-bounded", {"gamma": 0.6}),
    "entropy-bounded 0.5 end": ("entropy-bounded", {"gamma": 0.5, "end_threshold": 0.9}),
    "entropy-bounded 1.0": ("entropy-bounded", {"gamma": 1.0}),
    "entropy-bounded 4": ("entropy-bounded", {"gamma": 4.0}),
    "entropy-bounded 16": ("entropy-bounded", {"gamma": 16.0}),
    "entropy-bounded budget 1": ("entropy-bounded", {"budget_nats": 1.0}),
    "threshold 0.9": ("confident-parallel", {"threshold": 0.9}),
    "threshold 0.7": ("confident-parallel", {"threshold": 0.7}),
    "frechet 0.5": ("confident-parallel", {"rule": "frechet", "factor": 0.5}),
    "kl-stable": ("kl-stable", {}),
    "local-leap": ("local-leap", {}),
    "revised-parallel": ("revised-parallel", {}),
    "maskgit 12": ("masked-parallel", {"steps": 12}),
    "halton 12": ("masked-parallel", {"order": "halton", "choose": "first", "choice": 0.0}),
    # by window, on the next-token model of the same pictures, words and picture tokens
    "autoregressive": ("autoregressive", {}),
    "jacobi": ("jacobi", {}),
    "mc-sjd": ("mc-sjd", {}),
}
MODELS = ("toys", "grammar-masked", "scenes-masked")


def bench_canvas(
    model: str, labels: str, count: int, seed: int, batch_size: int, json_file: Path | None
) -> None:
    """Measure and print; the arguments are `mmaccel bench`'s.

    Args:
        model: one of `MODELS`, the folder of a masked model, or "all", which "scenes" (the default
            of the command) also means: it is no masked model.
        labels: keys of `SETUPS` with commas, or "all"; those by window have no row where there is
            no next-token model beside a masked one of pictures, those by `end_threshold` none where
            no token ends a row.
        count: captions, or prompts of each task.
        seed: of the first picture, and of all answers.
        batch_size: pictures made together.
        json_file: where the figures go.

    Raises:
        OptionError: no such model or setup, or none that can run there.
    """
    from mmaccel.commands.machine import describe_machine
    from mmaccel.commands.picture_files import write_whole
    from mmaccel.commands.run_setup import open_folder
    from mmaccel.pipelines.caption_words import read_masked
    from mmaccel.pipelines.picture_models import find_source

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
    policies = by_kind["canvas"]
    rows: list[dict[str, Any]] = []
    for source in sources.values():
        if source is None:
            rows += load("mmaccel.evaluation.canvas_toys:measure_toys")(policies)
        elif read_masked(source) is None:
            measure = load("mmaccel.demo.canvas_measure:measure_text")
            rows += measure(source, policies, count, seed)
        else:
            rows += _pictures(source, policies, by_kind["window"], count, seed, batch_size)
    if not rows:
        raise OptionError(
            f"--policies: expected one that can run on {model}, received {labels}; the others are "
            "for models with an end token or of another kind"
        )
    if json_file is not None:
        report = {
            "command": " ".join(["mmaccel", *sys.argv[1:]]),
            "machine": describe_machine("cpu"),
            "count": count,
            "seed": seed,
            "canvas": rows,
        }
        written = json.dumps(report, indent=1) + "\n"
        write_whole(json_file, lambda path: path.write_text(written, encoding="utf-8"))
    _print(rows)


def pick_setups(labels: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """The setups of a list with commas, or "all".

    Raises:
        OptionError: one there is not.
    """
    wanted = [text.strip() for text in labels.split(",") if text.strip()]
    wanted = list(SETUPS) if labels == "all" else wanted
    unknown = [label for label in wanted if label not in SETUPS]
    if unknown or not wanted:
        raise OptionError(
            f"--policies: expected labels out of {', '.join(SETUPS)}, received "
            f"{', '.join(unknown) or 'none'}; leave it out for all"
        )
    return {label: SETUPS[label] for label in wanted}


def _pictures(
    source: Path, canvas: dict[str, Any], window: dict[str, Any], count: int, seed: int, batch: int
) -> list[Any]:
    from mmaccel.commands.run_setup import open_pipeline
    from mmaccel.pipelines.caption_words import tokenizer_folder

    canvas = {k: p for k, p in canvas.items() if getattr(p, "end_threshold", None) is None}
    make = load("mmaccel.demo.scenes_data:make_captions")
    captions = make(load("mmaccel.demo.scenes_data:EVALUATION_SEED"), range(count))
    measure = load("mmaccel.demo.canvas_measure:measure_pictures")
    rows, beside = [], tokenizer_folder(source)
    for folder, policies in ((source, canvas), (beside, window if beside != source else {})):
        if policies:
            pipe = open_pipeline(str(folder), "cpu")
            rows += measure(pipe, source.name, policies, captions, seed, batch)
    return rows


def _print(rows: list[dict[str, Any]]) -> None:
    from mmaccel.commands.terminal import make_table, wide_console

    known = load("mmaccel.evaluation.canvas_table:SHOWN")
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
