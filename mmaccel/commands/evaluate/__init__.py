"""`mmaccel evaluate`: quality of images, clips and speech, exactness and speed of policies,
and what fewer visual tokens, smaller caches and sparse attention cost.
"""

from __future__ import annotations

import typer

from mmaccel.commands.evaluate.answers import cache, visual_tokens
from mmaccel.commands.evaluate.export import export
from mmaccel.commands.evaluate.policies import exactness, speed
from mmaccel.commands.evaluate.quality import clips, pictures, speech

evaluate = typer.Typer(
    name="evaluate",
    help="Measure quality, exactness and speed; hand images to other suites.",
    no_args_is_help=True,
    add_completion=False,
)
for command in (pictures, clips, speech, exactness, speed, export):
    evaluate.command()(command)
evaluate.command("visual-tokens")(visual_tokens)
evaluate.command("cache")(cache)
