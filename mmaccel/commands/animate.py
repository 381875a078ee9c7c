"""`mmaccel animate`: clips that continue an image or the end of another clip."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mmaccel.commands.flags import as_command
from mmaccel.commands.media import CodecFlags

_HELP_CODEC = "folder or hub id of the decoder of tokens to frames; by default the authors'"
_HELP_SEED = "of a start's first clip, the next has the next; by default drawn, and printed"
_HELP_FORMAT = "mp4 or webp (lossless)"


@dataclass(frozen=True, kw_only=True)
class Animate(CodecFlags):
    """Continue images or videos, each clip in a file with a JSON file next to it.

    Temperature and truncation are by default those the model's authors recommend.
    """

    starts: Annotated[list[Path], typer.Argument(help="images or videos to continue")]
    model: Annotated[str, typer.Option(help="folder or hub id: nvidia/Cosmos-Predict1-4B")]
    codec: Annotated[str | None, typer.Option(help=_HELP_CODEC)] = None
    count: Annotated[int, typer.Option(help="clips of each start")] = 1
    seed: Annotated[int | None, typer.Option(help=_HELP_SEED)] = None
    batch_size: Annotated[int, typer.Option(help="clips decoded at a time at most")] = 1
    file_format: Annotated[str | None, typer.Option("--format", help=_HELP_FORMAT)] = None

    def run(self) -> None:
        """Continue the starts."""
        from mmaccel.commands.jobs.clip import ClipJob

        ClipJob(self).run()


animate = as_command(Animate)
