"""`write_whole`: the order of writes, synchronisation and rename, and what a failure leaves.

Without waiting for the bytes, a power failure may leave the final name without content; without
waiting for the rename, a manifest with an image that does not exist.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

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


def broken(code: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, target: Path) -> list[tuple[str, str, bytes]]:
    """The system calls, their kind of path, and the content of the final name before each."""
    found: list[tuple[str, str, bytes]] = []
    opened: dict[int, Path] = {}
    really_open, fsync, replace = os.open, os.fsync, os.replace

    def keep(path: os.PathLike[str], *rest: int) -> int:
        handle = really_open(path, *rest)
        opened[handle] = Path(path)
        return handle

    def sync(handle: int) -> None:
        path = opened[handle]
        kind = "folder" if path == target.parent else path.suffix
        if kind == ".tmp":
            assert path.parent == target.parent and path.read_bytes() == NEW
        found.append(("fsync", kind, target.read_bytes()))
        fsync(handle)

    def rename(source: Path, name: Path) -> None:
        found.append(("replace", source.suffix, target.read_bytes()))
        replace(source, name)

    monkeypatch.setattr(os, "open", keep)
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    return found


def test_the_bytes_come_before_the_name_and_the_folder_after(
    target: Path, calls: list[tuple[str, str, bytes]]
) -> None:
    write_whole(target, write)
    assert calls == [("fsync", ".tmp", OLD), ("replace", ".tmp", OLD), ("fsync", "folder", NEW)]
    assert [file.name for file in target.parent.iterdir()] == [target.name]


def assert_old(target: Path) -> None:
    assert target.read_bytes() == OLD and list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("error", [OSError(28, "full"), ValueError("no"), KeyboardInterrupt()])
def test_what_cannot_be_written_leaves_the_old_file(target: Path, error: BaseException) -> None:
    def half(path: Path) -> None:
        path.write_bytes(NEW[:100])
        raise error

    with pytest.raises(type(error)) as caught:
        write_whole(target, half)
    assert caught.value is error
    assert_old(target)
    with pytest.raises(FileNotFoundError):  # nor does what writes nothing at all
        write_whole(target, lambda path: None)
    assert_old(target)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("fsync", errno.ENOSPC),
        ("fsync", errno.EIO),
        ("fsync", errno.EDQUOT),
        ("replace", errno.EACCES),
    ],
)
def test_bytes_that_the_disk_did_not_take_get_no_name(
    target: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """Systems that write late report errors late: in fsync, not in write."""
    monkeypatch.setattr(os, call, broken(code))
    with pytest.raises(OSError, match=os.strerror(code)):
        write_whole(target, write)
    assert_old(target)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_system_without_fsync(target: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(os, "fsync", broken(code))
    write_whole(target, write)
    assert target.read_bytes() == NEW and list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file_is_not_replaced(tmp_path: Path, kind: str) -> None:
    file = make_special(kind, tmp_path)
    before, there = os.lstat(file), sorted(tmp_path.rglob("*"))
    match = f"received '{file}', a .*; name a file in a folder"
    with pytest.raises(OptionError, match=match), time_limit(20):
        write_whole(file, lambda path: pytest.fail("it was written"))
    assert (os.lstat(file).st_ino, os.lstat(file).st_mode) == (before.st_ino, before.st_mode)
    assert sorted(tmp_path.rglob("*")) == there


def test_a_link_within_its_folder_is_replaced(target: Path) -> None:
    link = target.with_name("link.png")
    link.symlink_to(target.name)
    write_whole(link, write)
    assert not link.is_symlink() and link.read_bytes() == NEW and target.read_bytes() == OLD


def test_a_link_with_the_temporary_name_is_not_followed(target: Path) -> None:
    other = target.parent / "other"
    other.mkdir()
    (other / "mine").write_bytes(OLD)
    target.with_name(f".{target.name}.{os.getpid()}.tmp").symlink_to(other / "mine")
    write_whole(target, write)
    assert (other / "mine").read_bytes() == OLD and target.read_bytes() == NEW


def test_a_report_reads_back_and_has_a_list_of_numbers_on_one_line() -> None:
    report = {"a": [1, 2.5, "ä"], "b": [{"c": []}, {"d": {"e": None, "f": [[1], [2]]}}], "g": {}}
    text = to_json(report)
    assert json.loads(text) == report
    assert ' "a": [1, 2.5, ' in text and text.count("\n") == 14
    with pytest.raises(ValueError, match="JSON"):
        to_json({"a": [float("nan")]})
