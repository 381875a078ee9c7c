"""`mmaccel bench --family canvas`: cost and quality of canvas policies, a table per model.

`SETUPS` lists what "all" measures, by label. A short name of the catalog is a label too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mmaccel.catalog import find_policy, make_policy, policy_names
from mmaccel.commands.bench.flags import ImageFlags
from mmaccel.commands.files import new_report, open_folder, write_json
from mmaccel.commands.process import Stopped
from mmaccel.commands.terminal import make_table, stderr_console, wide_console
from mmaccel.errors import OptionError
from mmaccel.own_code import TypedName, is_module_name

_HEADS = ("passes", "canvases", "tok/pass", "of oracle", "positions", "seconds", "nats", "same")
MODELS = ("toys", "grammar-masked", "scenes-masked")
SETUPS: dict[str, tuple[str, dict[str, Any]]] = {  # label -> short name, options
    "stepwise": ("stepwise", {"order": "confidence"}),
    "stepwise halton": ("stepwise", {"order": "halton"}),
    "stepwise left": ("stepwise", {"order": "left"}),
    "lossless-unmask": ("lossless-unmask", {"order": "confidence", "drafts": 8}),
    "lossless-unmask halton": ("lossless-unmask", {"order": "halton", "drafts": 8}),
    "lossless-unmask left": ("lossless-unmask", {"order": "left", "drafts": 8}),
    "lossless-unmask auto": ("lossless-unmask", {}),
    "lossless-unmask halton 16": ("lossless-unmask", {"order": "halton", "drafts": 16}),
    "entropy-bounded auto": ("entropy-bounded", {}),
    "entropy-bounded 0.1": ("entropy-bounded", {"gamma": 0.1}),
    "entropy-bounded 0.5": ("entropy-bounded", {"gamma": 0.5}),
    "entropy-bounded 0.5 cut": (
        "entropy-bounded",
        {"gamma": 0.5, "end_threshold": 0.9, "drop_suffix": True},
    ),
    "entropy-bounded 0.57": ("entropy-bounded", {"gamma": 0.57}),
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
    # window policies, on the next-token model with the same vocabulary
    "autoregressive": ("autoregressive", {}),
    "jacobi": ("jacobi", {}),
    "mc-sjd": ("mc-sjd", {}),
}


def bench_canvas(images: ImageFlags, labels: str, device: str) -> None:
    """Measure and print; the arguments are those of `mmaccel bench`.

    Args:
        images: `model` is one of `MODELS`, the folder of a masked model, or "all". "scenes", the
            default of the command, is not a masked model and means "all" too. `count` is the number
            of prompts, for text models of each task.
        labels: keys of `SETUPS` or short names of canvas policies, with commas; or "all". Window
            policies need a next-token model next to a masked image model, and those with
            `end_threshold` a token that ends a row.
        device: of the models; the toys run on the CPU.

    Raises:
        OptionError: no such model, setup or device, or no setup that can run there.
        Stopped: Ctrl-C; the file has what was measured.
    """
    import torch

    from mmaccel.evaluation.parallelism import summarize
    from mmaccel.pipelines.loading.placement import choose_placement
    from mmaccel.pipelines.text_to_image.registry import find_source

    device = str(choose_placement(device, torch.float32)[0])
    model = images.model
    json_file = images.json_file
    chosen = _pick_setups(labels)
    is_all = model in ("all", "scenes")
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
        by_kind[find_policy(short).slot][label] = make_policy(short, **options)
    rows: list[dict[str, Any]] = []
    report = new_report(device, count=images.count, seed=images.seed, canvas=rows)
    console = stderr_console()
    is_whole = False
    try:
        for row in _measure(sources.values(), by_kind, images, device):
            rows.append(row)
            console.print(f"{row['policy']}: {row['passes']:.1f} passes, {row['seconds']:.1f} s")
            report["parallelism"] = summarize(rows)
            write_json(json_file, report)  # after every row, so that no measurement is lost
        is_whole = True
    except KeyboardInterrupt:
        pass
    if rows:
        _print(rows)
    if not is_whole:
        raise Stopped(f"stopped; measured {len(rows)} of the policies")
    if not rows:
        raise OptionError(
            f"--policies: expected one that can run on {model}, received {labels}; the others are "
            "for models with an end token or of another kind"
        )


def _pick_setups(labels: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """The setups of a list with commas, or "all". A short name has its policy's defaults.

    Raises:
        OptionError: an unknown label, or none.
    """
    wanted = [text.strip() for text in labels.split(",") if text.strip()]
    wanted = list(SETUPS) if labels == "all" else wanted
    known: dict[str, tuple[str, dict[str, Any]]] = {
        name: (name, {}) for name in policy_names("canvas")
    } | SETUPS
    known |= {label: (TypedName(label), {}) for label in wanted if is_module_name(label)}
    unknown = [label for label in wanted if label not in known]
    if unknown or not wanted:
        raise OptionError(
            f"--policies: expected labels out of {', '.join(known)}, received "
            f"{', '.join(unknown) or 'none'}; leave it out for all"
        )
    return {label: known[label] for label in wanted}


def _measure(
    sources: Iterable[Path | None],
    by_kind: dict[str, dict[str, Any]],
    images: ImageFlags,
    device: str,
) -> Iterator[dict[str, Any]]:
    """Rows of the report, model by model; the source None stands for the toys."""
    from mmaccel.demo.canvas_benchmark import measure_text
    from mmaccel.evaluation.exactness.canvas_enumeration import measure_toys
    from mmaccel.pipelines.models.scenes_vocabulary import read_masked

    for source in sources:
        if source is None:
            yield from measure_toys(by_kind["canvas"])
        elif read_masked(source) is None:
            yield from measure_text(source, by_kind["canvas"], images.count, images.seed, device)
        else:
            yield from _images(source, by_kind, images, device)


def _images(
    source: Path, by_kind: dict[str, dict[str, Any]], images: ImageFlags, device: str
) -> Iterator[dict[str, Any]]:
    from mmaccel.demo.canvas_benchmark import measure_images
    from mmaccel.demo.scenes.data import EVALUATION_SEED, make_captions
    from mmaccel.loading import open_pipeline
    from mmaccel.options import LoadOptions
    from mmaccel.pipelines.models.scenes_vocabulary import tokenizer_folder

    prompts = make_captions(EVALUATION_SEED, range(images.count))
    window_folder = tokenizer_folder(source)
    canvas = {  # no token ends an image
        label: policy
        for label, policy in by_kind["canvas"].items()
        if getattr(policy, "end_threshold", None) is None
    }
    window = by_kind["window"] if window_folder != source else {}
    for folder, policies in ((source, canvas), (window_folder, window)):
        if policies:
            pipe = open_pipeline(str(folder), LoadOptions(device=device))
            yield from measure_images(
                pipe, source.name, policies, prompts, images.seed, images.batch_size
            )


def _print(rows: list[dict[str, Any]]) -> None:
    from mmaccel.evaluation.parallelism import summarize
    from mmaccel.evaluation.tables import SHOWN

    console = wide_console()
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        shown = {head: name for head, name in SHOWN.items() if name in own[0]["quality"]}
        table = make_table("policy", *_HEADS, *shown, "exactness", title=model)
        for row in own:
            same = "" if row["same"] is None else f"{row['same']}/{row['rows']}"
            table.add_row(
                row["policy"],
                f"{row['passes']:.1f}",
                f"{row['canvases']:.1f}",
                f"{row['tokens_per_pass']:.2f}",
                _percent(row.get("oracle_share")),
                f"{row['positions']:.0f}",
                f"{row['seconds'] / row['rows']:.2f}",
                f"{row['nats']:.3f}",
                same,
                *(f"{row['quality'][name]:.3f}" for name in shown.values()),
                row["exactness"],
            )
        console.print(table, "")
    summary = summarize(rows)
    if summary:
        table = make_table("model", "policy", "AUP", "settings")
        for each in summary:
            count = str(len(each["points"]))
            table.add_row(each["model"], each["policy"], f"{each['aup']:.0f}", count)
        console.print(table, "")
    console.print(
        "Means over rows; canvases: those of all passes, drafts and guidance counted; positions: "
        "tokens that the model processed; nats: bound on the divergence of a row from committing "
        "several tokens at once; of oracle: tokens a pass, as a share of those of a rule that "
        "knows stepwise decoding's tokens; AUP: accuracy under parallelism of a policy's settings."
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"
