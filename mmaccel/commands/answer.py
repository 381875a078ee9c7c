"""`mmaccel answer`: a question about images, with all visual tokens, with fewer, or both."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmaccel.commands import options as shared
from mmaccel.commands.flags import Without, with_flags
from mmaccel.commands.options import LayerFlags, VisualFlags, WindowPolicyFlags
from mmaccel.commands.process import pause_collector, resume_collector
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.options import LoadOptions, SamplingOptions, given

if TYPE_CHECKING:
    from mmaccel.pipelines.image_to_text.pipeline import ImageToText
    from mmaccel.pipelines.image_to_text.types import Answer, Answers

_HELP_INPUTS = "image files, then the question"
_HELP_MODEL = "scenes-vqa, or a folder or hub id of a vision-language model"
_HELP_COMPARE = "answer with all visual tokens too"
_HELP_SEED = "of the answer; by default 0, and drawn and printed above temperature 0"
_HELP_OUT = "PNG of the patches that stay; by default in out/"


@with_flags
def answer(
    inputs: Annotated[list[str], typer.Argument(help=_HELP_INPUTS, metavar="IMAGE... QUESTION")],
    *,
    model: Annotated[str, typer.Option(help=_HELP_MODEL)] = "scenes-vqa",
    method: WindowPolicyFlags,
    layer: LayerFlags,
    visual: VisualFlags,
    compare: Annotated[bool, typer.Option("--compare", help=_HELP_COMPARE)] = False,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "--max-new-tokens", help="cut longer answers")
    ] = 64,
    seed: Annotated[int | None, typer.Option(help=_HELP_SEED)] = None,
    sampling: Annotated[SamplingOptions, Without("guidance_scale")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help=_HELP_OUT, parser=shared.parse_path, metavar="FILE"),
    ] = None,
    json_file: shared.JsonFile = None,
    load: Annotated[LoadOptions, Without("family")],
    threads: shared.Threads = None,
) -> None:
    """Answer a question about images; with --visual-tokens also draw which patches stay."""
    pause_collector()
    from transformers.utils import logging

    from mmaccel.checks import check_int
    from mmaccel.commands.files import (
        check_file,
        check_folder,
        new_report,
        open_folder,
        write_json,
    )
    from mmaccel.commands.terminal import say
    from mmaccel.loading import load_keywords, place
    from mmaccel.outputs.whole_files import check_target
    from mmaccel.pipelines.image_to_text.loading import check_model
    from mmaccel.pipelines.image_to_text.pipeline import ImageToText, choose_sampling
    from mmaccel.pipelines.image_to_text.prompts import check_places, check_questions, read_image
    from mmaccel.pipelines.loading.hub import is_hub_id
    from mmaccel.reduction.visual_tokens.contract import check_reducers

    shared.set_threads(threads)
    files, question = _split_inputs(inputs)
    name, policy = method.choose("window")
    methods = visual.read()
    layers = layer.read()
    reducers = check_reducers(methods) if methods else ()
    for option, value in (("--compare", compare), ("--out", out)):
        if value and not reducers:
            raise OptionError(
                f"{option}: expected --visual-tokens with it, received none; name a method such as "
                "--visual-tokens dart --keep 0.22"
            )
    check_int("--max-tokens", max_tokens, 1, hint="64 suits short answers")
    seed, is_drawn = shared.pick_seed(seed if sampling.temperature else seed or 0)
    params = given(sampling)
    choose_sampling(**params)
    load = place(load)
    # before the model is loaded, which takes long
    check_questions(question)
    images = [read_image(file) for file in files]
    check_places(question, len(images))
    picture = _name_picture(out, question, seed, model, files, reducers) if reducers else None
    if picture is not None:
        check_target(picture, "--out")
        check_folder(picture.parent)
    check_file("--json", json_file)
    if not is_hub_id(model):
        check_model(model, load.trust_remote_code)
    logging.disable_progress_bar()
    pipe = ImageToText.from_pretrained(
        model, policy=policy, visual_tokens=reducers or None, **layers, **load_keywords(load)
    )
    resume_collector()
    if picture is not None:
        open_folder(picture.parent)
    pipes = _with_plain(pipe, images, question) if compare else {_title(reducers): pipe}
    if is_drawn:
        shared.say_drawn(seed)
    made = {
        title: each(images, question, max_new_tokens=max_tokens, seed=seed, **params)
        for title, each in pipes.items()
    }
    _show(made)
    drawn = None
    if picture is not None:
        drawn = _draw(picture, made[_title(reducers)][0], is_asked=out is not None)
    say(list(made.values())[-1].stats)
    runs = [_describe(title, answers) for title, answers in made.items()]
    report = new_report(
        load.device, model=model, dtype=load.dtype, images=files, question=question, policy=name,
        picture=None if drawn is None else str(drawn), runs=runs,
    )  # fmt: skip
    write_json(json_file, report)


def _split_inputs(inputs: Sequence[str]) -> tuple[list[str], str]:
    """Image files, and the question behind them.

    Raises:
        OptionError: no image, or no question.
    """
    *files, question = inputs
    if os.path.isfile(question):
        raise OptionError(
            f"question: expected it after the images, received the file {question!r}; write it last"
        )
    if not files:
        raise OptionError(
            f"image: expected at least one file before the question, received {question!r} alone; "
            "write the image first"
        )
    return files, question


def _with_plain(pipe: ImageToText, images: Any, question: str) -> dict[str, ImageToText]:
    """A pipeline without reducers, and the given one, by what they keep.

    Both answer once, so that neither is measured with what a first run loads.
    """
    methods = pipe.decoding.methods
    plain = pipe.with_methods(
        policy=pipe.policy, kv_cache=methods.kv_cache, attention=methods.attention
    )
    pipes = {_title(()): plain, _title(pipe.reducers): pipe}
    for each in pipes.values():
        each(images, question, max_new_tokens=1)
    return pipes


def _title(reducers: Sequence[Any]) -> str:
    """What a run keeps, in the words of the command line."""
    from mmaccel.catalog import REDUCERS

    names = {entry.target.split(":")[1]: name for name, entry in REDUCERS.items()}
    parts = [
        f"{names.get(m.name, m.name)} {m.n_keep if m.keep is None else format(m.keep, 'g')}"
        for m in reducers
    ]
    return ", ".join(parts) or "all tokens"


def _name_picture(
    out: Path | None, question: str, seed: int, model: str, files: list[str], reducers: Any
) -> Path:
    """The file of the picture; another question, image or method has another name.

    Raises:
        OptionError: a name of another format.
    """
    from mmaccel.outputs.image_files import image_name

    if out is None:
        own = {"model": model, "images": files, "visual_tokens": list(map(repr, reducers))}
        name = _title(reducers).split()[0]
        return Path("out") / image_name(seed, question, name, own)
    if out.suffix.lower() != ".png":
        raise OptionError(
            f"--out: expected a name that ends in .png, received {str(out)!r}; change its end"
        )
    return out


def _show(made: dict[str, Answers]) -> None:
    """Print the answers, and what they cost."""
    from mmaccel.commands.terminal import make_table, say, wide_console

    answers = {title: each[0] for title, each in made.items()}
    for title, found in answers.items():
        cut = "" if found.is_finished else " … (cut, see --max-tokens)"
        say(f"{title}: {found.text}{cut}" if len(made) > 1 else f"{found.text}{cut}")
    heads = ("visual tokens", "tokens", "forward passes", "s to first", "s")
    table = make_table("", *heads)
    for title, each in made.items():
        found = answers[title]
        table.add_row(
            title, f"{found.n_kept} of {found.n_visual}", str(len(found.tokens)),
            str(found.passes), f"{each.first_seconds:.2f}", f"{each.seconds:.2f}",
        )  # fmt: skip
    wide_console().print(table)


def _draw(file: Path, found: Answer, is_asked: bool) -> Path | None:
    """Write the picture; None where the model's tokens have no known places.

    Raises:
        UnsupportedModelError: they have none, and the picture was asked for by name.
    """
    from mmaccel.commands.files import not_written
    from mmaccel.commands.terminal import say
    from mmaccel.outputs.whole_files import write_whole

    try:
        picture = found.draw_kept()
    except UnsupportedModelError as error:
        if is_asked:
            raise
        say(f"note: no picture; {error}")
        return None
    try:
        write_whole(file, lambda path: picture.save(path, format="PNG"))
    except OSError as error:
        raise not_written(file.name, file.parent, "the answer is", error) from error
    say(f"the patches that stay: {file}")
    return file


def _describe(title: str, answers: Answers) -> dict[str, Any]:
    """A run, ready for JSON."""
    found = answers[0]
    return {
        "visual_tokens": title,
        "text": found.text,
        "is_finished": found.is_finished,
        "tokens": len(found.tokens),
        "passes": found.passes,
        "seconds": answers.seconds,
        "first_seconds": answers.first_seconds,
        "n_visual": found.n_visual,
        "n_kept": found.n_kept,
        "images": [{"n_visual": each.n_all, "n_kept": each.n_kept} for each in found.images],
        "stats": answers.stats.to_dict(),
    }
