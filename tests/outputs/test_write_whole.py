"""`write_whole`: the order of writes, synchronisation and rename, and what a failure leaves.

Without waiting for the bytes, a power failure may leave the final name without content; without
waiting for the rename, a manifest with an image that does not exist.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from mmaccel.commands.files import to_json
from mmaccel.errors import OptionError
from mmaccel.outputs.whole_files import write_whole
from tests.fixtures.special_files import SPECIAL, make_special, time_limit

NEW, OLD = b"new bytes" * 1000, b"old bytes"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    file = tmp_path / "image.png"
    file.write_bytes(OLD)
    return file


def write(path: Path) -> None:
    path.write_bytes(NEW)


def test_the_bytes_come_before_the_name_and_the_folder_after(
    target: Path, monkeypatch: Any
) -> None:
    calls: list[tuple[str, str, bytes]] = []
    opened: dict[int, Path] = {}
    really_open, fsync, replace = os.open, os.fsync, os.replace

    def keep(path: Any, *rest: int) -> int:
        handle = really_open(path, *rest)
        opened[handle] = Path(path)
        return handle

    def note(call: str, path: Path) -> None:
        calls.append((call, path.suffix, target.read_bytes()))
        assert path.suffix != ".tmp" or path.read_bytes() == NEW

    monkeypatch.setattr(os, "open", keep)
    monkeypatch.setattr(os, "fsync", lambda handle: note("fsync", opened[handle]) or fsync(handle))
    monkeypatch.setattr(os, "replace", lambda a, b: note("replace", a) or replace(a, b))
    write_whole(target, write)
    assert calls == [("fsync", ".tmp", OLD), ("replace", ".tmp", OLD), ("fsync", "", NEW)]
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("error", [OSError(28, "full"), ValueError("no"), KeyboardInterrupt()])
def test_what_cannot_be_written_leaves_the_old_file(target: Path, error: BaseException) -> None:
    def half(path: Path) -> None:
        path.write_bytes(NEW[:100])
        raise error

    with pytest.raises(type(error)) as caught:
        write_whole(target, half)
    assert caught.value is error
    assert target.read_bytes() == OLD and list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize(
    ("call", "code", "kept"),
    [
        ("fsync", errno.ENOSPC, OLD),
        ("fsync", errno.EDQUOT, OLD),
        ("replace", errno.EACCES, OLD),
        ("fsync", errno.EINVAL, NEW),  # a system without it
    ],
)
def test_bytes_that_the_disk_did_not_take_get_no_name(
    target: Path, monkeypatch: Any, call: str, code: int, kept: bytes
) -> None:
    """Systems that write late report errors late: in fsync, not in write."""

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    if kept == OLD:
        with pytest.raises(OSError, match=os.strerror(code)):
            write_whole(target, write)
    else:
        write_whole(target, write)
    assert target.read_bytes() == kept and list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file_is_not_replaced(tmp_path: Path, kind: str) -> None:
    file = make_special(kind, tmp_path)
    before, there = os.lstat(file), sorted(tmp_path.rglob("*"))
    match = f"received '{file}', a .*; name a file in a folder"
    with pytest.raises(OptionError, match=match), time_limit(20):
        write_whole(file, lambda path: pytest.fail("it was written"))
    assert (os.lstat(file).st_ino, os.lstat(file).st_mode) == (before.st_ino, before.st_mode)
    assert sorted(tmp_path.rglob("*")) == there


def test_links_within_a_folder_are_replaced_and_never_followed(target: Path) -> None:
    link = target.with_name("link.png")
    for name in (link.name, f".{link.name}.{os.getpid()}.tmp"):
        target.with_name(name).symlink_to(target.name)
    write_whole(link, write)
    assert not link.is_symlink() and link.read_bytes() == NEW and target.read_bytes() == OLD


def test_a_report_reads_back_and_has_a_list_of_numbers_on_one_line() -> None:
    report = {"a": [1, 2.5, "ä"], "b": [{"c": []}, {"d": {"e": None, "f": [[1], [2]]}}], "g": {}}
    text = to_json(report)
    assert json.loads(text) == report
    assert ' "a": [1, 2.5, ' in text and text.count("\n") == 14
    with pytest.raises(ValueError, match="JSON"):
        to_json({"a": [float("nan")]})
