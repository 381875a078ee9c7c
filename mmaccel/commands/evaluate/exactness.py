"""`mmaccel evaluate exactness`: the guarantees of a policy, checked on a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mmaccel.checks import check_most
from mmaccel.commands import options as shared
from mmaccel.commands.flags import Without, with_flags
from mmaccel.commands.options import PolicyFlags, SizeFlags
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_BATCH, MAX_MEASURED, MAX_SAMPLES
from mmaccel.options import LoadOptions, SamplingOptions, given

_BROKEN = 3  # exit code
_HELP_PROMPTS = "a prompt a line; by default the model's examples"
_HELP_COUNT = "images; prompts repeat; by default 32, or 8 of a model that fills a canvas"
_HELP_FEATURES = "scenes or module:function, for images; by default scenes for that model"


@dataclass(frozen=True, kw_only=True)
class ExactnessFlags:
    """What is compared, on how many images and sequences."""

    prompts: Annotated[Path | None, typer.Option(help=_HELP_PROMPTS)] = None
    count: Annotated[int | None, typer.Option(help=_HELP_COUNT)] = None
    seed: Annotated[
        int,
        typer.Option(help="of the first image; the next has the next", callback=shared.read_seed),
    ] = 0
    batch_size: Annotated[int, typer.Option(help="images generated together")] = 8
    samples: Annotated[int, typer.Option(help="sequences of the toy; 0: no G-test")] = 50_000
    features: Annotated[str | None, typer.Option(help=_HELP_FEATURES)] = None
    decoder: shared.Decoder = None
    json_file: shared.JsonFile = None

    def check(self) -> None:
        """Look at all that can be checked without a model.

        Raises:
            OptionError: a value outside its domain, or a file that cannot be written or read.
        """
        from mmaccel.checks import show
        from mmaccel.commands.evaluate.setup import read_prompts
        from mmaccel.commands.files import check_file

        if self.count is not None:
            shared.check_count("count", self.count, MAX_MEASURED)
        shared.check_count("batch-size", self.batch_size, MAX_BATCH)
        if self.samples and self.samples < 1000:
            raise OptionError(
                f"--samples: expected 0 or at least 1000, received {show(self.samples)}; fewer "
                "have no power"
            )
        check_most("--samples", self.samples, MAX_SAMPLES, "ask for fewer")
        check_file("--json", self.json_file)
        if self.prompts is not None:
            read_prompts(self.prompts)


@with_flags
def exactness(
    model: Annotated[str, typer.Argument(help="demo model, path or hub id")] = "scenes",
    *,
    method: PolicyFlags,
    flags: ExactnessFlags,
    sampling: SamplingOptions,
    sides: SizeFlags,
    load: Annotated[LoadOptions, Without("compile")],
) -> None:
    """Exactness report: greedy tokens, first divergence, batches, distributions. Exit code 3 if a
    guarantee is broken."""
    from mmaccel.commands.evaluate.setup import pick_prompts
    from mmaccel.commands.files import new_report, write_json
    from mmaccel.evaluation.exactness.identity import Check
    from mmaccel.evaluation.exactness.report import Plan, check_all
    from mmaccel.evaluation.quality.features import open_extractor
    from mmaccel.loading import open_pipeline, place
    from mmaccel.pipelines.text_to_image.contact_sheet import make_plain
    from mmaccel.pipelines.text_to_image.model import choose_params

    flags.check()
    # "auto" could compile between the two sides of a comparison
    load = replace(place(load), compile=False)
    method.read()
    features = flags.features or ("scenes" if model in ("scenes", "scenes-masked") else None)
    extract = None
    if features is not None:
        if flags.count == 1 and sampling.temperature != 0:
            raise OptionError(
                f"--count: expected at least 2 to compare features, received {flags.count}; ask "
                "for more"
            )
        extract = open_extractor(features)
    pipe = open_pipeline(model, load, size=sides.join(), decoder=flags.decoder)
    chosen = method.choose(pipe.model.kind)[1]
    params = choose_params(pipe.image_model.params, **given(sampling))
    count = flags.count or (32 if pipe.model.kind == "window" else 8)
    texts = pick_prompts(pipe, model, flags.prompts, count)
    plan = Plan(
        pipe=pipe,
        policy=chosen,
        plain=make_plain(chosen),
        captions=texts,
        seed=flags.seed,
        params=params,
        batch_size=flags.batch_size,
        dtype=load.dtype,
        samples=flags.samples,
        extract=extract,
    )
    checks: list[Check] = []
    report = new_report(
        load.device,
        model=model,
        policy=repr(chosen),
        exactness=chosen.exactness,
        dtype=load.dtype,
        guidance=params.guidance_scale,
        temperature=params.temperature,
        captions=texts,
        seed=flags.seed,
        batch_size=flags.batch_size,
        features=features,
        checks=[],
        broken=[],
    )
    try:
        for check in check_all(plan):
            checks.append(check)
            report["checks"].append(check.to_dict())
            report["broken"] += [check.name] * check.is_broken
            write_json(flags.json_file, report)  # what is known outlives an interrupt
    finally:
        if checks:
            _print(report, checks)
    if report["broken"]:
        raise typer.Exit(_BROKEN)


def _print(report: dict[str, Any], checks: list[Any]) -> None:
    from mmaccel.commands.terminal import make_table, wide_console
    from mmaccel.results import exactness_in

    console = wide_console()
    table = make_table("check", "guaranteed", "holds", "measured", title=report["policy"])
    for check in checks:
        broken = "BROKEN" if check.guaranteed else "no"
        holds = "yes" if check.holds else broken
        table.add_row(check.name, "yes" if check.guaranteed else "no", holds, check.said)
    console.print(table)
    exactness = exactness_in(report["exactness"], report["dtype"])
    names = ", ".join(report["broken"])
    result = f"guarantees broken here: {names}; please report this" if names else "all hold here"
    console.print(f"Guarantee in {report['dtype']}: {exactness}; {result}.")
