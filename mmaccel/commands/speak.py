"""`mmaccel speak`: speech from texts, under any window policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from mmaccel.commands.flags import as_command
from mmaccel.commands.media import CodecFlags

_HELP_CODEC = "folder or hub id of the decoder of codes to sound; by default the authors'"
_HELP_SEED = "of the first text, the next has the next; by default drawn, and printed"
_HELP_SECONDS = "cut longer ones; by default 30, or as long as the model can"


@dataclass(frozen=True, kw_only=True)
class Speak(CodecFlags):
    """Speak texts, each into a WAV file with a JSON file next to it: text, seed, policy, stats.

    Temperature, truncation and penalty are by default those the model's authors recommend.
    """

    texts: Annotated[list[str], typer.Argument(help="one file each")]
    model: Annotated[str, typer.Option(help="folder or hub id, such as HKUSTAudio/Llasa-1B")]
    codec: Annotated[str | None, typer.Option(help=_HELP_CODEC)] = None
    seed: Annotated[int | None, typer.Option(help=_HELP_SEED)] = None
    voice: Annotated[str | None, typer.Option(help="for models that know several")] = None
    max_seconds: Annotated[float | None, typer.Option(help=_HELP_SECONDS)] = None
    repetition_penalty: Annotated[float | None, typer.Option(help="1 is none")] = None
    batch_size: Annotated[int, typer.Option(help="texts decoded at a time at most")] = 1

    def run(self) -> None:
        """Speak."""
        from mmaccel.commands.jobs.speech import SpeechJob

        SpeechJob(self).run()


speak = as_command(Speak)
