"""`mmaccel evaluate export`: folders in the layouts that prompt suites read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from mmaccel.commands.options import parse_path
from mmaccel.limits import MAX_IMAGES

_HELP_PROMPTS = "the suite's own prompts; see docs/evaluation.md"


def export(
    folder: Annotated[Path, typer.Argument(help="images or clips, with their prompts")],
    suite: Annotated[str, typer.Option(help="geneval, dpg, hpsv2, vbench or partiprompts")],
    prompts: Annotated[Path, typer.Option(help=_HELP_PROMPTS)],
    out: Annotated[Path, typer.Option(help="folder to create", parser=parse_path, metavar="PATH")],
    per_prompt: Annotated[
        int | None,
        typer.Option(help="images of a prompt; by default those of the suite"),
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="leave out prompts without enough images")
    ] = False,
) -> None:
    """Link or copy images into a suite's layout. Nothing is moved; missing ones are listed."""
    from mmaccel.commands.files import check_folder, open_folder
    from mmaccel.commands.options import check_count
    from mmaccel.commands.terminal import say
    from mmaccel.errors import OptionError
    from mmaccel.evaluation.export import (
        SUITES,
        match_items,
        plan_files,
        read_prompts,
        write_files,
    )
    from mmaccel.evaluation.quality.image_folder import list_items
    from mmaccel.outputs.whole_files import write_whole

    if not out.name:
        raise OptionError(
            f"--out: expected the name of a folder to create, received {str(out)!r}; name one"
        )
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise OptionError(
            f"--out: expected an empty folder, or none yet, received {str(out)!r}, whose files "
            "would be counted too; choose another"
        )
    check_folder(out)
    if partial and suite == "hpsv2":
        raise OptionError(
            "--partial: expected all prompts of a style for hpsv2, whose code scores the next "
            "image instead of a missing one; generate the missing ones"
        )
    wanted = read_prompts(suite, prompts)
    layout = SUITES[suite]
    each = layout.per_prompt if per_prompt is None else per_prompt
    check_count("per-prompt", each, MAX_IMAGES)
    if layout.allowed and each not in layout.allowed:
        allowed = " or ".join(map(str, layout.allowed))
        raise OptionError(
            f"--per-prompt: expected {allowed} for {suite}, received {each}; leave it out"
        )
    matched = match_items(wanted, list_items(folder, layout.kinds), each, partial=partial)
    plan = plan_files(suite, matched)
    target = Path(os.path.realpath(out))  # Path.resolve raises RuntimeError for a link to itself
    open_folder(target.parent)
    write_files(target, plan, write_whole)
    n_left = len(wanted) - len(matched)
    left = f", {n_left} prompts left out" if n_left else ""
    say(f"{len(plan)} files for {len(matched)} prompts of {suite} in {out}{left}")
