"""The manifest: one line of JSON for every finished or failed image, appended and synced.

An image is complete when it has a record, and its file with that size and checksum, and the JSON
file next to a clip or an utterance exist. The process that writes a manifest holds filelock's lock
on the open manifest itself, so that the system releases it however the process ends. File systems
without locks lock nothing, nor does Windows, where other shards could not read.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from mmaccel.errors import BusyError, MMAccelError, OptionError
from mmaccel.limits import parse_json
from mmaccel.outputs.whole_files import check_target

NAME = "manifest.jsonl"
JOB_SEED = "job_seed"  # the base of the seeds of rows without one
_FIELDS: dict[str, type] = {  # of a record that has them, and what they hold
    **dict.fromkeys(("id", "file", "sha256", "fingerprint"), str),
    **dict.fromkeys(("k", "bytes", "seed", JOB_SEED), int),
}
_MAX_NAME = 255  # bytes; the limit of file systems

Record = dict[str, Any]
Key = tuple[str, int]


class WriteError(MMAccelError, OSError):
    """A file of a job cannot be written, which ends the job and is no failure of an item."""


@dataclass
class Past:
    """The manifests of a folder: the last record of every item, in the order of their first ones,
    and the names of torn lines, whose items are generated again.
    """

    records: dict[Key, Record] = field(default_factory=dict)
    torn: list[str] = field(default_factory=list)


def manifest_name(shard: tuple[int, int] | None) -> str:
    """File name of the manifest of a shard; shards that share a folder have one each."""
    return NAME if shard is None else f"manifest.{shard[0]}-of-{shard[1]}.jsonl"


def read_manifests(folder: Path) -> Past:
    """Read all manifests of a folder, those of shards included, the one written last at last."""
    past = Past()
    files = sorted(filter(Path.is_file, folder.glob("manifest*.jsonl")))
    for file in sorted(files, key=lambda file: file.stat().st_mtime_ns):
        for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
            if not line.strip():
                continue
            record = _parse(line)
            if record is None:
                past.torn.append(f"{file.name}, line {number}")
                continue
            key = record["id"], record["k"]
            if record["status"] == "ok" or past.records.get(key, {}).get("status") != "ok":
                past.records[key] = record
    return past


def is_complete(folder: Path, record: Record) -> bool:
    """Whether the files of a record exist, and its own has the recorded size and checksum."""
    if record["status"] != "ok" or not has_files(folder, record):
        return False
    return sha256_of(folder / record["file"]) == record.get("sha256")


def has_files(folder: Path, record: Record) -> bool:
    """Whether the files of a record exist, and its own has the recorded size."""
    if not names_file_inside(record):
        return False
    files = [folder / name for name in names_of(record["file"])]
    sizes = [file.stat().st_size for file in files if file.is_file()]
    return len(sizes) == len(files) and bool(sizes[0] == record.get("bytes", sizes[0]))


def names_of(file: str) -> list[str]:
    """The names of the files of an item: an image has its facts in it, others have them beside."""
    return [file] if file.endswith(".png") else [file, str(Path(file).with_suffix(".json"))]


def names_file_inside(record: Record) -> bool:
    name = record.get("file")
    if not isinstance(name, str) or len(name.encode("utf-8", "surrogatepass")) > _MAX_NAME:
        return False
    return Path(name).name == name and name not in ("", ".", "..")


def sha256_of(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


class Manifest:
    """A manifest open for appending, by one process at a time; an incomplete last line, which a
    kill leaves, is cut off.

    Raises:
        WriteError: the file cannot be written.
        BusyError: another process has it open.
    """

    def __init__(self, file: Path) -> None:
        if file.is_symlink():
            raise OptionError(
                f"{file}: expected a file of its folder, received a link, whose target must not "
                "change; put the file itself there"
            )
        check_target(file, "--out")
        self.file = file
        try:
            self._opened = file.open("ab+", buffering=0)
        except OSError as error:
            raise WriteError(
                f"{file}: expected a manifest that can be written, received: {error.strerror}; "
                "permit writing it, or choose another --out"
            ) from error
        try:
            _claim(self._opened, file)
            _cut_incomplete_line(self._opened)
        except BaseException:
            self._opened.close()
            raise

    def append(self, record: Record) -> None:
        """Write one line, whole or not at all, and wait until it is on the disk."""
        end, rest = self._opened.seek(0, os.SEEK_END), to_line(record)
        try:
            while rest:
                rest = rest[self._opened.write(rest) or 0 :]
            os.fsync(self._opened.fileno())
        except OSError as error:
            self._opened.truncate(end)
            raise WriteError(
                f"{self.file}: expected a manifest that can be written, received: "
                f"{error.strerror}; its records are complete, continue with --resume"
            ) from error

    def close(self) -> None:
        self._opened.close()


def _claim(opened: FileIO, file: Path) -> None:
    from filelock import lock_descriptor

    if sys.platform == "win32":
        return
    try:
        is_free = lock_descriptor(opened.fileno(), blocking=False)
    except OSError:  # a file system without locks
        return
    if not is_free:
        raise BusyError(
            f"{file}: expected a manifest that no process writes, received one that another "
            "process has open; wait for it, or give each process a --shard or a folder of its own"
        )


def to_line(record: Record) -> bytes:
    """A record as a line of ASCII, so that no prompt can end the line or control a terminal."""
    return json.dumps(record, sort_keys=True).encode("ascii") + b"\n"


def _parse(line: bytes) -> Record | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not {"id", "k"} <= record.keys():
        return None
    is_record = all(type(record[name]) is _FIELDS[name] for name in _FIELDS.keys() & record.keys())
    return record if is_record and record.get("status") in ("ok", "failed") else None


def _cut_incomplete_line(opened: FileIO) -> None:
    """Cut off a last line without a line feed; its image is generated again."""
    opened.seek(0)
    data = opened.read()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        opened.truncate(whole)
    opened.seek(0, os.SEEK_END)


def check_fresh(file: Path) -> None:
    """Refuse a manifest that is not empty; for jobs without --resume."""
    if file.is_file() and file.stat().st_size:
        raise OptionError(
            f"--out: expected a folder without a {file.name}, received {str(file.parent)!r}; add "
            "--resume to continue it, or choose another folder"
        )
