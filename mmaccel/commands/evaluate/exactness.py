"""`mmaccel evaluate exactness`: the guarantees of a policy, or of a caller's own loop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from mmaccel.checks import check_int
from mmaccel.commands import options as shared
from mmaccel.commands.evaluate.setup import TextFlags
from mmaccel.commands.flags import Without, as_command
from mmaccel.commands.options import PolicyFlags
from mmaccel.commands.terminal import print_rows, say, watch
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_BATCH, MAX_MEASURED, MAX_SAMPLES
from mmaccel.options import LoadOptions, given, option

_BROKEN = 3  # exit code
_TEXT_POLICIES = ("jacobi", "prompt-lookup")  # where none is named
_HELP_COUNT = (
    "images or texts; prompts repeat; by default 32 images, or 8 of a model that fills a canvas, "
    "and each text once"
)
_HELP_FEATURES = "scenes or module:function, for images; by default scenes for that model"
_HELP_GENERATE = (
    "module:function, a loop of your own to test instead of a policy: from the prompt's tokens (of "
    "--reference: its text) and a seed to the new tokens; that module's code is run"
)
_HELP_REFERENCE = (
    "module:function, what --generate is held against; by default the plain loop on MODEL; that "
    "module's code is run"
)


@dataclass(frozen=True, kw_only=True)
class Exactness(TextFlags):
    """Exactness report: greedy tokens, first divergence, batches, distributions; or whether a loop
    of your own is lossless (--generate). Exit code 3 if a guarantee is broken."""

    method: PolicyFlags
    generate: str | None = option(None, _HELP_GENERATE)
    reference: str | None = option(None, _HELP_REFERENCE)
    count: int | None = option(None, _HELP_COUNT)
    batch_size: int = option(8, "rows generated together")
    samples: int = option(50_000, "sequences of the toy, or of --generate; 0: no G-test")
    features: str | None = option(None, _HELP_FEATURES)
    json_file: shared.JsonFile = None
    load: Annotated[LoadOptions, Without("compile")]

    def check(self) -> None:
        """Look at all that can be checked without a model.

        Raises:
            OptionError: a value outside its domain, or a file that cannot be written or read.
        """
        from mmaccel.commands.files import check_file

        if self.count is not None:
            shared.check_count("count", self.count, MAX_MEASURED)
        shared.check_count("batch-size", self.batch_size, MAX_BATCH)
        least = 1000 if self.samples or self.generate else 0
        check_int("--samples", self.samples, least, MAX_SAMPLES, hint="fewer have no power")
        check_file("--json", self.json_file)
        self.check_texts()
        self.method.read()
        if self.reference is not None and self.generate is None:
            raise OptionError(
                "--reference: expected --generate with it, received none; name your loop there"
            )

    def run(self) -> None:
        """Check, write after each check, and print."""
        from mmaccel.loading import place

        self.check()
        # "auto" could compile between the two sides of a comparison
        load = replace(place(self.load), compile=False)
        own = self.generate
        report = self.run_policies(load) if own is None else self.run_own(own, load)
        if report["broken"]:
            raise typer.Exit(_BROKEN)

    def run_own(self, name: str, load: LoadOptions) -> dict[str, Any]:
        """The report on a caller's loop."""
        from mmaccel.evaluation.exactness.own_loop import compare_loops, draw_by, draw_plain
        from mmaccel.evaluation.quality.features import load_callable
        from mmaccel.pipelines.text_to_image.contact_sheet import make_plain

        loop = load_callable(name, "--generate", items="tokens of a prompt")
        fields = self.method.fields() or None
        named = {"--policy": self.method.policy, "--set": fields, "--features": self.features}
        shared.refuse(named, "with --generate")
        model: str | None = self.model
        if self.reference is not None:
            drawn = {f"--{option}": value for option, value in given(self.sampling).items()}
            shared.refuse(drawn, "with --reference, whose loops draw by themselves")
            model = None
            texts = self.read_prompts() or [""]
            length = self.max_new_tokens or 64
            other = load_callable(self.reference, "--reference", items="characters of a prompt")
            draw = draw_by(loop, "--generate", texts, length)
            reference = draw_by(other, "--reference", texts, length)
            facts: dict[str, Any] = {"reference": self.reference}
        else:
            pipe, params, texts = self.open(load, self.count)
            if params.temperature == 0 and self.sampling.temperature is None:
                params = replace(params, temperature=1.0)
            texts = list(dict.fromkeys(texts))
            ends = getattr(pipe.image_model, "ends", ())
            prompts = [pipe.image_model.encode(text) for text in texts]
            length = pipe.length
            draw = draw_by(loop, "--generate", prompts, length, ends)
            plain = make_plain(self.method.choose(pipe.model.kind)[1])
            reference = draw_plain(pipe, plain, params, texts, self.batch_size, ends)
            facts = {"reference": f"the plain loop on {self.model}", "params": repr(params)}

        facts |= {"policy": name, "captions": texts, "checks": [], "broken": []}
        facts |= {"samples": self.samples, "max_new_tokens": length}
        report = self.begin(load, **facts) | {"model": model}
        checks = compare_loops(draw, reference, len(texts), self.samples, self.seed)
        title = f"{name} against {facts['reference']}"
        self.tell(report, checks, name, title, f"guarantee of {name}: lossless")
        return report

    def run_policies(self, load: LoadOptions) -> dict[str, Any]:
        """The report on policies of this library."""
        from mmaccel.evaluation.exactness.identity import Plan
        from mmaccel.evaluation.exactness.report import check_all
        from mmaccel.evaluation.quality.features import open_extractor
        from mmaccel.evaluation.transformers_baseline import BaselineDecoding
        from mmaccel.pipelines.text_to_image.contact_sheet import make_plain
        from mmaccel.results import exactness_in

        is_scenes = self.model in ("scenes", "scenes-masked")
        features = self.features or ("scenes" if is_scenes else None)
        if features is not None and self.count == 1 and self.sampling.temperature != 0:
            raise OptionError(
                f"--count: expected at least 2 to compare features, received {self.count}; ask "
                "for more"
            )
        extract = None if features is None else open_extractor(features)
        pipe, params, texts = self.open(load, self.count)
        kind, is_text = pipe.model.kind, self.is_text(pipe)
        if is_text:
            shared.refuse({"--features": self.features}, "with a model of texts")
        if params.temperature == 0 and self.sampling.temperature is None:
            params = replace(params, temperature=1.0)  # greedy tokens have a check of their own
        if self.count is None and not is_text:
            texts = [texts[k % len(texts)] for k in range(32 if kind == "window" else 8)]
        is_open = is_text and self.method.policy is None and not self.method.fields()
        names: tuple[Any, ...] = _TEXT_POLICIES if is_open else (self.method.policy,)
        policies = [replace(self.method, policy=name).choose(kind)[1] for name in names]
        report = self.begin(
            load,
            policy=", ".join(map(repr, policies)),
            exactness=", ".join(policy.exactness for policy in policies),
            guidance=params.guidance_scale,
            temperature=params.temperature,
            captions=texts,
            max_new_tokens=pipe.length if is_text else None,
            features=features,
            checks=[],
            broken=[],
        )
        for policy in policies:
            plan = Plan(
                pipe=pipe,
                policy=policy,
                plain=make_plain(policy),
                captions=texts,
                seed=self.seed,
                params=params,
                batch_size=self.batch_size,
                dtype=load.dtype,
                samples=self.samples,
                extract=extract,
                library=BaselineDecoding(pipe, "transformers", texts) if is_text else None,
            )
            said = f"guarantee in {load.dtype}: {exactness_in(policy.exactness, load.dtype)}"
            self.tell(report, check_all(plan), repr(policy), repr(policy), said)
        return report

    def begin(self, load: LoadOptions, **facts: Any) -> dict[str, Any]:
        """A report without checks."""
        from mmaccel.commands.files import new_report

        return new_report(
            load.device,
            model=self.model,
            dtype=load.dtype,
            seed=self.seed,
            batch_size=self.batch_size,
            **facts,
        )

    def tell(
        self, report: dict[str, Any], checks: Iterable[Any], policy: str, title: str, said: str
    ) -> None:
        """Write checks as they come, and print those that are done, also after an interrupt."""
        from mmaccel.commands.files import write_json

        rows: list[Any] = []
        try:
            for check in watch(checks, None, f"checking {policy}"):
                rows.append(check)
                report["checks"].append({"policy": policy, **check.to_dict()})
                report["broken"] += [check.name] * check.is_broken
                write_json(self.json_file, report)  # what is known outlives an interrupt
        finally:
            if rows:
                yes_no = ("no", "yes")
                columns = {
                    "check": lambda check: check.name,
                    "guaranteed": lambda check: yes_no[check.guaranteed],
                    "holds": lambda check: "BROKEN" if check.is_broken else yes_no[check.holds],
                    "measured": lambda check: check.said,
                }
                print_rows(title, columns, rows)
                names = ", ".join(check.name for check in rows if check.is_broken)
                say(f"{said}; {f'broken here: {names}' if names else 'all hold here'}.")


exactness = as_command(Exactness, pauses=False)
