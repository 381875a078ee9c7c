"""`mmaccel train-head`: an EAGLE head for a causal LM, made from texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmaccel.commands import options as shared
from mmaccel.commands.flags import with_flags
from mmaccel.options import HeadTraining


@with_flags
def train_head(
    model: Annotated[str, typer.Argument(help="a demo model, a folder or a hub id")],
    out: Annotated[Path, typer.Argument(help="folder for the head")],
    texts: Annotated[str, typer.Option(help="a prompt file: .txt, .jsonl, .csv or .tsv")],
    training: HeadTraining,
    device: shared.Device = "auto",
    threads: shared.Threads = None,
) -> None:
    """Make an EAGLE head for --set drafts=FOLDER. A stopped command goes on where it was."""
    from mmaccel.batch.prompts import read_prompts
    from mmaccel.catalog import DEMO_WEIGHTS, TEXT_MODELS
    from mmaccel.commands.files import new_report, open_folder
    from mmaccel.commands.terminal import say

    shared.set_threads(threads)
    lines = [row.prompt for row in read_prompts(texts)]
    from mmaccel.pipelines.loading.checkpoint import LoadConfig, load_causal_lm
    from mmaccel.pipelines.loading.placement import choose_placement
    from mmaccel.pipelines.loading.sources import find_model
    from mmaccel.samplers.drafting.heads.eagle_training import make_head

    source = find_model(model, {name: DEMO_WEIGHTS / name for name in TEXT_MODELS})
    open_folder(out, "OUT")
    load_config = LoadConfig(*choose_placement(device, "float32"))
    opened, tokenizer = load_causal_lm(source, load_config)
    facts = new_report(str(load_config.device), made_for=model)
    make_head(opened, tokenizer, lines, training, out, facts=facts)
    say(out)
