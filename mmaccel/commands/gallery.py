"""`mmaccel gallery`: one page that shows the images of a run, or of two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

NAME = "gallery.html"


def gallery(
    folder: Annotated[Path, typer.Argument(help="--out of a run")],
    against: Annotated[
        Path | None, typer.Option(help="--out of another run, shown next to it")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help=f"the page; by default {NAME} in the folder")
    ] = None,
) -> None:
    """Write one static page: filter by prompt, seed and policy, click for the facts of an image.

    The page links to the images and needs no network; move it with them.
    """
    from mmaccel.batch.gallery import draw_page
    from mmaccel.commands.files import open_folder, write_text
    from mmaccel.commands.terminal import say

    page = folder / NAME if out is None else out
    text = draw_page(folder, against, page)
    open_folder(page.parent)
    write_text(page, text)
    say(page)
