"""A widget, the command line's option and the documents have one name for one thing."""

from __future__ import annotations

import re

import pytest

from mmaccel.cli import _command
from mmaccel.comfy.nodes import NODES
from tests.architecture.source import ROOT

COMMANDS = {  # node -> the command that does the same
    "MMAccelTextToImage": "generate",
    "MMAccelLoadModel": "generate",
    "MMAccelGenerateImage": "generate",
    "MMAccelCompare": "generate",
    "MMAccelLoadSpeechModel": "speak",
    "MMAccelGenerateSpeech": "speak",
    "MMAccelLoadTextToVideoModel": "animate",
    "MMAccelTextToVideo": "animate",
    "MMAccelLoadVideoModel": "animate",
    "MMAccelGenerateVideo": "animate",
    "MMAccelLoadVisionModel": "answer",
    "MMAccelVisualTokens": "answer",
    "MMAccelAnswerQuestion": "answer",
}
ARGUMENTS = {"prompt", "text", "question"}  # what follows the command
ONLY_HERE = {("answer", "batch_size"), ("answer", "method")}  # one question; --visual-tokens NAME


def options_of(command: str) -> list[str]:
    """The first name of each option, which `--help` shows first."""
    return [p.opts[0] for p in _command().commands[command].params if p.opts[0].startswith("--")]


@pytest.mark.parametrize(("node", "command"), COMMANDS.items(), ids=list(COMMANDS))
def test_widgets_have_the_names_of_options(node: str, command: str) -> None:
    options = options_of(command)
    for widget in NODES[node].widgets:
        if widget.name in ARGUMENTS or (command, widget.name) in ONLY_HERE:
            continue
        assert f"--{widget.name.replace('_', '-')}" in options, (node, widget.name)


def test_the_table_of_names_has_every_widget_and_true_options() -> None:
    assert set(COMMANDS) == {spec.id for spec in NODES.values() if ": " not in spec.title} - {
        "MMAccelStats"
    }
    page = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    table = page.split("| widget | command line | Python |\n| --- | --- | --- |\n")[1]
    rows = [line.split(" | ") for line in table.split("\n\n")[0].splitlines()]
    named = set(re.findall(r"`(\w+)`", " ".join(row[0] for row in rows)))
    assert named >= {widget.name for name in COMMANDS for widget in NODES[name].widgets}
    known = {
        option
        for command in set(COMMANDS.values())
        for p in _command().commands[command].params
        for option in (*p.opts, *p.secondary_opts)
    }
    written = set(re.findall(r"(--?[a-z][a-z-]*)", " ".join(row[1] for row in rows)))
    assert written and written <= known, written - known
