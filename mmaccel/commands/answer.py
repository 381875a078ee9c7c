"""`mmaccel answer`: a question about images, with all visual tokens, with fewer, or both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mmaccel.commands import options as shared
from mmaccel.commands.flags import Without, as_command
from mmaccel.commands.media import MediaFlags
from mmaccel.commands.options import VisualFlags, WindowPolicyFlags
from mmaccel.options import LoadOptions, SamplingOptions

_HELP_INPUTS = "image files, then the question"
_HELP_MODEL = "scenes-vqa, or a folder or hub id of a vision-language model"
_HELP_COMPARE = "answer with all visual tokens too"
_HELP_SEED = "of the answer; by default 0, and drawn and printed above temperature 0"
_HELP_OUT = "PNG of the patches that stay; by default in out/"


@dataclass(frozen=True, kw_only=True)
class Answer(MediaFlags):
    """Answer a question about images; with --visual-tokens also draw which patches stay."""

    inputs: Annotated[list[str], typer.Argument(help=_HELP_INPUTS, metavar="IMAGE... QUESTION")]
    model: Annotated[str, typer.Option(help=_HELP_MODEL)] = "scenes-vqa"
    method: WindowPolicyFlags
    visual: VisualFlags
    compare: Annotated[bool, typer.Option("--compare", help=_HELP_COMPARE)] = False
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "--max-new-tokens", help="cut longer answers")
    ] = 64
    seed: Annotated[int | None, typer.Option(help=_HELP_SEED)] = None
    sampling: Annotated[SamplingOptions, Without("guidance_scale")]
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help=_HELP_OUT, parser=shared.parse_path, metavar="FILE"),
    ] = None
    json_file: shared.JsonFile = None
    load: Annotated[LoadOptions, Without("family")]

    def run(self) -> None:
        """Answer."""
        from mmaccel.commands.jobs.answer import AnswerJob

        AnswerJob(self).run()


answer = as_command(Answer)
