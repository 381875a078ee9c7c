"""`mmaccel comfy`: put the loader of the nodes into a ComfyUI."""

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
from mmaccel.errors import OptionError

_FOLDER = "mmaccel-nodes"  # no name that Python could import, so that it never hides the library
_LIST = ".mmaccel.json"  # what was written, so that nothing else is ever replaced
_CACHE = "__pycache__"


def comfy(
    path: Annotated[Path, typer.Argument(help="folder of a ComfyUI, the one with main.py")],
    force: Annotated[bool, typer.Option("--force", help="replace an earlier loader")] = False,
) -> None:
    """Install the ComfyUI nodes: a two-line loader and example workflows in custom_nodes."""
    shelf = find_shelf(path)
    place = shelf / _FOLDER
    if os.path.lexists(place):
        check_own(place)
        if not force:
            raise OptionError(
                f"{place}: expected no such folder, received one that mmaccel comfy wrote; "
                "replace it with --force"
            )
    install(place)
    print(f"{place} is written; start ComfyUI anew.")
    print(
        f"Its Python needs mmaccel {mmaccel.__version__}. In that environment: "
        "python -m pip install mmaccel",
        file=sys.stderr,
    )


def find_shelf(path: Path) -> Path:
    """Where a ComfyUI looks for nodes.

    Raises:
        OptionError: no folder, or no ComfyUI's.
    """
    if not path.is_dir():
        raise OptionError(
            f"PATH: expected the folder of a ComfyUI, received {str(path)!r}, which is "
            f"{'a file' if path.exists() else 'not there'}; give the folder with main.py"
        )
    shelf = path / "custom_nodes"
    if not shelf.is_dir():
        raise OptionError(
            f"PATH: expected a folder with custom_nodes in it, received {str(path)!r} without; "
            "give the folder with ComfyUI's main.py, or the one of --base-directory"
        )
    return shelf


def pack_files() -> dict[str, bytes]:
    """The files of the pack: path in its folder -> content."""
    pack = Path(mmaccel.__file__).parent / "comfy" / "pack"
    files = [f for f in sorted(pack.rglob("*")) if f.is_file() and _CACHE not in f.parts]
    return {f.relative_to(pack).as_posix(): f.read_bytes() for f in files}


def check_own(place: Path) -> None:
    """Refuse to touch a folder that holds anything but what this command wrote.

    Raises:
        OptionError: with what was found.
    """
    try:
        if place.is_symlink():
            raise ValueError("a link")
        written: dict[str, str] = dict(json.loads((place / _LIST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise OptionError(
            f"{place}: expected a folder that mmaccel comfy wrote, received another ({error}); "
            "move it away first"
        ) from error
    there = {f.relative_to(place).as_posix(): f for f in place.rglob("*") if not f.is_dir()}
    strange = [
        name for name, file in there.items()
        if name != _LIST and _CACHE not in file.parts
        and (file.is_symlink() or written.get(name) != _digest(file.read_bytes()))
    ]  # fmt: skip
    if strange:
        raise OptionError(
            f"{place}: expected only what mmaccel comfy wrote, received {', '.join(strange)}, "
            "which it did not write so; move the folder away first"
        )


def install(place: Path) -> None:
    """Write the pack's folder whole or not at all, in the place of an earlier one.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    files = pack_files()
    # ComfyUI passes over names that end so, should it start in this moment.
    fresh = place.with_name(f"{_FOLDER}.{os.getpid()}.new.disabled")
    old = place.with_name(f"{_FOLDER}.{os.getpid()}.old.disabled")
    try:
        for name, content in files.items():
            file = fresh / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        listed = {name: _digest(content) for name, content in files.items()}
        (fresh / _LIST).write_text(json.dumps(listed, indent=1), encoding="utf-8")
        if place.exists():
            os.rename(place, old)
        try:
            os.rename(fresh, place)
        except BaseException:
            if old.exists():
                os.rename(old, place)
            raise
    except OSError as error:
        raise OSError(
            f"{place}: expected a folder that can be written, received {error.strerror or error}; "
            "nothing was changed"
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
