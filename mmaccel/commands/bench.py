"""`mmaccel bench`: decoding of images side by side, image by image in turn.

Without policies, windows, drafts and dtypes, at every guidance scale: transformers' own `generate`
with a static cache, its pass of one token compiled where a compiler is there, with which the others
are compared; `Jacobi()`; the relaxed policy that makes most tokens a second on `scenes`; and
speculative Jacobi decoding as published (Y. Teng et al., ICLR 2025, arXiv 2410.01699): windows of
16, redraws independent of the drafts, first drafts uniformly at random, whose distribution we
record, where its released code records a random draft as certain, which accepts no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmaccel.catalog import (
    MODELS,
    find_policy,
    load,
    make_policy,
    policy_names,
    read_policy,
)
from mmaccel.checks import is_one
from mmaccel.commands import options as shared
from mmaccel.commands.flags import Without, as_command
from mmaccel.commands.options import SizeFlags, split_values
from mmaccel.commands.process import Stopped
from mmaccel.commands.terminal import print_rows, say, stderr_console, watch
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_BATCH, MAX_MEASURED
from mmaccel.options import LoadOptions, option, read_text
from mmaccel.own_code import TypedName

if TYPE_CHECKING:
    from mmaccel.evaluation.speed import Side
    from mmaccel.pipelines.text_to_image.pipeline import TextToImage
    from mmaccel.samplers.sampling_params import SamplingParams

ALL = "all"
"""Every policy."""
_WINDOWS = "1,16,32,64,adaptive"
PEERS = {  # label of a row -> policy
    "Jacobi, as it comes": "jacobi",
    "GSD, fastest relaxed": "gsd:window=16:drafts=auto",
    "SJD, as published": "sjd:window=16:drafts=random",
}
_HELP_POLICIES = "short names or module:Name, with commas; or all"
_HELP_DTYPES = "with commas; the first, by default float32, is the baseline"
_HELP_DRAFTS = "draft sources with commas, such as neighbour,coarse, or folders of coarse models"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure forward passes and seconds, interleaved image by image.

    Without --policies, --windows, --drafts and --dtypes: transformers' own generate, Jacobi as it
    comes, the fastest relaxed policy, and speculative Jacobi decoding as published. With any of
    them: every policy at every window against token by token.
    """

    prompt: Annotated[
        str | None, typer.Argument(help="of all images; without it, fresh prompts")
    ] = None
    policies: str | None = option(None, _HELP_POLICIES)
    windows: str | None = option(None, f"with commas; by default {_WINDOWS}")
    drafts: str | None = option(None, _HELP_DRAFTS)
    dtypes: str | None = option(None, _HELP_DTYPES)
    model: str = option("scenes", "demo model, path or hub id")
    guidance: str | None = option(None, "scales with commas; by default 1 and the model's own")
    count: int = option(16, "number of fresh prompts", min=1, max=MAX_MEASURED)
    seed: Annotated[int, typer.Option(help="of the first image", callback=shared.read_seed)] = 0
    batch_size: int = option(1, "images generated together", min=1, max=MAX_BATCH)
    temperature: float | None = option(None, "0 is greedy; by default the model's own")
    decoder: shared.Decoder = None
    json_file: shared.JsonFile = None
    sides: SizeFlags
    load: Annotated[LoadOptions, Without("dtype", "compile", "cuda_graphs")]
    compile: shared.CompileFirst = False

    @property
    def is_sweep(self) -> bool:
        """Whether policies are measured against token by token."""
        return (self.policies, self.windows, self.drafts, self.dtypes) != (None,) * 4

    def run(self) -> None:
        from mmaccel.commands.files import check_file, new_report, write_json
        from mmaccel.loading import open_pipeline, place
        from mmaccel.pipelines.text_to_image.model import choose_params
        from mmaccel.samplers.drafting.coarse import Coarse
        from mmaccel.samplers.drafting.coarse_model import describe_coarse
        from mmaccel.samplers.sampling_params import SamplingParams

        peers = [(text.partition(":")[0], read_policy(text)) for text in PEERS.values()]
        policies = self.list_policies() if self.is_sweep else peers
        scales = [read_text("--guidance", text, float) for text in self.split("guidance", "")]
        temperature = {"temperature": self.temperature}
        for scale in scales or [1.0]:
            choose_params(SamplingParams(), guidance_scale=scale, **temperature)
        check_file("--json", self.json_file)

        opened = replace(self.load, compile=self.compile)
        pipes = {}
        for dtype in self.split("dtypes", "float32"):
            each = place(replace(opened, dtype=dtype))
            size = self.sides.join()
            pipe = open_pipeline(self.model, each, size=size, decoder=self.decoder)
            pipes[each.dtype] = pipe
        first = next(iter(pipes.values()))
        usual = first.image_model.params
        scales = list(dict.fromkeys(scales or [1.0, usual.guidance_scale]))
        prompts = self.pick_prompts(first)
        rows: list[dict[str, Any]] = []
        done = 0
        for scale in scales:
            params = choose_params(usual, guidance_scale=scale, **temperature)
            scale_rows = self.compare(pipes, policies, params, prompts)
            rows += scale_rows
            n_images = scale_rows[0]["images"] if scale_rows else 0
            done += n_images
            if n_images < self.count:
                break
        sources = [getattr(policy, "drafts", None) for _, policy in policies]
        folders: dict[str, Any] = {s.folder: s.folder for s in sources if isinstance(s, Coarse)}
        if any(row["drafts"] == "coarse" for row in rows):
            folders["coarse"] = first.model.coarse
        report = new_report(
            each.device,
            model=self.model,
            card=_read_card(first.source),
            count=self.count,
            captions=prompts[: rows[0]["images"]] if rows else [],
            batch_size=self.batch_size,
            temperature=choose_params(usual, **temperature).temperature,
            seed=self.seed,
            coarse={name: describe_coarse(folder) for name, folder in folders.items()},
        )
        report["rows" if self.is_sweep else "first_screen"] = rows
        try:
            write_json(self.json_file if rows else None, report)
        finally:  # although it cannot be written
            _print(report, rows)
        wanted = self.count * len(scales)
        if done < wanted:
            raise Stopped(f"stopped; measured {done} of {wanted} images a row")

    def split(self, name: str, usual: str) -> list[str]:
        given = getattr(self, name)
        values = split_values(f"--{name}", usual if given is None else given)
        if given is not None and not values:
            raise OptionError(f"--{name}: expected at least one, received none; leave it out")
        return values

    def list_policies(self) -> list[tuple[str, Any]]:
        """Short names with policies, token by token first."""
        from mmaccel.policies import check_window

        is_all = self.policies in (None, ALL)
        listed = policy_names() if is_all else self.split("policies", "")
        # without a draft model `speculative` equals prompt-lookup
        left_out = ("autoregressive", *["speculative"] * is_all)
        texts = self.split("windows", _WINDOWS)
        widths = list(dict.fromkeys(read_text("--windows", text, int | str) for text in texts))
        for width in widths:
            check_window(width, adaptive=True)
        sources = list(map(TypedName, self.split("drafts", "")))
        policies = [("autoregressive", make_policy("autoregressive"))]
        for name in map(TypedName, listed):
            entry = find_policy(name, "window")
            if name in left_out:
                continue
            known = {each.name for each in fields(load(entry.target))} - entry.preset.keys()
            own_widths = [width for width in widths if width != "adaptive" or name == "jacobi"]
            if not (own_widths or is_all):
                raise OptionError(
                    f"--windows: expected a fixed width for {name}, received {self.windows!r}; add "
                    "one such as 32"
                )
            for window in own_widths if "window" in known else [None]:
                for source in sources if "drafts" in known and sources else [None]:
                    options = shared.given(window=window, drafts=source)
                    policies.append((name, make_policy(name, **options)))
        if not any("drafts" in vars(policy) for _, policy in policies):
            shared.refuse({"--drafts": self.drafts}, "with policies that have no draft sources")
        return policies

    def pick_prompts(self, pipe: TextToImage) -> list[str]:
        """A prompt for each image: the given one, else fresh ones, else the model's examples."""
        from mmaccel.pipelines.models.scenes import WordImages

        images = pipe.image_model
        prompts = [
            self.prompt or images.examples[k % len(images.examples)] for k in range(self.count)
        ]
        if self.prompt is None and isinstance(images, WordImages):
            source = MODELS.get(self.model, MODELS["scenes"])
            prompts = load(source.captions)(load(source.fresh), range(self.count))
        for text in prompts:
            images.encode(text)
        return prompts

    def compare(
        self,
        pipes: dict[str, TextToImage],
        policies: Sequence[tuple[str, Any]],
        params: SamplingParams,
        prompts: Sequence[str],
    ) -> list[dict[str, Any]]:
        """The rows of a guidance scale, over the rounds that every side had before Ctrl-C."""
        from mmaccel.evaluation.measure import measure
        from mmaccel.evaluation.speed import Side, compare_images, make_cases

        first = next(iter(pipes.values()))
        sides = [] if self.is_sweep else [_open_baseline(first, prompts, params)]
        for dtype, pipe in pipes.items():
            sides += [Side(name, pipe, policy, params, dtype) for name, policy in policies]

        def inputs(index: int) -> tuple[Sequence[str], Sequence[int]]:
            first = max(index, 0) * self.batch_size
            texts = prompts[first : first + self.batch_size]
            return texts, [self.seed + first + k for k in range(len(texts))]

        n_rounds = -(-self.count // self.batch_size)
        runs = measure(make_cases(sides, inputs), n_rounds, device=first.model.device)
        finished = []
        try:
            for run in watch(runs, (n_rounds + 1) * len(sides), "measuring"):
                finished += [run] if run["index"] >= 0 else []
        except KeyboardInterrupt:  # what was measured is reported
            pass
        finally:
            if sides[0].policy is None:
                sides[0].source.close()
        whole = len(finished) // len(sides) * len(sides)
        rows = compare_images(sides, finished[:whole]) if whole else []
        if not self.is_sweep:
            labels = [sides[0].name, *PEERS]
            rows = [{"label": label, **row} for label, row in zip(labels, rows)]
        return rows


def _open_baseline(pipe: TextToImage, prompts: Sequence[str], params: SamplingParams) -> Side:
    """transformers' `generate`, or the plain loop where that makes no images."""
    from mmaccel.evaluation.speed import Side
    from mmaccel.evaluation.transformers_baseline import BaselineDecoding, find_obstacle
    from mmaccel.outputs.machine import package_version

    generate = f"transformers {package_version('transformers')}"
    for name, how in (("compiled", "compiled"), ("static", "not compiled")):
        reason = find_obstacle(pipe, name, prompts[0], params)
        if not reason:
            return Side(f"{generate}, {how}", BaselineDecoding(pipe, name, prompts), None, params)
        stderr_console().print(f"{generate}, {how}, is left out: {reason}")
    return Side("the plain loop of mmaccel", pipe, make_policy("autoregressive"), params)


def _read_card(folder: Path | None) -> dict[str, Any]:
    from mmaccel.config_files import read_json

    file = None if folder is None else folder / "card.json"
    card = read_json(file, option="model card") if file and file.is_file() else {}
    kinds = {"name": str, "parameters": int, "generator": dict}
    return {name: card[name] for name, kind in kinds.items() if isinstance(card.get(name), kind)}


def _name(row: dict[str, Any]) -> str:
    drafts = "" if row["drafts"] in (None, "neighbour") else Path(row["drafts"]).name
    parts = (row["policy"], row["window"], drafts)
    return row.get("label") or " ".join(str(part) for part in parts if part)


_COLUMNS: dict[str, str | Callable[[dict[str, Any]], str]] = {
    "policy": _name,
    "passes": "{passes:.1f}",
    "tok/pass": "{tokens_per_pass:.2f}",
    "±": "{half_width:.2f}",
    "s/image": "{seconds:.3f}",
    "speed-up": "{speed_up:.2f}",
    "same": "{identical}/{images}",
    "sampler": "{sampler_share:.0%}",
    "exactness": "{promise}",
    "variation": "{total_variation:.3f}",
}


def _print(report: dict[str, Any], rows: list[dict[str, Any]]) -> None:

    for guidance, dtype in dict.fromkeys((row["guidance"], row["dtype"]) for row in rows):
        group = [row for row in rows if (row["guidance"], row["dtype"]) == (guidance, dtype)]
        print_rows(f"guidance {guidance:g}, {dtype}", _COLUMNS, group)
    loss = report["card"].get("generator", {}).get("validation_bits_per_token")
    is_known = is_one(loss, float)
    quality = f"validation loss {loss:.3f} bits a token" if is_known else "no model card"
    if rows:
        say(
            f"{rows[0]['images']} prompts, batch size {report['batch_size']}, {quality}. "
            "variation: total variation spent a token. All policies: mmaccel bench --policies all"
        )


bench = as_command(Bench, pauses=False)
