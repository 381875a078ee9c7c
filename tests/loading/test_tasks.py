"""A model that is given to the command of others: what it is, and which command takes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmaccel import ImageToText, ImageToVideo, TextToImage, TextToSpeech
from mmaccel.cli import main
from mmaccel.errors import OptionError
from mmaccel.pipelines.hosts.loading.tasks import TASKS, check_task, find_command, find_demos

CLASSES = {
    "generate": TextToImage, "answer": ImageToText, "speak": TextToSpeech, "animate": ImageToVideo
}  # fmt: skip
DEMOS = {"scenes": "generate", "scenes-masked": "generate", "scenes-vqa": "answer"}
OTHERS = {"recall": "evaluate cache"}


def test_every_demo_belongs_to_a_command() -> None:
    found = {name: find_command(folder) for name, folder in find_demos().items()}
    assert DEMOS.items() <= found.items() and set(found.values()) <= set(TASKS)
    assert OTHERS.items() <= found.items()


@pytest.mark.parametrize("name", [*DEMOS, *OTHERS])
@pytest.mark.parametrize("command", CLASSES)
def test_another_command_is_named(command: str, name: str) -> None:
    own = (DEMOS | OTHERS)[name]
    if own == command:
        check_task(name, command)
        return
    with pytest.raises(OptionError) as caught:
        CLASSES[command].from_pretrained(find_demos()[name])
    message = str(caught.value)
    assert TASKS[command].pipeline in message and TASKS[own].does in message
    assert f"mmaccel {own} {TASKS[own].option}{find_demos()[name]}" in message


@pytest.mark.parametrize(
    ("task", "given", "run"),
    [
        ([], "SPEECH", "serve --task speech --model "),
        (["--task", "speech"], "scenes", "serve --model scenes"),
        (["--task", "speech"], "scenes-vqa", "answer --model scenes-vqa"),
    ],
)
def test_a_server_names_the_task(
    task: list[str], given: str, run: str, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"<|s_0|>": 0}}}')
    name = str(tmp_path) if given == "SPEECH" else given
    assert main(["serve", *task, "--model", name]) == 2
    assert f"or run mmaccel {run}" in capsys.readouterr().err


def test_other_models_are_left_to_their_loader(tmp_path: Path) -> None:
    for config in ({"model_type": "llama"}, {"model_type": "janus", "vision_config": {}}, {}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        for command in CLASSES:
            check_task(tmp_path, command)
    (tmp_path / "config.json").write_text('{"model_type": "llava", "vision_config": {}}')
    check_task(tmp_path, "answer")
    check_task("owner/name", "speak")
