"""`mmaccel evaluate`: quality of images, clips, speech and words, exactness and speed of policies,
and what fewer visual tokens, smaller caches and sparse attention cost.
"""

from __future__ import annotations

import typer

from mmaccel.commands.evaluate.cache import cache
from mmaccel.commands.evaluate.clips import clips
from mmaccel.commands.evaluate.exactness import exactness
from mmaccel.commands.evaluate.export import export
from mmaccel.commands.evaluate.images import images
from mmaccel.commands.evaluate.speech import speech
from mmaccel.commands.evaluate.speed import speed
from mmaccel.commands.evaluate.visual_tokens import visual_tokens
from mmaccel.commands.evaluate.words import words

evaluate = typer.Typer(
    name="evaluate",
    help="Measure quality, exactness and speed; hand images to other suites.",
    no_args_is_help=True,
    add_completion=False,
)
evaluate.command("pictures")(images)
for command in (clips, speech, exactness, speed, visual_tokens, cache, words, export):
    evaluate.command()(command)
