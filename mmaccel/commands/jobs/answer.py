"""The run of `mmaccel answer`: a question, and a picture of the patches that stay."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmaccel.catalog import REDUCERS
from mmaccel.checks import check_int
from mmaccel.commands.files import check_file, new_report, write_json
from mmaccel.commands.jobs.media import MediaJob
from mmaccel.commands.options import pick_seed
from mmaccel.commands.terminal import make_table, say, wide_console
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.loading import load_keywords
from mmaccel.options import given
from mmaccel.outputs.image_files import image_name
from mmaccel.outputs.whole_files import check_target, write_whole
from mmaccel.pipelines.image_to_text.loading import check_model
from mmaccel.pipelines.image_to_text.pipeline import ImageToText, choose_sampling
from mmaccel.pipelines.image_to_text.prompts import check_places, check_questions, read_images
from mmaccel.pipelines.loading.hub import is_hub_id
from mmaccel.reduction.visual_tokens.contract import check_reducers
from mmaccel.results import Stats

if TYPE_CHECKING:
    from mmaccel.pipelines.image_to_text.types import Answers


class AnswerJob(MediaJob):
    """A question to answer, with fewer visual tokens, with all, or both.

    Attributes:
        names: of the image files.
        images: the same, read.
        question: about them.
        reducers: methods for visual tokens.
        picture: file of the patches that stay; None without reducers.
        made: answers, by what they keep.
    """

    unit = "answer"
    n_files = 1
    state = "the answer is"
    stopped = "stopped"

    def pick_seed(self) -> tuple[int, bool]:
        """See `MediaJob`; greedy answers have 0."""
        seed = self.flags.seed
        return pick_seed(seed if self.flags.sampling.temperature else seed or 0)

    def read(self) -> None:
        flags = self.flags
        self.made: dict[str, Answers] = {}
        self.names, self.question = _split_inputs(flags.inputs)
        self.name, self.policy = flags.method.choose("window")
        methods = flags.visual.read()
        self.reducers = check_reducers(methods) if methods else ()
        for option, value in (("--compare", flags.compare), ("--out", flags.out)):
            if value and not self.reducers:
                raise OptionError(
                    f"{option}: expected --visual-tokens with it, received none; name a method "
                    "such as --visual-tokens dart --keep 0.22"
                )
        check_int("--max-tokens", flags.max_tokens, 1, hint="64 suits short answers")
        choose_sampling(**given(flags.sampling))
        check_questions(self.question)
        (self.images,) = read_images(self.names, 1)
        check_places(self.question, len(self.images))
        self.picture = self.name_picture() if self.reducers else None
        self.out = None
        if self.picture is not None:
            check_target(self.picture, "--out")
            self.out = self.picture.parent
        check_file("--json", flags.json_file)
        if not is_hub_id(flags.model):
            check_model(flags.model, self.load.trust_remote_code)

    def name_picture(self) -> Path:
        """The file of the picture; another question, image or method has another name.

        Raises:
            OptionError: a name of another format.
        """
        out: Path | None = self.flags.out
        if out is None:
            own = {"model": self.flags.model, "images": self.names}
            own |= {"visual_tokens": list(map(repr, self.reducers))}
            name = _title(self.reducers).split()[0]
            return Path("out") / image_name(self.seed, self.question, name, own)
        if out.suffix.lower() != ".png":
            raise OptionError(
                f"--out: expected a name that ends in .png, received {str(out)!r}; change its end"
            )
        return out

    def open(self) -> ImageToText:
        from transformers.utils import logging

        logging.disable_progress_bar()
        return ImageToText.from_pretrained(
            self.flags.model,
            policy=self.policy,
            visual_tokens=self.reducers or None,
            **self.layers,
            **load_keywords(self.load),
        )

    def progress(self) -> AbstractContextManager[Any]:
        """An answer has no bar."""
        return nullcontext()

    def decode(self, bar: Any) -> Stats:
        flags = self.flags
        for title, pipe in self.pipes().items():
            self.made[title] = pipe(
                self.images,
                self.question,
                max_new_tokens=flags.max_tokens,
                seed=self.seed,
                **given(flags.sampling),
            )
        return list(self.made.values())[-1].stats

    def pipes(self) -> dict[str, ImageToText]:
        """The pipeline by what it keeps; to compare, one without reducers before it.

        Those that are compared answer once before, so that neither is measured with what a first
        run loads.
        """
        own = {_title(self.reducers): self.pipe}
        if not self.flags.compare:
            return own
        plain = self.pipe.with_methods(policy=self.policy, **self.layers)
        pipes = {_title(()): plain, **own}
        for each in pipes.values():
            each(self.images, self.question, max_new_tokens=1)
        return pipes

    def report(self, stats: Stats) -> None:
        """Print the answers and what they cost, draw what stayed, and write the report."""
        flags = self.flags
        _show(self.made)
        drawn = self.draw()
        say(stats)
        report = new_report(
            self.load.device,
            model=flags.model,
            dtype=self.dtype,
            images=self.names,
            question=self.question,
            policy=self.name,
            picture=None if drawn is None else str(drawn),
            runs=[_describe(title, answers) for title, answers in self.made.items()],
        )
        write_json(flags.json_file, report)

    def draw(self) -> Path | None:
        """Write the picture; None without one, and where the tokens have no known places.

        Raises:
            UnsupportedModelError: they have none, and the picture was asked for by name.
        """
        if self.picture is None:
            return None
        try:
            picture = self.made[_title(self.reducers)][0].draw_kept()
        except UnsupportedModelError as error:
            if self.flags.out is not None:
                raise
            say(f"note: no picture; {error}")
            return None
        save = partial(picture.save, format="PNG")
        self.write(self.picture, partial(write_whole, write=save))
        say(f"the patches that stay: {self.picture}")
        return self.picture


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


def _title(reducers: Sequence[Any]) -> str:
    """What a run keeps, in the words of the command line."""
    names = {entry.target.split(":")[1]: name for name, entry in REDUCERS.items()}
    parts = [
        f"{names.get(m.name, m.name)} {m.n_keep if m.keep is None else format(m.keep, 'g')}"
        for m in reducers
    ]
    return ", ".join(parts) or "all tokens"


def _show(made: Mapping[str, Answers]) -> None:
    """Print the answers, and what they cost."""
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
