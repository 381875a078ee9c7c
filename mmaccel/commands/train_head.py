"""`mmaccel train-head`: an EAGLE head for a causal LM, made from texts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mmaccel.commands import options as shared
from mmaccel.commands.flags import as_command
from mmaccel.options import HeadTraining, option


@dataclass(frozen=True, kw_only=True)
class TrainHead:
    """Make an EAGLE head for --set drafts=FOLDER. A stopped command goes on where it was."""

    model: str = option(..., "a demo model, a folder or a hub id", argument=True)
    out: Path = option(..., "folder for the head", argument=True, metavar="OUT")
    texts: str = option(..., "a prompt file: .txt, .jsonl, .csv or .tsv")
    training: HeadTraining
    device: shared.Device = "auto"
    threads: shared.Threads = None

    def run(self) -> None:
        from mmaccel.batch.prompts import read_prompts
        from mmaccel.catalog import DEMO_WEIGHTS, TEXT_MODELS
        from mmaccel.commands.files import new_report, open_folder
        from mmaccel.commands.terminal import say

        shared.set_threads(self.threads)
        lines = [row.prompt for row in read_prompts(self.texts)]
        from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig, load_causal_lm
        from mmaccel.pipelines.hosts.loading.placement import choose_placement
        from mmaccel.pipelines.hosts.loading.sources import find_model
        from mmaccel.samplers.drafting.heads.eagle_training import make_head

        source = find_model(self.model, {name: DEMO_WEIGHTS / name for name in TEXT_MODELS})
        open_folder(self.out, "OUT")
        device, dtype = choose_placement(self.device, "float32")
        load_config = LoadConfig(device=device, dtype=dtype)
        opened, tokenizer = load_causal_lm(source, load_config)
        facts = new_report(str(load_config.device), made_for=self.model)
        make_head(opened, tokenizer, lines, self.training, self.out, facts=facts)
        say(self.out)


train_head = as_command(TrainHead, pauses=False)
