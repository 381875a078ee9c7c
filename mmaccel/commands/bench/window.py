"""`mmaccel bench` for window policies: setups measured against token by token, one table.

Every setup (policy, window, draft source, dtype) runs batch by batch in a rotating order, so that
slow moments of the machine affect all setups alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmaccel.catalog import find_policy, load, make_policy, policy_names
from mmaccel.commands.bench.labels import ALL
from mmaccel.commands.bench.setup import (
    check_json,
    check_some,
    list_params,
    parse_scales,
    pick_prompts,
    read_card,
)
from mmaccel.commands.files import new_report, write_json
from mmaccel.commands.options import parse_window, split_values
from mmaccel.commands.process import Stopped
from mmaccel.commands.terminal import count_of, make_table, progress_bar, wide_console
from mmaccel.contracts import check_window
from mmaccel.errors import OptionError
from mmaccel.loading import open_pipeline, place
from mmaccel.options import LoadOptions
from mmaccel.own_code import TypedName
from mmaccel.pipelines.text_to_image.contact_sheet import identical
from mmaccel.pipelines.text_to_image.outputs import join
from mmaccel.pipelines.text_to_image.pipeline import warm_up
from mmaccel.results import exactness_in
from mmaccel.samplers.drafting.coarse import Coarse
from mmaccel.samplers.drafting.coarse_model import describe_coarse
from mmaccel.samplers.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mmaccel.contracts import Policy
    from mmaccel.pipelines.text_to_image.outputs import ImageOutput
    from mmaccel.pipelines.text_to_image.pipeline import TextToImage

_MIN_INTERVAL = 10  # images, for an interval of the mean


@dataclass(frozen=True)
class Setup:
    """A policy to measure.

    Attributes:
        name: short name.
        policy: the policy; None where `measure` is given another decoder for this setup.
        window: its window; None where it has none.
        dtype: of the generator.
    """

    name: str
    policy: Policy | None
    window: int | str | None
    dtype: str


@dataclass(frozen=True)
class Row:
    """Measurements of one setup at one guidance scale, means over `images` images.

    Attributes:
        policy, window, dtype, guidance: of the setup.
        drafts: draft source in use, after "auto" was resolved: a name, or the folder of a coarse
            model that was asked for. None where the policy has none.
        settings: repr of the policy.
        route: the forward that ran, see `Stats.route`.
        exactness: of the policy, "reference" without one; `to_dict` adds, as `promise`, what
            remains of it in this dtype.
        images: number of images.
        passes: forward passes that an image took part in while unfinished.
        tokens_per_pass: tokens that an image gained in one.
        half_width: of the 95 % interval of that mean over images; None for fewer than ten.
        seconds: wall time per image.
        speed_up: seconds of the first setup at the same guidance, divided by these.
        identical: images whose tokens equal those of the first setup.
        sampler_share: share of the time outside the forward passes of the model.
        total_variation: total variation spent per token.
    """

    policy: str
    window: int | str | None
    dtype: str
    drafts: str | None
    guidance: float
    settings: str
    route: str
    exactness: str
    images: int
    passes: float
    tokens_per_pass: float
    half_width: float | None
    seconds: float
    speed_up: float
    identical: int
    sampler_share: float
    total_variation: float

    def to_dict(self) -> dict[str, Any]:
        """All fields and `promise`, ready for JSON."""
        return {**asdict(self), "promise": exactness_in(self.exactness, self.dtype)}


def bench_window(
    *, prompt: str | None, model: str, policies: str, windows: str, drafts: str | None,
    guidance: str | None, count: int, seed: int, batch_size: int, temperature: float | None,
    size: str | None, decoder: Path | None, load: LoadOptions, dtypes: str, json_file: Path | None,
) -> None:  # fmt: skip
    """Measure and print; the arguments are those of `mmaccel bench`.

    Raises:
        OptionError: a wrong option, before any measurement.
        Stopped: Ctrl-C; the file has what was measured.
    """
    listed = policy_names() if policies == ALL else split_values("--policies", policies)
    left_out = ["autoregressive"]
    if policies == ALL:
        left_out.append("speculative")  # without a draft model it equals prompt-lookup
    for text in listed:
        find_policy(TypedName(text), "window")
    names = [TypedName(text) for text in listed if text not in left_out]
    widths = list(dict.fromkeys(parse_window(text) for text in split_values("--windows", windows)))
    for width in widths:
        check_window(width, adaptive=True)
    scales = parse_scales(guidance)
    lists = {"policies": policies, "windows": windows, "drafts": drafts, "dtypes": dtypes}
    for option, value in lists.items():
        if value is not None:
            check_some(option, value)
    sources = None
    if drafts is not None:
        sources = [TypedName(source) for source in split_values("--drafts", drafts)]
    loads = [place(replace(load, dtype=name)) for name in split_values("--dtypes", dtypes)]
    device = loads[0].device
    setups = []
    for dtype in (each.dtype for each in loads):
        setups.append(Setup("autoregressive", make_policy("autoregressive"), None, dtype))
        for name in names:
            own = [width for width in widths if width != "adaptive" or name == "jacobi"]
            if not own and policies != ALL:
                raise OptionError(
                    f"--windows: expected a fixed width for {name}, received {windows!r}; "
                    "add one such as 32"
                )
            for policy in _make_policies(name, own, sources):
                setups.append(Setup(name, policy, getattr(policy, "window", None), dtype))
    if sources and not any(_has(name, "drafts") for name in names):
        raise OptionError(
            f"--drafts: expected a policy that has draft sources, received {', '.join(names)}; add "
            "jacobi, or leave --drafts out"
        )
    list_params(SamplingParams(), scales, temperature)
    pipes = {each.dtype: open_pipeline(model, each, size=size, decoder=decoder) for each in loads}
    first_pipe = next(iter(pipes.values()))
    images = first_pipe.image_model
    params = list_params(images.params, scales, temperature)
    prompts = pick_prompts(prompt, model, images, count)
    check_json(json_file)
    card = read_card(first_pipe.source)
    rows = measure(pipes, prompts, setups, params, seed, batch_size)
    done = rows[0].images if rows else 0
    if rows:
        report = new_report(
            device,
            model=model,
            card=card,
            captions=prompts[:done],
            batch_size=batch_size,
            temperature=params[0].temperature,
            seed=seed,
            coarse=_describe_coarse(setups, rows, first_pipe.model),
            rows=[row.to_dict() for row in rows],
        )
        try:
            write_json(json_file, report)
        finally:
            _print(rows, card, batch_size)
    if done < count:
        raise Stopped(f"stopped; measured {done} of {count_of(count, 'prompt')}")


def _make_policies(
    name: str, windows: Sequence[int | str | None], sources: Sequence[str] | None
) -> list[Any]:
    """The policies to measure under a short name.

    Args:
        name: short name.
        windows: widths.
        sources: draft sources; None leaves the policy its own, and so does a policy without.
    """
    named = [{"drafts": source} for source in sources or ()] if _has(name, "drafts") else []
    sized = [{"window": width} for width in windows] if _has(name, "window") else [{}]
    return [make_policy(name, **size, **own) for size in sized for own in named or [{}]]


def _has(name: str, field: str) -> bool:
    """Whether the policy of a name has a field."""
    return field in {own.name for own in fields(load(find_policy(name).target))}


def _describe_coarse(setups: Sequence[Setup], rows: Sequence[Row], model: Any) -> dict[str, Any]:
    """The coarse models that drafted, by `Row.drafts`."""
    sources = [getattr(setup.policy, "drafts", None) for setup in setups]
    folders = {source.folder: source.folder for source in sources if isinstance(source, Coarse)}
    if any(row.drafts == "coarse" for row in rows):
        folders["coarse"] = model.coarse
    return {source: describe_coarse(folder) for source, folder in folders.items()}


def measure(
    pipes: Mapping[str, TextToImage],
    prompts: Sequence[str],
    setups: Sequence[Setup],
    params: Sequence[SamplingParams],
    seed: int,
    batch_size: int,
    other: Any = None,
) -> list[Row]:
    """Run every setup on every prompt.

    Args:
        pipes: the model, by dtype.
        prompts: one per image; image k has seed `seed + k`.
        setups: the others are compared with the first.
        params: sampling parameters, one per guidance scale.
        seed: of the first image.
        batch_size: images generated together.
        other: decodes the setups without a policy; has a `stream` as `TextToImage` has it.

    Returns:
        One row per guidance scale and setup, over the prompts that every setup had before Ctrl-C,
        or over all; none if the first batch was not finished.

    Cost: a few passes per setup to warm up, then batch by batch every setup in a rotating order.
    """
    cells = [(f, s) for f in range(len(params)) for s in range(len(setups))]
    seeds = [seed + k for k in range(len(prompts))]
    runs: dict[tuple[int, int], Iterator[ImageOutput]] = {}
    finished: dict[tuple[int, int], list[ImageOutput]] = {}
    for f, s in cells:
        policy, source = setups[s].policy, other
        first = slice(0, batch_size)
        if policy is None:  # whole images, as their length is part of what is compiled
            list(source.stream(prompts[first], params[f], seed=seeds[first], batch_size=batch_size))
        else:
            source = pipes[setups[s].dtype]
            warm_up(source, policy, params[f], prompts[0], min(batch_size, len(prompts)))
        runs[f, s] = source.stream(
            prompts, params[f], policy=policy, seed=seeds, batch_size=batch_size
        )
        finished[f, s] = []
    n_batches = -(-len(prompts) // batch_size)
    try:
        with progress_bar() as bar:
            task = bar.add_task("measuring", total=n_batches * len(cells))
            for k in range(n_batches):
                turn = k % len(cells)
                for cell in cells[turn:] + cells[:turn]:
                    finished[cell].append(next(runs[cell]))
                    bar.advance(task)
    except KeyboardInterrupt:
        n_batches = min(map(len, finished.values()))
    if not n_batches:
        return []
    sides = {cell: join(parts[:n_batches]) for cell, parts in finished.items()}
    return [
        _summarise(setups[s], params[f].guidance_scale, sides[f, s], sides[f, 0]) for f, s in cells
    ]


def _summarise(setup: Setup, guidance: float, images: ImageOutput, plain: ImageOutput) -> Row:
    stats, count = images.stats, len(images.prompts)
    drafts = getattr(setup.policy, "drafts", None)
    return Row(
        policy=setup.name,
        window=setup.window,
        dtype=setup.dtype,
        drafts=drafts.folder if isinstance(drafts, Coarse) else stats.drafts or None,
        guidance=guidance,
        settings=stats.policy,
        route=stats.route,
        exactness="reference" if setup.policy is None else setup.policy.exactness,
        images=count,
        passes=stats.row_passes / count,
        tokens_per_pass=stats.tokens_per_pass,
        half_width=half_width(images),
        seconds=stats.seconds / count,
        speed_up=plain.stats.seconds / stats.seconds,
        identical=identical(plain, images),
        sampler_share=1 - stats.forward_seconds / stats.seconds,
        total_variation=stats.total_variation / stats.tokens,
    )


def half_width(images: ImageOutput) -> float | None:
    """Half the 95 % interval of tokens per pass, by normal approximation over independent images.

    All images have equally many tokens, so that the relative error is that of the mean passes.
    """
    passes, count = images.passes.double(), len(images.passes)
    if count < _MIN_INTERVAL:
        return None
    relative = 1.96 * float(passes.std() / passes.mean()) / math.sqrt(count)
    return images.stats.tokens_per_pass * relative


def _print(rows: list[Row], card: dict[str, Any], batch_size: int) -> None:
    heads = ("passes", "tok/pass", "s/image", "speed-up", "same", "sampler", "exactness")
    console = wide_console()
    for guidance, dtype in dict.fromkeys((row.guidance, row.dtype) for row in rows):
        table = make_table("policy", *heads, title=f"guidance {guidance:g}, {dtype}")
        for row in rows:
            if (row.guidance, row.dtype) == (guidance, dtype):
                table.add_row(*_cells(row))
        console.print(table, "")
    loss = card.get("generator", {}).get("validation_bits_per_token")
    is_known = isinstance(loss, int | float)
    quality = f"validation loss {loss:.3f} bits a token" if is_known else "no model card"
    console.print(f"{count_of(rows[0].images, 'prompt')}, batch size {batch_size}, {quality}.")
    if any(row.exactness == "relaxed" for row in rows):
        console.print("relaxed: with the total variation spent a token.")


def _cells(row: Row) -> tuple[str, ...]:
    half = "" if row.half_width is None else f"±{row.half_width:.2f}"
    drafts = None if row.drafts in (None, "neighbour") else Path(row.drafts).name
    spent = f" {row.total_variation:.3f}" if row.exactness == "relaxed" else ""
    return (
        " ".join(str(part) for part in (row.policy, row.window, drafts) if part is not None),
        f"{row.passes:.1f}",
        f"{row.tokens_per_pass:.2f}{half}",
        f"{row.seconds:.3f}",
        f"{row.speed_up:.2f}",
        f"{row.identical}/{row.images}",
        f"{100 * row.sampler_share:.0f} %",
        exactness_in(row.exactness, row.dtype) + spent,
    )
