"""The pack and the command that installs it: one schema, true metadata, nothing overwritten."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import mmaccel
from mmaccel.cli import main
from mmaccel.comfy.nodes import NODES
from mmaccel.commands import comfy as command
from tests.architecture.source import ROOT, imports, modules

PACK = ROOT / "mmaccel" / "comfy" / "pack"


def load_as_comfyui_does(folder: Path) -> ModuleType:
    """By file path, under a name that is a path."""
    name = str(folder).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("comfy")
def test_the_pack_exports_its_extension() -> None:
    assert "comfy_entrypoint" in vars(load_as_comfyui_does(PACK))


@pytest.mark.usefixtures("comfy")
@pytest.mark.parametrize("owner", ["io.Schema", "ComfyAPISync.execution"])
def test_a_comfyui_whose_schema_lacks_something_is_refused(
    owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, attribute = owner.split(".")
    monkeypatch.delattr(getattr(sys.modules["comfy_api.latest"], name), attribute)
    with pytest.raises(ImportError, match=f"received one without {attribute}; update ComfyUI"):
        load_as_comfyui_does(PACK)


def test_nothing_of_comfyui_is_imported_before_a_node_runs() -> None:
    theirs = {"comfy", "comfy_api", "comfy_execution", "nodes", "folder_paths", "server"}
    for module, file in modules().items():
        found = imports(file.read_text(encoding="utf-8"))
        of_comfyui = [each for each in found if each.target.split(".")[0] in theirs]
        assert not any(each.at_import for each in of_comfyui), module
        assert not of_comfyui or module in ("mmaccel.comfy.hosts", "mmaccel.comfy.schemas")
        if not module.startswith("mmaccel.comfy"):
            assert not any(each.target.startswith("mmaccel.comfy") for each in found), module


def test_the_pack_imports_without_a_model_or_transformers() -> None:
    """A server that lacks an optional package still lists the nodes."""
    program = (
        "import sys\n"
        "for name in ('transformers', 'diffusers', 'typer', 'rich'): sys.modules[name] = None\n"
        "from mmaccel.comfy.schemas import NODES\n"
        "print(len(NODES))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, str(len(NODES))), done.stderr


def test_metadata() -> None:
    with (PACK / "pyproject.toml").open("rb") as opened:
        said = tomllib.load(opened)
    project, own = said["project"], said["tool"]["comfy"]
    assert project["dependencies"] == ["mmaccel"]  # no pins of what ComfyUI brings itself
    assert project["version"] == mmaccel.__version__
    assert "comfyui" not in project["name"].lower() and len(project["name"]) < 100
    assert not project["name"].isidentifier()  # a folder of this name hides no import
    assert project["license"] == {"text": "Apache-2.0"} and project["description"]
    assert {"PublisherId", "DisplayName", "requires-comfyui"} <= set(own)
    assert "Repository" in project["urls"] and project["name"] == command._FOLDER
    with (ROOT / "pyproject.toml").open("rb") as opened:
        assert "comfy" not in tomllib.load(opened)["tool"]  # else the registry takes all of it


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "ComfyUI" / "custom_nodes").mkdir(parents=True)
    return tmp_path / "ComfyUI"


def contents(folder: Path) -> dict[str, bytes]:
    return {
        f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()
    }


@pytest.mark.usefixtures("comfy")
def test_the_command_writes_the_pack(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["comfy", str(home)]) == 0
    (folder,) = (home / "custom_nodes").iterdir()
    written = contents(folder)
    listed = json.loads(written.pop(".mmaccel.json"))
    wanted = {
        name: content for name, content in contents(PACK).items() if "__pycache__" not in name
    }
    assert written == wanted and set(listed) == set(wanted)
    assert "example_workflows/mmaccel_compare.json" in written
    said = capsys.readouterr()
    assert (
        str(folder) in said.out
        and "in a clone of the repository, python -m pip install . (" in said.err
    )
    assert "comfy_entrypoint" in vars(load_as_comfyui_does(folder))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: None, "which is not there; give the folder with main.py"),
        (lambda p: p.write_text("x"), "which is a file; give the folder"),
        (lambda p: p.mkdir(), "expected a folder with custom_nodes in it"),
    ],
)
def test_a_wrong_place_is_named(make, said: str, tmp_path: Path, capsys) -> None:
    make(tmp_path / "there")
    assert main(["comfy", str(tmp_path / "there")]) == 2
    assert said in capsys.readouterr().err


def test_a_second_time_asks_for_force(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["comfy", str(home)])
    folder = home / "custom_nodes" / command._FOLDER
    before = contents(folder)
    assert main(["comfy", str(home)]) == 2
    assert "replace it with --force" in capsys.readouterr().err and contents(folder) == before
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").write_bytes(b"old")
    assert main(["comfy", str(home), "--force"]) == 0
    assert contents(folder) == before
    assert [f.name for f in (home / "custom_nodes").iterdir()] == [command._FOLDER]


def edit(folder: Path) -> None:
    (folder / "__init__.py").write_text("mine", encoding="utf-8")


def add(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine", encoding="utf-8")


def unlist(folder: Path) -> None:
    (folder / ".mmaccel.json").unlink()


def garble(folder: Path) -> None:
    (folder / ".mmaccel.json").write_text("[3]", encoding="utf-8")


def relink(folder: Path) -> None:
    os.rename(folder, folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"), target_is_directory=True)


@pytest.mark.parametrize("change", [edit, add, unlist, garble, relink])
def test_what_it_did_not_write_is_never_replaced(change, home: Path, capsys) -> None:
    main(["comfy", str(home)])
    folder = home / "custom_nodes" / command._FOLDER
    change(folder)
    before = contents(home)
    assert main(["comfy", str(home), "--force"]) == 2
    assert "away first" in capsys.readouterr().err
    assert contents(home) == before


def test_another_packs_file_of_this_name_stays(home: Path) -> None:
    place = home / "custom_nodes" / command._FOLDER
    place.write_text("a file", encoding="utf-8")
    assert main(["comfy", str(home), "--force"]) == 2
    assert place.read_text(encoding="utf-8") == "a file"


@pytest.mark.parametrize("when", ["writing", "renaming"])
def test_a_failure_leaves_what_was_there(
    when: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    main(["comfy", str(home)])
    before = contents(home)
    real_write, real_rename, done = Path.write_bytes, os.rename, []

    def write(self: Path, content: bytes) -> int:
        done.append(self)
        if len(done) == 3:
            raise OSError(28, "No space left on device")
        return real_write(self, content)

    def rename(source: Path, target: Path) -> None:
        if str(source).endswith(".new.disabled"):
            raise OSError(13, "Permission denied")
        real_rename(source, target)

    if when == "writing":
        monkeypatch.setattr(Path, "write_bytes", write)
    else:
        monkeypatch.setattr(command.os, "rename", rename)
    assert main(["comfy", str(home), "--force"]) == 1
    assert "nothing was changed" in capsys.readouterr().err
    monkeypatch.undo()
    assert contents(home) == before
