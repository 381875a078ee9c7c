"""What measurements of `mmaccel bench` on image models share: prompts, scales and files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mmaccel.catalog import MODELS, load
from mmaccel.checks import show
from mmaccel.commands.files import open_folder, write_json
from mmaccel.commands.options import split_values
from mmaccel.config_files import read_json
from mmaccel.errors import OptionError
from mmaccel.outputs.whole_files import write_whole
from mmaccel.pipelines.models.scenes import WordImages
from mmaccel.pipelines.text_to_image.model import ImageModel, choose_params
from mmaccel.samplers.sampling_params import SamplingParams


def parse_scales(guidance: str | None) -> list[float] | None:
    """The value of `--guidance`: numbers with commas.

    Raises:
        OptionError: anything else, or none.
    """
    if guidance is None:
        return None
    check_some("guidance", guidance)
    try:
        return [float(text) for text in split_values("--guidance", guidance)]
    except ValueError as error:
        raise OptionError(
            f"--guidance: expected numbers with commas, received {show(guidance)}; write 1.0,2.0"
        ) from error


def check_some(name: str, text: str) -> None:
    """Raise OptionError for a value with commas that names nothing."""
    if not split_values(f"--{name}", text):
        raise OptionError(f"--{name}: expected at least one, received none; leave it out")


def list_params(
    recommended: SamplingParams, scales: Sequence[float] | None, temperature: float | None
) -> list[SamplingParams]:
    """Sampling parameters for each guidance scale, by default for 1 and the recommended one.

    Raises:
        OptionError: a value outside its domain.
    """
    return [
        choose_params(recommended, guidance_scale=scale, temperature=temperature)
        for scale in dict.fromkeys(scales or (1.0, recommended.guidance_scale))
    ]


def pick_prompts(prompt: str | None, model: str, images: ImageModel, count: int) -> list[str]:
    """A prompt for each image: the given one, else fresh ones, else the model's examples in turn.

    Raises:
        OptionError: a prompt that the model cannot draw.
    """
    if prompt is not None:
        prompts = [prompt] * count
    elif isinstance(images, WordImages):
        source = MODELS.get(model, MODELS["scenes"])
        prompts = load(source.captions)(load(source.fresh), range(count))
    else:
        prompts = [images.examples[k % len(images.examples)] for k in range(count)]
    for text in prompts:
        images.encode(text)
    return prompts


def check_json(json_file: Path | None) -> None:
    """Make sure that a file of this name can be written, before anything is measured.

    Raises:
        OSError: it cannot.
    """
    if json_file is not None:
        open_folder(json_file.parent, "--json")
        probe = json_file.with_name(f"{json_file.name}.trial")  # the name may be too long
        write_whole(probe, Path.touch)
        probe.unlink()


def read_card(folder: Path | None) -> dict[str, Any]:
    """What the report takes from the card of a demo model; empty where there is none.

    Raises:
        UnsupportedModelError: a card that is no JSON object.
    """
    file = None if folder is None else folder / "card.json"
    card = read_json(file, option="model card") if file and file.is_file() else {}
    kinds = {"name": str, "parameters": int, "generator": dict}
    return {name: card[name] for name, kind in kinds.items() if isinstance(card.get(name), kind)}


def write_rows(
    json_file: Path | None, report: dict[str, Any], show_rows: Callable[[], None]
) -> None:
    """Write a report, and print its rows although it cannot be written."""
    try:
        write_json(json_file, report)
    finally:
        show_rows()
