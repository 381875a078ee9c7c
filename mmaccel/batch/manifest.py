"""The manifest: one line of JSON for every finished or given-up image, appended and synced.

An image counts as made when the manifest says so, its file is there and the file's checksum is the
one that was noted: what a kill left half-written never does.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from mmaccel.batch.failures import WriteError
from mmaccel.batch.locks import claim
from mmaccel.errors import OptionError

NAME = "manifest.jsonl"
_LONGEST_NAME = 255  # bytes; file systems take no more

Record = dict[str, Any]
Key = tuple[str, int]


@dataclass
class Past:
    """What manifests of a folder say.

    Attributes:
        records: the last line of every item, in the order of their first lines.
        torn: lines that could not be read; the items they stood for are made again.
    """

    records: dict[Key, Record] = field(default_factory=dict)
    torn: list[str] = field(default_factory=list)


def manifest_name(shard: tuple[int, int] | None) -> str:
    """File name of a shard's own manifest, so that shards may share a folder."""
    return NAME if shard is None else f"manifest.{shard[0]}-of-{shard[1]}.jsonl"


def read_manifests(folder: Path) -> Past:
    """All manifests of a folder, shards' included.

    Raises:
        OSError: one cannot be read.
    """
    past = Past()
    for file in sorted(filter(Path.is_file, folder.glob("manifest*.jsonl"))):
        for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
            if not line.strip():
                continue
            record = _parse(line)
            if record is None:
                past.torn.append(f"{file.name}, line {number}")
            else:
                key = record["id"], record["k"]
                if record["status"] == "ok" or past.records.get(key, {}).get("status") != "ok":
                    past.records[key] = record
    return past


def is_made(folder: Path, record: Record) -> bool:
    """Whether a record's image is there, whole."""
    if record["status"] != "ok" or not is_named_inside(record):
        return False
    file = folder / record["file"]
    return file.is_file() and sha256_of(file) == record.get("sha256")


def is_named_inside(record: Record) -> bool:
    """Whether a record names a file of its own folder."""
    name = record.get("file")
    if not isinstance(name, str) or len(name.encode("utf-8", "surrogatepass")) > _LONGEST_NAME:
        return False
    return Path(name).name == name and name not in ("", ".", "..")


def sha256_of(file: Path) -> str:
    """SHA-256 of a file's bytes, 64 hexadecimal digits."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


class Manifest:
    """A manifest open for appending, by one process at a time.

    Args:
        file: made where missing; a last line that a kill tore is cut off.

    Raises:
        WriteError: it cannot be written.
        BusyError: another process has it open, or one of another number of shards is at work in
            the same folder.
        OptionError: it is a link; its target is nobody's to cut or to write.
    """

    def __init__(self, file: Path) -> None:
        if file.is_symlink():
            raise OptionError(
                f"{file}: expected a file of its folder, received a link to another place, which "
                "is left alone; put the file itself there"
            )
        self.file = file
        try:
            self._opened = file.open("ab+", buffering=0)
        except OSError as error:
            raise WriteError(
                f"{file}: expected a manifest that can be written, received: {error.strerror}; "
                "give leave to write it, or choose another --out"
            ) from error
        try:
            claim(self._opened, file)
            _end_at_a_line(self._opened)
        except BaseException:
            self._opened.close()
            raise

    def append(self, record: Record) -> None:
        """Write one line and wait until it is on the disk.

        Raises:
            OSError: it cannot be written; what was written of it is taken back.
        """
        end, rest = self._opened.seek(0, os.SEEK_END), to_line(record)
        try:
            while rest:
                rest = rest[self._opened.write(rest) or 0 :]
            os.fsync(self._opened.fileno())
        except OSError:
            self._opened.truncate(end)
            raise

    def close(self) -> None:
        """Let go of the file."""
        self._opened.close()


def to_line(record: Record) -> bytes:
    """A record as a line; ASCII, so that nothing in a prompt can end it or steer a terminal."""
    return json.dumps(record, sort_keys=True).encode("ascii") + b"\n"


def merge(parts: Iterable[bytes]) -> list[bytes]:
    """Lines of several manifests as one, sorted; of whole shards, those of the whole job."""
    return sorted({line for part in parts for line in part.split(b"\n") if line.strip()})


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_one = isinstance(record, dict) and isinstance(record.get("id"), str)
    is_one = is_one and type(record.get("k")) is int and record.get("status") in ("ok", "failed")
    return record if is_one else None


def _end_at_a_line(opened: FileIO) -> None:
    """Cut off a last line without an end: its image is made again."""
    opened.seek(0)
    data = opened.read()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        opened.truncate(whole)
    opened.seek(0, os.SEEK_END)


def check_fresh(file: Path) -> None:
    """Refuse a manifest with something in it, where nobody asked to go on.

    Raises:
        OptionError: with the way to go on.
    """
    if file.is_file() and file.stat().st_size:
        raise OptionError(
            f"--out: expected a folder without a {file.name}, received {str(file.parent)!r}; add "
            "--resume to go on with what it has, or choose another folder"
        )
