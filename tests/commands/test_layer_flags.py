"""`--kv-cache`, `--attention` and `--tree`, whose methods are those of the catalog."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmaccel.cli import main
from mmaccel.commands.options import LayerFlags
from tests.fixtures.shared import media_folders
from tests.fixtures.tiny_model import CAPTIONS


def facts_of(folder: Path) -> list[dict[str, Any]]:
    """What the images of a folder say of themselves."""
    found = []
    for file in sorted(folder.glob("*.png")):
        with Image.open(file) as image:
            if "mmaccel" in image.text:
                found.append(json.loads(image.text["mmaccel"]))
    return found


def test_images_say_under_which_methods_they_were_made(tiny_folder: Path, tmp_path: Path) -> None:
    command = ["generate", CAPTIONS[0], "--model", str(tiny_folder), "--seed", "3"]
    command += ["--out", str(tmp_path)]
    assert main(command) == 0
    layers = ["--kv-cache", "streaming-llm:budget=3:sinks=1", "--attention", "quest:budget=0.5"]
    assert main([*command, *layers]) == 0
    tree = ["--tree", "sequoia:nodes=4", "--drafts", "token-recycling", "--window", "10"]
    assert main([*command, *tree]) == 0
    by_cache = {each.get("kv_cache"): each for each in facts_of(tmp_path)}
    assert len(facts_of(tmp_path)) == 3  # each under a name of its own
    reduced = by_cache["StreamingLLM(budget=3, every=None, sinks=1, rerotate=False)"]
    assert reduced["attention"].startswith("Quest(budget=0.5") and reduced["exactness"] == "relaxed"
    trees = [each["policy_options"]["tree"] for each in facts_of(tmp_path)]
    assert sum(tree is not None and tree.startswith("Sequoia(nodes=4") for tree in trees) == 1


def test_utterances_say_it_too(tmp_path: Path) -> None:
    model, codec = media_folders("llasa")
    command = ["speak", "a red fox", "--model", str(model), "--codec", str(codec), "--seed", "3"]
    command += ["--max-seconds", "0.05", "--out", str(tmp_path)]
    assert main([*command, "--kv-cache", "snapkv:budget=4:window=2"]) == 0
    (file,) = tmp_path.glob("*.json")
    facts = json.loads(file.read_text(encoding="utf-8"))
    assert facts["kv_cache"].startswith("SnapKV(budget=4")


@pytest.mark.parametrize("text", ["true", "True", "TRUE", "false", "False"])
def test_booleans_are_read_in_any_case(text: str) -> None:
    methods = LayerFlags(kv_cache=f"streaming-llm:rerotate={text}").read()
    assert methods["kv_cache"].rerotate is (text.lower() == "true")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--kv-cache", "streaming"], "did you mean streaming-llm?"),
        (["--kv-cache", "snapkv:bugdet=4"], "did you mean budget?"),
        (["--kv-cache", "snapkv:budget"], "kv_cache: expected name=value"),
        (["--kv-cache", "streaming-llm:rerotate=maybe"], "StreamingLLM.rerotate: expected"),
        (["--attention", "quest:budget=7"], "Quest.budget: expected"),
        (["--tree", "comb", "--set", "tree=comb"], "--tree: expected it once"),
        (["--kv-cache", "snapkv", "--prompts", "rows.txt"], "expected no --kv-cache with it"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_methods_end_before_a_model_is_loaded(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [] if "--prompts" in flags else [CAPTIONS[0]]
    nowhere = ["--model", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]
    assert main(["generate", *prompts, *flags, *nowhere]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
