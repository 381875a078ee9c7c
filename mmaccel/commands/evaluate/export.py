"""`mmaccel evaluate export`: folders in the layouts that prompt suites read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mmaccel.checks import check_choice
from mmaccel.commands.flags import as_command
from mmaccel.commands.options import parse_path
from mmaccel.commands.terminal import say
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_IMAGES
from mmaccel.options import option

_HELP_PROMPTS = "the suite's own prompts; see docs/evaluation.md"
_HELP_COUNT = "images of a prompt; by default those of the suite"


@dataclass(frozen=True, kw_only=True)
class Export:
    """Link or copy images into a suite's layout. Nothing is moved; missing ones are listed."""

    folder: Annotated[Path, typer.Argument(help="images or clips, with their prompts")]
    suite: Annotated[str, typer.Option(help="geneval, dpg, hpsv2 or vbench")]
    prompts: Annotated[Path, typer.Option(help=_HELP_PROMPTS)]
    out: Annotated[Path, typer.Option(help="folder to create", parser=parse_path, metavar="PATH")]
    per_prompt: int | None = option(None, _HELP_COUNT, min=1, max=MAX_IMAGES)
    partial: Annotated[
        bool, typer.Option("--partial", help="leave out prompts without enough images")
    ] = False

    def run(self) -> None:
        from mmaccel.commands.files import check_folder, open_folder
        from mmaccel.evaluation.export import SUITES, match_items, read_prompts, write_suite
        from mmaccel.evaluation.quality.image_folder import list_items

        out, suite = self.out, self.suite
        check_choice("--suite", suite, SUITES)
        if not out.name or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
            raise OptionError(
                f"--out: expected an empty folder, or none yet, received {str(out)!r}, whose files "
                "would be counted too; choose another"
            )
        check_folder(out)
        if self.partial and suite == "hpsv2":
            raise OptionError(
                "--partial: expected all prompts of a style for hpsv2, whose code scores the next "
                "image instead of a missing one; generate the missing ones"
            )
        wanted = read_prompts(suite, self.prompts)
        layout = SUITES[suite]
        each = layout.per_prompt if self.per_prompt is None else self.per_prompt
        if layout.allowed:
            check_choice("--per-prompt", each, layout.allowed, hint="leave it out")
        items = list_items(self.folder, layout.kinds)
        matched = match_items(wanted, items, each, partial=self.partial)
        target = Path(os.path.realpath(out))  # Path.resolve raises RuntimeError for a link to self
        open_folder(target.parent)
        count = write_suite(target, suite, matched)
        n_left = len(wanted) - len(matched)
        left = f", {n_left} prompts left out" if n_left else ""
        say(f"{count} files for {len(matched)} prompts of {suite} in {out}{left}")


export = as_command(Export, pauses=False)
