"""The run of `mmaccel answer`: a question, and a picture of the patches that stay."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmaccel.catalog import REDUCERS
from mmaccel.commands.files import (
    check_file,
    check_folder,
    new_report,
    open_folder,
    write_file,
    write_json,
)
from mmaccel.commands.options import pick_seed, say_drawn, set_threads
from mmaccel.commands.process import resume_collector
from mmaccel.commands.terminal import print_rows, say
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.loading import load_keywords, place
from mmaccel.options import given
from mmaccel.outputs.image_files import image_name
from mmaccel.outputs.whole_files import check_target
from mmaccel.pipelines.hosts.loading.hub import is_hub_id
from mmaccel.pipelines.image_to_text.loading import check_model
from mmaccel.pipelines.image_to_text.pipeline import ImageToText, choose_sampling
from mmaccel.pipelines.image_to_text.prompts import check_places, check_questions, read_images
from mmaccel.reduction.visual_tokens.contract import read_reducers

if TYPE_CHECKING:
    from mmaccel.pipelines.image_to_text.types import Answers


def answer_question(flags: Any) -> None:
    """Answer with fewer visual tokens, with all, or both; print it, and draw what stayed."""
    layers = flags.layer.read()
    seed, is_drawn = pick_seed(flags.seed if flags.sampling.temperature else flags.seed or 0)
    set_threads(flags.threads)
    load = place(flags.load)
    names, question = _split_inputs(flags.inputs)
    policy_name, policy = flags.method.choose()
    reducers = read_reducers(flags.visual.read() or None)
    for option, value in (("--compare", flags.compare), ("--out", flags.out)):
        if value and not reducers:
            raise OptionError(
                f"{option}: expected --visual-tokens with it, received none; name a method "
                "such as --visual-tokens dart --keep 0.22"
            )
    choose_sampling(**given(flags.sampling))
    check_questions(question)
    (images,) = read_images(names, 1)
    check_places(question, len(images))
    picture = _name_picture(flags, names, question, reducers, seed) if reducers else None
    if picture is not None:
        check_target(picture, "--out")
        check_folder(picture.parent)
    check_file("--json", flags.json_file)
    if not is_hub_id(flags.model):
        check_model(flags.model, load.trust_remote_code)
    from transformers.utils import logging

    logging.disable_progress_bar()
    pipe = ImageToText.from_pretrained(
        flags.model, policy=policy, visual_tokens=reducers or None, **layers, **load_keywords(load)
    )
    resume_collector()
    if picture is not None:
        open_folder(picture.parent)
    if is_drawn:
        say_drawn(seed)
    pipes = {_title(reducers): pipe}
    if flags.compare:
        pipes = {_title(()): pipe.with_methods(policy=policy, **layers), **pipes}
        for each in pipes.values():  # so that neither is measured with what a first run loads
            each(images, question, max_new_tokens=1)
    sampling = given(flags.sampling)
    runs = []
    for title, each in pipes.items():
        made = each(images, question, max_new_tokens=flags.max_tokens, seed=seed, **sampling)
        runs.append(_describe(title, made))
        cut = "" if made[0].is_finished else " … (cut, see --max-tokens)"
        say(f"{title}: {made[0].text}{cut}" if flags.compare else f"{made[0].text}{cut}")
    print_rows(None, _COLUMNS, runs)
    drawn = None if picture is None else _draw(made, picture, flags.out)
    say(made.stats)
    report = new_report(
        load.device,
        model=flags.model,
        dtype=str(load.dtype),
        images=names,
        question=question,
        policy=policy_name,
        picture=None if drawn is None else str(drawn),
        runs=runs,
    )
    write_json(flags.json_file, report)


def _name_picture(
    flags: Any, names: Sequence[str], question: str, reducers: Sequence[Any], seed: int
) -> Path:
    if flags.out is not None:
        return Path(flags.out)
    settings = {"model": flags.model, "images": names, "visual_tokens": list(map(repr, reducers))}
    return Path("out") / image_name(seed, question, _title(reducers).split()[0], settings)


def _draw(answers: Answers, picture: Path, asked: Path | None) -> Path | None:
    """Write the picture; None where the tokens have no known places, and no picture was asked."""
    try:
        drawn = answers[0].draw_kept()
    except UnsupportedModelError as error:
        if asked is not None:
            raise
        say(f"note: no picture; {error}")
        return None
    write_file(picture, partial(drawn.save, format="PNG"))
    say(f"the patches that stay: {picture}")
    return picture


def _split_inputs(inputs: Sequence[str]) -> tuple[list[str], str]:
    """Image files, and the question behind them."""
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


def _title(reducers: Sequence[Any]) -> str:
    names = {entry.target.split(":")[1]: name for name, entry in REDUCERS.items()}
    parts = [
        f"{names.get(m.name, m.name)} {m.n_keep if m.keep is None else format(m.keep, 'g')}"
        for m in reducers
    ]
    return ", ".join(parts) or "all tokens"


_COLUMNS: dict[str, str] = {  # of a run, ready for JSON
    "": "{visual_tokens}",
    "visual tokens": "{n_kept} of {n_visual}",
    "tokens": "{tokens}",
    "forward passes": "{passes}",
    "s to first": "{first_seconds:.2f}",
    "s": "{seconds:.2f}",
}


def _describe(title: str, answers: Answers) -> dict[str, Any]:
    first = answers[0]
    return {
        "visual_tokens": title,
        "text": first.text,
        "is_finished": first.is_finished,
        "tokens": len(first.tokens),
        "passes": first.passes,
        "seconds": answers.seconds,
        "first_seconds": answers.first_seconds,
        "n_visual": first.n_visual,
        "n_kept": first.n_kept,
        "images": [{"n_visual": each.n_all, "n_kept": each.n_kept} for each in first.images],
        "stats": answers.stats.to_dict(),
    }
