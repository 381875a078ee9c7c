"""The pack and the command that installs it: one schema, true metadata, nothing overwritten."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import mmaccel
from mmaccel.cli import main
from mmaccel.comfy.nodes import NODES
from mmaccel.commands import comfy as command
from tests.architecture.source import ROOT, imports, modules, run_python

PACK = ROOT / "mmaccel" / "comfy" / "pack"


def load_as_comfyui_does(folder: Path) -> ModuleType:
    """By file path, under a name that is a path."""
    name = str(folder).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_older_comfyui_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["comfy_api.latest"].ComfyAPISync, "execution")
    with pytest.raises(ImportError, match="0.8.0 or newer.*update ComfyUI"):
        load_as_comfyui_does(PACK)


def test_nothing_of_comfyui_is_imported_before_a_node_runs() -> None:
    theirs = {"comfy", "comfy_api", "comfy_execution", "nodes", "folder_paths", "server"}
    for module, file in modules().items():
        found = imports(file.read_text(encoding="utf-8"))
        of_comfyui = [each for each in found if each.target.split(".")[0] in theirs]
        assert not any(each.at_import for each in of_comfyui), module
        assert not of_comfyui or module in ("mmaccel.comfy.host", "mmaccel.comfy.schemas")
        if not module.startswith("mmaccel.comfy"):
            assert not any(each.target.startswith("mmaccel.comfy") for each in found), module


@pytest.mark.slow
def test_the_pack_imports_without_a_model_or_transformers() -> None:
    """A server that lacks an optional package still lists the nodes."""
    program = (
        "import sys\n"
        "for name in ('transformers', 'diffusers', 'typer', 'rich'): sys.modules[name] = None\n"
        "from mmaccel.comfy.nodes import NODES\n"
        "print(len(NODES))"
    )
    done = run_python(program)
    assert (done.returncode, done.stdout.strip()) == (0, str(len(NODES))), done.stderr


def test_metadata() -> None:
    said = tomllib.loads((PACK / "pyproject.toml").read_text(encoding="utf-8"))
    project = said["project"]
    assert project["dependencies"] == ["mmaccel"]  # no pins of what ComfyUI brings itself
    assert (project["name"], project["version"]) == (command._FOLDER, mmaccel.__version__)
    assert not project["name"].isidentifier()  # a folder of this name hides no import
    assert {"PublisherId", "DisplayName", "requires-comfyui"} <= set(said["tool"]["comfy"])


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "ComfyUI" / "custom_nodes").mkdir(parents=True)
    return tmp_path / "ComfyUI"


def contents(folder: Path) -> dict[str, bytes]:
    return {
        f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()
    }


def test_the_command_writes_the_pack_and_again_with_force(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["comfy", str(home)]) == 0
    (folder,) = (home / "custom_nodes").iterdir()
    before = contents(folder)
    written = dict(before)
    listed = json.loads(written.pop(".mmaccel.json"))
    pack = {name: content for name, content in contents(PACK).items() if "__pyc" not in name}
    assert written == pack and set(listed) == set(pack)
    assert "comfy_entrypoint" in vars(load_as_comfyui_does(folder))
    assert main(["comfy", str(home)]) == 2
    assert "replace it with --force" in capsys.readouterr().err
    assert main(["comfy", str(home), "--force"]) == 0
    assert contents(folder) == before
    assert [file.name for file in (home / "custom_nodes").iterdir()] == [command._FOLDER]
    assert main(["comfy", str(home / "main.py")]) == 2
    assert "which is not there; give the folder with main.py" in capsys.readouterr().err


def relink(folder: Path) -> None:
    os.rename(folder, folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"), target_is_directory=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "__init__.py").write_text("mine"),
        lambda folder: (folder / "notes.txt").write_text("mine"),
        lambda folder: (folder / ".mmaccel.json").unlink(),
        lambda folder: (folder / ".mmaccel.json").write_text("[3]"),
        relink,
    ],
)
def test_what_it_did_not_write_is_never_replaced(
    change: Callable[[Path], object], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["comfy", str(home)])
    change(home / "custom_nodes" / command._FOLDER)
    before = contents(home)
    assert main(["comfy", str(home), "--force"]) == 2
    assert "away first" in capsys.readouterr().err
    assert contents(home) == before


@pytest.mark.parametrize("when", ["writing", "renaming"])
def test_a_failure_leaves_what_was_there(
    when: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["comfy", str(home)])
    before = contents(home)
    rename = os.rename

    def fail(source: Path, target: Path) -> None:
        if when == "writing" or ".new." in str(source):
            raise OSError(28, "No space left on device")
        rename(source, target)

    if when == "writing":
        monkeypatch.setattr(command, "_digests", lambda file: fail(file, file))
        monkeypatch.setattr(command, "check_own", lambda folder: None)
    else:
        monkeypatch.setattr(command.os, "rename", fail)
    assert main(["comfy", str(home), "--force"]) == 1
    assert "nothing was changed" in capsys.readouterr().err
    monkeypatch.undo()
    assert contents(home) == before
