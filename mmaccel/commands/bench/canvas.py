"""`mmaccel bench --family canvas`: cost and quality of canvas policies, a table per model.

`SETUPS` lists what "all" measures, by label. A short name of the catalog is a label too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmaccel.catalog import POLICIES, make_policy, policy_names, read_named
from mmaccel.errors import OptionError
from mmaccel.own_code import TypedName, is_module_name

MODELS = ("grammar-masked", "scenes-masked")
SETUPS = {  # label -> policy
    "stepwise": "stepwise:order=confidence",
    "stepwise halton": "stepwise:order=halton",
    "stepwise left": "stepwise:order=left",
    "lossless-unmask": "lossless-unmask:order=confidence:drafts=8",
    "lossless-unmask halton": "lossless-unmask:order=halton:drafts=8",
    "lossless-unmask left": "lossless-unmask:order=left:drafts=8",
    "lossless-unmask auto": "lossless-unmask",
    "lossless-unmask halton 16": "lossless-unmask:order=halton:drafts=16",
    "entropy-bounded auto": "entropy-bounded",
    "entropy-bounded 0.1": "entropy-bounded:gamma=0.1",
    "entropy-bounded 0.5": "entropy-bounded:gamma=0.5",
    "entropy-bounded 0.5 cut": "entropy-bounded:gamma=0.5:end_threshold=0.9:drop_suffix=True",
    "entropy-bounded 0.57": "entropy-bounded:gamma=0.57",
    "entropy-bounded 0.6": "entropy-bounded:gamma=0.6",
    "entropy-bounded 0.5 end": "entropy-bounded:gamma=0.5:end_threshold=0.9",
    "entropy-bounded 1.0": "entropy-bounded:gamma=1.0",
    "entropy-bounded 4": "entropy-bounded:gamma=4.0",
    "entropy-bounded 16": "entropy-bounded:gamma=16.0",
    "entropy-bounded budget 1": "entropy-bounded:budget_nats=1.0",
    "threshold 0.9": "confident-parallel:threshold=0.9",
    "threshold 0.7": "confident-parallel:threshold=0.7",
    "frechet 0.5": "confident-parallel:rule=frechet:factor=0.5",
    "kl-stable": "kl-stable",
    "local-leap": "local-leap",
    "revised-parallel": "revised-parallel",
    "maskgit 12": "masked-parallel:steps=12",
    "halton 12": "masked-parallel:order=halton:choose=first:choice=0.0",
    # window policies, on the next-token model with the same vocabulary
    "autoregressive": "autoregressive",
    "jacobi": "jacobi",
    "mc-sjd": "mc-sjd",
}


def bench_canvas(flags: Any) -> None:
    """Measure and print.

    Args:
        flags: a `mmaccel.commands.bench.Bench`. `model` is one of `MODELS`, the folder of a masked
            model, or "all", as which "scenes", the default of the command, counts too. `count` is
            the number of prompts, for text models of each task. Window policies need a next-token
            model next to a masked image model, and those with `end_threshold` a token that ends a
            row.

    Raises:
        OptionError: no such model, setup or device, or no setup that can run there.
        Stopped: Ctrl-C; the file has what was measured.
    """
    import torch

    from mmaccel.commands.files import new_report, write_json
    from mmaccel.commands.process import Stopped
    from mmaccel.commands.terminal import stderr_console
    from mmaccel.evaluation.parallelism import summarize
    from mmaccel.pipelines.loading.placement import choose_placement
    from mmaccel.pipelines.text_to_image.registry import find_source

    device = str(choose_placement(flags.load.device, torch.float32)[0])
    policies = pick_setups([] if flags.policies in (None, "all") else flags.split("policies", ""))
    is_all = flags.model in ("all", "scenes")
    sources = [find_source(name) for name in (MODELS if is_all else (flags.model,))]
    rows: list[dict[str, Any]] = []
    report = new_report(device, count=flags.count, seed=flags.seed, canvas=rows)
    try:
        for row in measure_models(sources, policies, flags, device):
            rows.append(row)
            stderr_console().print(
                f"{row['policy']}: {row['passes']:.1f} passes, {row['seconds']:.1f} s"
            )
            report["parallelism"] = summarize(rows)
            write_json(flags.json_file, report)  # after every row, so that no measurement is lost
    except KeyboardInterrupt:
        _print(rows)
        raise Stopped(f"stopped; measured {len(rows)} of the policies") from None
    if not rows:
        raise OptionError(
            f"--policies: expected one that can run on {flags.model}, received {flags.policies}; "
            "the others are for models with an end token or of another kind"
        )
    _print(rows)


def pick_setups(wanted: Sequence[str]) -> dict[str, Any]:
    """Policies by label; of no labels: all.

    Raises:
        OptionError: an unknown label.
    """
    known = {name: name for name in policy_names("canvas")} | SETUPS
    wanted = wanted or [*SETUPS]
    known |= {label: label for label in wanted if is_module_name(label)}
    unknown = [label for label in wanted if label not in known]
    if unknown:
        raise OptionError(
            f"--policies: expected labels out of {', '.join(known)}, received "
            f"{', '.join(unknown)}; leave it out for all"
        )
    named = {label: read_named("--policies", TypedName(known[label]), POLICIES) for label in wanted}
    return {label: make_policy(name, **options) for label, (name, options) in named.items()}


def measure_models(
    sources: Iterable[Path], policies: Mapping[str, Any], flags: Any, device: str
) -> Iterator[dict[str, Any]]:
    """Rows of the report, model by model."""
    from mmaccel.demo.canvas_benchmark import measure_images, measure_text
    from mmaccel.demo.scenes.data import EVALUATION_SEED, make_captions
    from mmaccel.loading import open_pipeline
    from mmaccel.options import LoadOptions
    from mmaccel.pipelines.models.scenes_vocabulary import read_masked, tokenizer_folder

    window: dict[str, Any] = {}
    canvas: dict[str, Any] = {}
    for label, policy in policies.items():
        own = window if getattr(policy, "kind", "window") == "window" else canvas
        own[label] = policy
    for source in sources:
        if read_masked(source) is None:
            yield from measure_text(source, canvas, flags.count, flags.seed, device)
            continue
        prompts = make_captions(EVALUATION_SEED, range(flags.count))
        unending = {  # no token ends an image
            label: policy
            for label, policy in canvas.items()
            if getattr(policy, "end_threshold", None) is None
        }
        beside = tokenizer_folder(source)
        for folder, own in ((source, unending), (beside, window if beside != source else {})):
            if own:
                pipe = open_pipeline(str(folder), LoadOptions(device=device))
                yield from measure_images(
                    pipe, source.name, own, prompts, flags.seed, flags.batch_size
                )


_COLUMNS = {
    "policy": "{policy}",
    "passes": "{passes:.1f}",
    "canvases": "{canvases:.1f}",
    "tok/pass": "{tokens_per_pass:.2f}",
    "of oracle": "{oracle_share:.0%}",
    "positions": "{positions:.0f}",
    "seconds": "{seconds:.2f}",
    "nats": "{nats:.3f}",
    "same": "{same} of {rows}",
}


def _print(rows: list[dict[str, Any]]) -> None:
    from mmaccel.commands.terminal import print_rows, say
    from mmaccel.evaluation.parallelism import summarize
    from mmaccel.evaluation.tables import SHOWN

    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        quality = {
            head: f"{{quality[{name}]:.3f}}"
            for head, name in SHOWN.items()
            if name in own[0]["quality"]
        }
        print_rows(model, _COLUMNS | quality | {"exactness": "{exactness}"}, own)
    heads = {"model": "{model}", "policy": "{policy}", "AUP": "{aup:.0f}"}
    print_rows("accuracy under parallelism", heads, summarize(rows))
    say(
        "Means over rows, but seconds; canvases: of all passes, drafts and guidance counted; nats: "
        "bound on a row's divergence from committing several tokens at once; of oracle: tokens a "
        "pass, as a share of those of a rule that knows stepwise decoding's tokens."
    )
