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

_FOLDER = "mmaccel-nodes"  # not a name that Python can import, so that it never hides the library
_LIST = ".mmaccel.json"  # hashes of the written files, so that no other file is ever replaced
_CACHE = "__pycache__"


def comfy(
    path: Annotated[Path, typer.Argument(help="folder of a ComfyUI, the one with main.py")],
    force: Annotated[bool, typer.Option("--force", help="replace an earlier loader")] = False,
) -> None:
    """Install the ComfyUI nodes: a two-line loader and example workflows in custom_nodes."""
    folder = path / "custom_nodes" / _FOLDER
    if not folder.parent.is_dir():
        lacks = "has no custom_nodes" if path.is_dir() else "is not there"
        raise OptionError(
            f"PATH: expected the folder of a ComfyUI, received {str(path)!r}, which {lacks}; give "
            "the folder with main.py, or the one of --base-directory"
        )
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


def check_own(folder: Path) -> None:
    """Refuse a folder with files that this command did not write."""
    try:
        if folder.is_symlink():
            raise ValueError("a link")
        written = dict(parse_json(read_whole(folder / _LIST, "list")))
    except (OSError, ValueError, TypeError, OptionError) as error:
        raise OptionError(
            f"{folder}: expected a folder that mmaccel comfy wrote, received another ({error}); "
            "move it away first"
        ) from error
    strange = [name for name, digest in _digests(folder).items() if written.get(name) != digest]
    if strange:
        raise OptionError(
            f"{folder}: expected only files that mmaccel comfy wrote, received "
            f"{', '.join(strange)}, which are others or were changed; move the folder away first"
        )


def install(folder: Path) -> None:
    """Write the folder of the pack whole or not at all; it replaces an earlier one."""
    # ComfyUI ignores names with this ending, in case it starts in this moment.
    fresh, old = (
        folder.with_name(f"{_FOLDER}.{os.getpid()}.{age}.disabled") for age in ("new", "old")
    )
    try:
        pack = Path(mmaccel.__file__).parent / "comfy" / "pack"
        shutil.copytree(pack, fresh, ignore=shutil.ignore_patterns(_CACHE))
        (fresh / _LIST).write_text(json.dumps(_digests(fresh), indent=1), encoding="utf-8")
        if folder.exists():
            os.rename(folder, old)
        os.rename(fresh, folder)
    except OSError as error:
        if old.exists():
            os.rename(old, folder)
        raise OSError(
            f"{folder}: expected a folder that can be written, received {error.strerror or error}; "
            "nothing was changed"
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _digests(folder: Path) -> dict[str, str]:
    """The hash of each file by its name; of what is no file, whose reading may never end, ""."""
    digests = {}
    for file in folder.rglob("*"):
        is_own = file.name == _LIST or _CACHE in file.parts
        if is_own or (file.is_dir() and not file.is_symlink()):
            continue
        is_plain = file.is_file() and not file.is_symlink()
        digest = hashlib.sha256(file.read_bytes()).hexdigest() if is_plain else ""
        digests[file.relative_to(folder).as_posix()] = digest
    return digests
