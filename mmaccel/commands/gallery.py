"""`mmaccel gallery`: one page that shows the images of a run, or of two runs side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mmaccel.commands.options import parse_path
from mmaccel.commands.terminal import one_line

NAME = "gallery.html"
_MAX_NOTES = 20


def gallery(
    folder: Annotated[Path, typer.Argument(help="--out of a run")],
    against: Annotated[
        Path | None, typer.Option(help="--out of another run, shown next to it")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help=f"the page; by default {NAME} in the folder", parser=parse_path, metavar="FILE"
        ),
    ] = None,
) -> None:
    """Write one static page: filter by prompt, seed and policy, click for the facts of an image.

    The page links to the images and needs no network; move it with them. Broken images and lines
    of a manifest are left out, and named on stderr.
    """
    from mmaccel.batch.gallery import draw_page
    from mmaccel.commands.files import open_folder, write_text
    from mmaccel.commands.terminal import say
    from mmaccel.errors import OptionError
    from mmaccel.outputs.whole_files import check_target

    page = folder / NAME if out is None else out
    check_target(page, "--out")
    if page.is_file() and page.suffix.lower() not in (".html", ".htm"):
        raise OptionError(
            f"--out: expected a new file or a page to replace, received {str(page)!r}, which is "
            "another file; name a file ending in .html"
        )
    notes: list[str] = []
    text = draw_page(folder, against, page, notes.append)
    open_folder(page.parent)
    write_text(page, text)
    if len(notes) > _MAX_NOTES:
        notes[_MAX_NOTES:] = [f"{len(notes) - _MAX_NOTES} more"]
    for note in notes:
        print(f"left out: {one_line(note)}", file=sys.stderr)
    say(page)
