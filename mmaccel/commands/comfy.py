"""`mmaccel comfy`: install the loader of the nodes in a ComfyUI folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

import mmaccel
from mmaccel.commands.terminal import say
from mmaccel.errors import OptionError
from mmaccel.limits import parse_json, read_whole
from mmaccel.outputs.whole_files import write_whole

_FOLDER = "mmaccel-nodes"  # not a name that Python can import, so that it never hides the library
_LIST = ".mmaccel.json"  # hashes of the written files, so that no other file is ever replaced
_CACHE = "__pycache__"


def comfy(
    path: Annotated[Path, typer.Argument(help="folder of a ComfyUI, the one with main.py")],
    force: Annotated[bool, typer.Option("--force", help="replace an earlier loader")] = False,
) -> None:
    """Install the ComfyUI nodes: a two-line loader and example workflows in custom_nodes."""
    folder = find_custom_nodes(path) / _FOLDER
    if os.path.lexists(folder):
        check_own(folder)
        if not force:
            raise OptionError(
                f"{folder}: expected no such folder, received one that mmaccel comfy wrote; "
                "replace it with --force"
            )
    install(folder)
    say(f"{folder} is written; restart ComfyUI.")
    print(
        f"ComfyUI's Python needs mmaccel {mmaccel.__version__}, which is on no registry: run that "
        "Python in a clone of the repository, python -m pip install . (or give it a wheel's path)",
        file=sys.stderr,
    )


def find_custom_nodes(path: Path) -> Path:
    """The folder from which a ComfyUI loads nodes.

    Raises:
        OptionError: no folder, or not that of a ComfyUI.
    """
    if not path.is_dir():
        raise OptionError(
            f"PATH: expected the folder of a ComfyUI, received {str(path)!r}, which "
            f"is {'a file' if path.exists() else 'not there'}; give the folder with main.py"
        )
    folder = path / "custom_nodes"
    if not folder.is_dir():
        raise OptionError(
            f"PATH: expected a folder with custom_nodes in it, received {str(path)!r} without; "
            "give the folder with ComfyUI's main.py, or the one of --base-directory"
        )
    return folder


def pack_files() -> dict[str, bytes]:
    """The content of the files of the node pack, by their path in its folder."""
    pack = Path(mmaccel.__file__).parent / "comfy" / "pack"
    files = [f for f in sorted(pack.rglob("*")) if f.is_file() and _CACHE not in f.parts]
    return {f.relative_to(pack).as_posix(): f.read_bytes() for f in files}


def check_own(folder: Path) -> None:
    """Refuse a folder with files that this command did not write.

    Raises:
        OptionError: with the names of those files.
    """
    try:
        if folder.is_symlink():
            raise ValueError("a link")
        if not (folder / _LIST).is_file():  # reading a pipe would wait for ever
            raise ValueError(f"without {_LIST}")
        written: dict[str, str] = dict(parse_json(read_whole(folder / _LIST, "list")))
    except (OSError, ValueError, TypeError) as error:
        raise OptionError(
            f"{folder}: expected a folder that mmaccel comfy wrote, received another ({error}); "
            "move it away first"
        ) from error
    found = {f.relative_to(folder).as_posix(): f for f in folder.rglob("*") if not f.is_dir()}
    strange = [
        name for name, file in found.items()
        if name != _LIST and _CACHE not in file.parts
        and (file.is_symlink() or not file.is_file()
             or written.get(name) != _digest(file.read_bytes()))
    ]  # fmt: skip
    if strange:
        raise OptionError(
            f"{folder}: expected only files that mmaccel comfy wrote, received "
            f"{', '.join(strange)}, which are others or were changed; move the folder away first"
        )


def install(folder: Path) -> None:
    """Write the folder of the pack whole or not at all; it replaces an earlier one.

    Raises:
        OSError: it cannot be written; an earlier folder stays.
    """
    files = pack_files()
    # ComfyUI ignores names with this ending, in case it starts in this moment.
    fresh = folder.with_name(f"{_FOLDER}.{os.getpid()}.new.disabled")
    old = folder.with_name(f"{_FOLDER}.{os.getpid()}.old.disabled")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        fresh.mkdir()
        for name, content in files.items():
            file = fresh / name
            file.parent.mkdir(parents=True, exist_ok=True)
            _write(file, content)
        listed = {name: _digest(content) for name, content in files.items()}
        _write(fresh / _LIST, json.dumps(listed, indent=1).encode("utf-8"))
        if folder.exists():
            os.rename(folder, old)
        try:
            os.rename(fresh, folder)
        except BaseException:
            if old.exists():
                os.rename(old, folder)
            raise
    except OSError as error:
        raise OSError(
            f"{folder}: expected a folder that can be written, received {error.strerror or error}; "
            "nothing was changed"
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _write(file: Path, content: bytes) -> None:
    write_whole(file, lambda path: path.write_bytes(content))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
