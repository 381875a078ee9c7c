"""No door runs code that a checkpoint brings, whatever stdin answers, unless the caller trusts it.

transformers asks "Do you wish to run the custom code? [y/N]" where nobody said; stdin says yes.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import mmaccel
from mmaccel.cli import main
from mmaccel.comfy.nodes import NODES
from mmaccel.errors import UnsupportedModelError
from tests.fixtures.code import plant_code
from tests.fixtures.lanes import mostly_slow
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.video import build_video

DOORS = {  # command -> arguments beside model and flag; families that load a causal LM by AutoModel
    "generate --prompts": ["generate", "--prompts", "p.txt", "--family", "words", "--out", "o"],
    "evaluate exactness": ["evaluate", "exactness", "--family", "words", "--count", "2",
                           "--samples", "0"],
    "doctor": ["doctor", "--out", "o"],
    "speak": ["speak", "blue cat", "--max-seconds", "0.05", "--out", "o"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _answer_yes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 50))
    modules = tmp_path / "modules"  # where transformers copies code to
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    monkeypatch.syspath_prepend(str(modules))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text("a red circle\n", encoding="utf-8")


@pytest.fixture(scope="module")
def sources(
    tiny_folder: Path,
    speech_folders: dict[str, tuple[Path, Path]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Path, list[str]]]:
    """The checkpoint that a door loads, and the arguments for its codec."""
    lm = tmp_path_factory.mktemp("lm") / "lm"
    build_lm("llama").save_pretrained(lm)

    def find(door: str) -> tuple[Path, list[str]]:
        if door == "speak":
            return speech_folders["llasa"][0], ["--codec", str(speech_folders["llasa"][1])]
        return (lm if door == "doctor" else tiny_folder), []

    return find


@pytest.mark.parametrize("door", mostly_slow(DOORS, "doctor"))
def test_no_command_runs_a_checkpoints_code_unless_told(
    door: str, sources: Callable[[str], tuple[Path, list[str]]], tmp_path: Path, capsys
) -> None:
    source, more = sources(door)
    marker = tmp_path / "marker"
    folder = plant_code(source, tmp_path / "planted", marker)
    model = [str(folder)] if door.startswith("evaluate") else ["--model", str(folder)]
    name = DOORS[door][:2] if door.startswith("evaluate") else DOORS[door][:1]
    arguments = [*name, *model, *more, *DOORS[door][len(name) :]]
    assert main(arguments) == 1
    said = " ".join("".join(capsys.readouterr()).split())
    assert not marker.exists()
    assert "received Python code of the checkpoint" in said and "[y/N]" not in said
    assert "own.OwnModel" in said and "--trust-remote-code" in said
    assert main([*arguments, "--trust-remote-code"]) == 0
    assert marker.read_text() == "ran\n"


def test_the_python_api_runs_no_code_unless_told(tiny_folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    folder = plant_code(tiny_folder, tmp_path / "planted", marker)
    with pytest.raises(UnsupportedModelError):
        mmaccel.TextToImage.from_pretrained(folder, family="words")
    assert not marker.exists()
    pipe = mmaccel.TextToImage.from_pretrained(folder, family="words", trust_remote_code=True)
    plain = mmaccel.TextToImage.from_pretrained(tiny_folder)
    assert torch.equal(pipe("a red circle", seed=0).tokens, plain("a red circle", seed=0).tokens)
    assert marker.read_text() == "ran\n"


@pytest.mark.parametrize(
    "family", mostly_slow(["janus", "emu3", "chameleon", "imagegpt", "glm-image"], "chameleon")
)
def test_code_next_to_a_known_class_stays_where_it_is(
    family: str, built: Callable[[str], Path], tmp_path: Path
) -> None:
    """Many published checkpoints name code of their own for classes that transformers has too."""
    marker = tmp_path / "marker"
    folder = shutil.copytree(built(family), tmp_path / "planted")
    (folder / "own.py").write_text(f"open({str(marker)!r}, 'w')\n", encoding="utf-8")
    classes = ("Config", "Model", "ModelForCausalLM", "Processor", "ImageProcessor")
    names = {f"Auto{name}": f"own.Own{name}" for name in classes}
    for file in folder.glob("*config.json"):
        own = names | {"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]}
        content = json.loads(file.read_text(encoding="utf-8")) | {"auto_map": own}
        file.write_text(json.dumps(content), encoding="utf-8")
    size = {"emu3": (32, 24), "glm-image": (128, 96)}.get(family)
    mmaccel.TextToImage.from_pretrained(folder, size=size)
    assert not marker.exists()


class _Writer(nn.Module):
    """TorchScript that makes a file when it runs."""

    def __init__(self, marker: str) -> None:
        super().__init__()
        self.marker = marker

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() + torch.from_file(self.marker, True, 4)


def test_torchscript_that_names_files_does_not_run_unless_told(tmp_path: Path, capsys) -> None:
    model, codec = build_video(tmp_path)
    marker = tmp_path / "marker"
    torch.jit.script(_Writer(str(marker))).save(str(codec / "encoder.jit"))
    Image.new("RGB", (48, 32)).save("start.png")
    arguments = ["animate", "start.png", "--model", str(model), "--codec", str(codec), "--out", "o"]
    assert main(arguments) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "code that names 'from_file', which can reach files" in said and not marker.exists()
    with pytest.raises(UnsupportedModelError, match="trust_remote_code=True"):
        mmaccel.ImageToVideo.from_pretrained(model, codec=codec)
    pipe = mmaccel.ImageToVideo.from_pretrained(model, codec=codec, trust_remote_code=True)
    with pytest.raises(UnsupportedModelError, match="expected an encoder to whole numbers"):
        pipe(Image.open("start.png"))
    assert marker.exists()


def test_no_node_has_the_flag() -> None:
    """A workflow comes from others too, so that it may not say whom to trust."""
    for node in NODES.values():
        assert not [widget.name for widget in node.inputs if "trust" in widget.name]
