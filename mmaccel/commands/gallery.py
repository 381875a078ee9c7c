"""`mmaccel gallery`: a page over the images of a run, or of two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

NAME = "gallery.html"


def gallery(
    folder: Annotated[Path, typer.Argument(help="--out of a run")],
    against: Annotated[
        Path | None, typer.Option(help="--out of another run, shown beside it")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help=f"the page; by default {NAME} in the folder")
    ] = None,
) -> None:
    """Write one static page: filter by prompt, seed and policy, click for what an image is.

    The page links to the images and needs no network; move it with them.
    """
    from mmaccel.batch.gallery import draw_page
    from mmaccel.commands.run_setup import open_folder
    from mmaccel.outputs.image_files import write_whole

    page = folder / NAME if out is None else out
    text = draw_page(folder, against, page)
    open_folder(page.parent)
    write_whole(page, lambda path: path.write_text(text, encoding="utf-8"))
    print(page)
