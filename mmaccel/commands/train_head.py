"""`mmaccel train-head`: an EAGLE head for a causal LM, made from texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmaccel.checks import show
from mmaccel.commands import options as shared
from mmaccel.commands.flags import with_flags
from mmaccel.errors import OptionError
from mmaccel.limits import parse_json, read_lines
from mmaccel.options import HeadTraining


@with_flags
def train_head(
    model: Annotated[str, typer.Argument(help="a demo model, a folder or a hub id")],
    out: Annotated[Path, typer.Argument(help="folder for the head")],
    texts: Annotated[Path, typer.Option(help="one a line; in .jsonl the field text or prompt")],
    training: HeadTraining,
    device: shared.Device = "auto",
    threads: shared.Threads = None,
) -> None:
    """Make an EAGLE head for --set drafts=FOLDER. A stopped command goes on where it was."""
    from mmaccel.catalog import DEMO_WEIGHTS, TEXT_MODELS
    from mmaccel.commands.files import new_report, open_folder
    from mmaccel.commands.terminal import say

    shared.set_threads(threads)
    lines = read_texts(texts)
    open_folder(out, "OUT")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mmaccel.pipelines.loading.checkpoint import LoadConfig, load_model, load_processor
    from mmaccel.pipelines.loading.placement import choose_placement
    from mmaccel.pipelines.loading.sources import find_model
    from mmaccel.samplers.drafting.heads.eagle_training import make_head

    source = find_model(model, {name: DEMO_WEIGHTS / name for name in TEXT_MODELS})
    load_config = LoadConfig(*choose_placement(device, "float32"))
    tokenizer = load_processor(AutoTokenizer, source, load_config)
    opened = load_model(AutoModelForCausalLM, source, load_config)
    facts = new_report(str(load_config.device), made_for=model)
    make_head(opened, tokenizer, lines, training, out, facts=facts)
    say(out)


def read_texts(file: Path) -> list[str]:
    """The texts of a file: its lines, or of a .jsonl their field `text` or `prompt`.

    Raises:
        OptionError: a file or line that cannot be read, with its number.
    """
    lines = read_lines(file, "--texts")
    if file.suffix != ".jsonl":
        return lines
    texts = []
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
            texts.append(str(row["text"] if "text" in row else row["prompt"]))
        except (ValueError, TypeError, KeyError) as error:
            raise OptionError(
                f"--texts {str(file)!r}: expected an object with text in line {number}, received "
                f'{show(line)}; write {{"text": "..."}}'
            ) from error
    return texts
