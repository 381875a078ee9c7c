"""`--fused` and `--no-fused` of every command that loads a model reach its pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmaccel import ImageToText, ImageToVideo, OptionError, TextToImage, TextToSpeech
from mmaccel.cli import main
from tests.fixtures.media import image

COMMANDS: dict[str, tuple[Any, list[str]]] = {
    "generate": (TextToImage, ["generate", "a cat"]),
    "generate --prompts": (TextToImage, ["generate", "--prompts", "rows.txt"]),
    "evaluate speed": (TextToImage, ["evaluate", "speed", "scenes"]),
    "serve images": (TextToImage, ["serve", "--port", "0"]),
    "serve speech": (TextToSpeech, ["serve", "--port", "0", "--task", "speech", "--model", "a/b"]),
    "speak": (TextToSpeech, ["speak", "fox", "--model", "a/b"]),
    "animate": (ImageToVideo, ["animate", "start.png", "--model", "a/b"]),
    "answer": (ImageToText, ["answer", "start.png", "how many?", "--model", "a/b"]),
}
OPTIONS: dict[str, Any] = {"": "auto", "--fused": True, "--no-fused": False}


@pytest.fixture(autouse=True, scope="module")
def _load_once() -> None:
    """Not here: a model that another test has loaded asks its pipeline nothing."""


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("command", COMMANDS)
def test_the_option_reaches_the_pipeline(
    command: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    if command.startswith("serve"):
        pytest.importorskip("starlette")
        pytest.importorskip("uvicorn")
    monkeypatch.chdir(tmp_path)
    image().save("start.png")
    Path("rows.txt").write_text("a cat\n", encoding="utf-8")
    pipeline, arguments = COMMANDS[command]
    asked: list[Any] = []

    def from_pretrained(*_: Any, **options: Any) -> None:
        asked.append(options["fused"])
        raise OptionError("model: not loaded")

    monkeypatch.setattr(pipeline, "from_pretrained", from_pretrained)
    assert main([*arguments, *filter(None, [option])]) == 2
    assert "model: not loaded" in capsys.readouterr().err
    assert asked == [OPTIONS[option]]
