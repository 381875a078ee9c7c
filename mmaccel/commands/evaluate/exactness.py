"""`mmaccel evaluate exactness`: the guarantees of a policy, checked on a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mmaccel.checks import check_most
from mmaccel.commands import options as shared
from mmaccel.commands.evaluate.setup import NewTokens
from mmaccel.commands.flags import Without, with_flags
from mmaccel.commands.options import PolicyFlags, SizeFlags
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_BATCH, MAX_MEASURED, MAX_SAMPLES
from mmaccel.options import LoadOptions, SamplingOptions, given

_BROKEN = 3  # exit code
_TEXT_POLICIES = ("jacobi", "prompt-lookup")  # where none is named
_HELP_PROMPTS = "a prompt a line; by default the model's examples"
_HELP_COUNT = (
    "images or texts; prompts repeat; by default 32 images, or 8 of a model that fills a canvas, "
    "and each text once"
)
_HELP_FEATURES = "scenes or module:function, for images; by default scenes for that model"


@dataclass(frozen=True, kw_only=True)
class ExactnessFlags:
    """What is compared, on how many images or texts, and sequences."""

    prompts: Annotated[Path | None, typer.Option(help=_HELP_PROMPTS)] = None
    count: Annotated[int | None, typer.Option(help=_HELP_COUNT)] = None
    seed: Annotated[
        int,
        typer.Option(help="of the first row; the next has the next", callback=shared.read_seed),
    ] = 0
    batch_size: Annotated[int, typer.Option(help="rows generated together")] = 8
    max_new_tokens: NewTokens = None
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
        if self.max_new_tokens is not None:
            shared.check_count("max-new-tokens", self.max_new_tokens, MAX_MEASURED)
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
    model: Annotated[
        str, typer.Argument(help="of images or a causal LM: a name, path or hub id")
    ] = "scenes",
    *,
    method: PolicyFlags,
    flags: ExactnessFlags,
    sampling: SamplingOptions,
    sides: SizeFlags,
    load: Annotated[LoadOptions, Without("compile")],
) -> None:
    """Exactness report: greedy tokens, first divergence, batches, distributions. Exit code 3 if a
    guarantee is broken."""
    from mmaccel.commands.evaluate.setup import open_measured, pick_prompts
    from mmaccel.commands.files import new_report, write_json
    from mmaccel.commands.terminal import watch
    from mmaccel.evaluation.exactness.identity import Check
    from mmaccel.evaluation.exactness.report import Plan, check_all
    from mmaccel.evaluation.quality.features import open_extractor
    from mmaccel.evaluation.speed.transformers_baseline import BaselineDecoding
    from mmaccel.evaluation.texts import ContinuedTexts
    from mmaccel.loading import place
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
    pipe = open_measured(
        model,
        load,
        max_new_tokens=flags.max_new_tokens,
        size=sides.join(),
        decoder=flags.decoder,
        features=features,
        guidance_scale=sampling.guidance_scale,
    )
    is_text = isinstance(pipe.image_model, ContinuedTexts)
    params = choose_params(pipe.image_model.params, **given(sampling))
    if params.temperature == 0 and sampling.temperature is None:
        params = replace(params, temperature=1.0)  # greedy tokens have a check of their own
    count = flags.count
    if not is_text:
        count = count or (32 if pipe.model.kind == "window" else 8)
    texts = pick_prompts(pipe, model, flags.prompts, count)
    is_open = is_text and method.policy is None and not method.fields()
    names = _TEXT_POLICIES if is_open else (method.policy,)
    policies = [replace(method, policy=name).choose(pipe.model.kind)[1] for name in names]
    report = new_report(
        load.device,
        model=model,
        policy=", ".join(map(repr, policies)),
        exactness=", ".join(policy.exactness for policy in policies),
        dtype=load.dtype,
        guidance=params.guidance_scale,
        temperature=params.temperature,
        captions=texts,
        seed=flags.seed,
        batch_size=flags.batch_size,
        max_new_tokens=pipe.length if is_text else None,
        features=features,
        checks=[],
        broken=[],
    )
    plain_runs: dict[Any, Any] = {}
    for policy in policies:
        plan = Plan(
            pipe=pipe,
            policy=policy,
            plain=make_plain(policy),
            captions=texts,
            seed=flags.seed,
            params=params,
            batch_size=flags.batch_size,
            dtype=load.dtype,
            samples=flags.samples,
            extract=extract,
            library=BaselineDecoding(pipe, "transformers", texts) if is_text else None,
            plain_runs=plain_runs,
        )
        checks: list[Check] = []
        try:
            for check in watch(check_all(plan), None, f"checking {type(policy).__name__}"):
                checks.append(check)
                report["checks"].append({"policy": repr(policy), **check.to_dict()})
                report["broken"] += [check.name] * check.is_broken
                write_json(flags.json_file, report)  # what is known outlives an interrupt
        finally:
            if checks:
                _print(policy, load.dtype, checks)
    if report["broken"]:
        raise typer.Exit(_BROKEN)


def _print(policy: Any, dtype: str, checks: list[Any]) -> None:
    from mmaccel.commands.terminal import make_table, wide_console
    from mmaccel.results import exactness_in

    console = wide_console()
    table = make_table("check", "guaranteed", "holds", "measured", title=repr(policy))
    for check in checks:
        broken = "BROKEN" if check.guaranteed else "no"
        holds = "yes" if check.holds else broken
        table.add_row(check.name, "yes" if check.guaranteed else "no", holds, check.said)
    console.print(table)
    exactness = exactness_in(policy.exactness, dtype)
    names = ", ".join(check.name for check in checks if check.is_broken)
    result = f"guarantees broken here: {names}; please report this" if names else "all hold here"
    console.print(f"Guarantee in {dtype}: {exactness}; {result}.")
