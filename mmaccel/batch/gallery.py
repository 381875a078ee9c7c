"""The gallery: one static page that shows the images of a folder, or of two side by side."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mmaccel.batch.manifest import names_file_inside, read_manifests
from mmaccel.errors import OptionError
from mmaccel.limits import parse_json
from mmaccel.options import SAMPLING_FIELDS
from mmaccel.pipelines.loading.pictures import open_picture

_HERE = Path(__file__).parent
_OWN = (
    *("id", "k", "seed", "negative", "model", "policy", "exactness", "tokens", "passes"),
    *("width", "height", "total_variation", "nats", "sha256"),
)
_SHARED = ("policy_options", *SAMPLING_FIELDS, "dtype", "device", "weights", "versions")

_REQUIRED = {"prompt", "seed", "policy"}  # facts of every image that is shown

Key = tuple[Any, ...]
OnSkip = Callable[[str], None]
"""Receives why an image or a line of a manifest is left out of a page."""


def _ignore(_: str) -> None:
    pass


def read_side(
    folder: Path, on_skip: OnSkip = _ignore
) -> tuple[dict[Key, dict[str, Any]], list[dict[str, Any]]]:
    """The facts of the images of a folder, by (id, k), and the records of failed items.

    Facts come from the manifests of the folder and from the text chunk of the image. Images
    without facts are left out, such as sheets and those of other programs.

    Args:
        folder: of the run.
        on_skip: called for images and lines that should be there and cannot be read.

    Raises:
        OptionError: no folder, or no such images in it.
    """
    if not folder.is_dir():
        raise OptionError(f"folder: expected one, received {str(folder)!r}; name a run's --out")
    past = read_manifests(folder)
    for line in past.torn:
        on_skip(f"{line}: no record of an image")
    images: dict[Key, dict[str, Any]] = {}
    failed = []
    unreadable: set[str] = set()

    def read_facts(file: Path) -> dict[str, Any]:
        try:
            return _embedded_facts(file)
        except OptionError as error:
            unreadable.add(file.name)
            on_skip(f"{file.name}: {error}")
            return {}

    for (id, k), record in past.records.items():
        if record["status"] == "failed":
            failed.append(record)
        elif not (names_file_inside(record) and (folder / record["file"]).is_file()):
            on_skip(f"{id[:100]}, image {k}: its file is not in the folder")
        else:
            facts = read_facts(folder / record["file"]) | record
            if facts.keys() >= _REQUIRED and facts["file"] not in unreadable:
                images[id, k] = facts
    known = {record["file"] for record in images.values()} | unreadable
    alike: Counter[Key] = Counter()
    for file in sorted(folder.glob("*.png")):
        facts = {} if file.name in known else read_facts(file)
        if facts:
            facts.setdefault("id", file.stem)
            key = str(facts["prompt"]), str(facts["seed"])
            # images of equal prompt and seed have other settings
            images[*key, alike[key]] = facts | {"file": file.name}
            alike[key] += 1
    if not images and not failed:
        raise OptionError(
            f"folder: expected images of mmaccel generate, received {str(folder)!r}, which has "
            "none; name a run's --out"
        )
    return images, failed


def draw_page(folder: Path, against: Path | None, page: Path, on_skip: OnSkip = _ignore) -> str:
    """The HTML of the page.

    Args:
        folder: of the run.
        against: of another run, shown next to it. Images with the same id and k form a pair; of
            folders without a manifest, those with the same prompt and seed.
        page: path of the page; links are relative to it.
        on_skip: see `read_side`.

    Raises:
        OptionError: see `read_side`.
    """
    folders = [folder] if against is None else [folder, against]
    sides = [read_side(each, on_skip) for each in folders]
    settings: dict[str, int] = {}
    keys = sorted({key for images, _ in sides for key in images}, key=_natural)
    items = []
    for key in keys:
        records = [images.get(key) for images, _ in sides]
        try:
            items.append(_pair(records, folders, page.parent, settings))
        except (RecursionError, TypeError):
            on_skip(f"{str(key[0])[:100]}, image {key[1]}: facts of an unknown form")
    policies = {str(side["policy"]) for item in items for side in item["sides"] if side}
    names = [each.resolve().name for each in folders]
    data = {
        "sides": names,
        "items": items,
        "policies": sorted(policies),
        "settings": [json.loads(text) for text in settings],
        "failed": [
            f"{record['id']}, image {record['k']}: {_text(record.get('error'))}"
            for _, failed in sides
            for record in failed
        ],
    }
    return _fill(" and ".join(names), data)


def _natural(key: Key) -> list[Any]:
    """Sort key that compares digits as numbers: r2 before r10."""
    parts = re.split(r"(\d{1,18})", str(key[0]))  # int() refuses very long numbers
    return [[int(p) if p.isdecimal() else p for p in parts], str(key[1]).zfill(20), *key[2:]]


def _embedded_facts(file: Path) -> dict[str, Any]:
    """The facts in the text chunk of an image; empty where there are none.

    Raises:
        OptionError: see `open_picture`.
    """
    with open_picture(file) as image:
        text = getattr(image, "text", {}).get("mmaccel", "{}")
    try:
        facts = parse_json(text)
    except ValueError:
        return {}
    is_ours = isinstance(facts, dict) and facts.keys() >= _REQUIRED
    is_ours = is_ours and isinstance(facts["prompt"], str) and isinstance(facts["seed"], str | int)
    return facts if is_ours else {}


def _pair(
    records: Sequence[Mapping[str, Any] | None],
    folders: Sequence[Path],
    home: Path,
    settings: dict[str, int],
) -> dict[str, Any]:
    """The images of one key, next to each other.

    Raises:
        RecursionError, TypeError: facts that no run writes.
    """
    first = next(record for record in records if record is not None)
    if not isinstance(first["prompt"], str):
        raise TypeError("a prompt is text")
    hashes = [None if record is None else record.get("sha256") for record in records]
    return {
        "name": str(first["id"]) + (f", image {first['k']}" if first.get("k") else ""),
        "prompt": first["prompt"],
        "seed": str(first["seed"]),  # a number of JavaScript has 53 bits
        "differs": len(set(hashes)) > 1,
        "sides": [
            None if record is None else _side(record, folder, home, settings)
            for record, folder in zip(records, folders)
        ],
    }


def _side(
    record: Mapping[str, Any], folder: Path, home: Path, settings: dict[str, int]
) -> dict[str, Any]:
    """One image of a pair; the page has each set of shared settings once."""
    values = {name: _plain(record[name]) for name in _SHARED if name in record}
    shared = json.dumps(values, sort_keys=True)
    path = Path(os.path.relpath((folder / record["file"]).resolve(), home.resolve()))
    own = {name: _plain(record[name]) for name in _OWN if record.get(name) is not None}
    return {
        "file": record["file"],
        "src": quote(os.fsencode(path.as_posix())),
        "policy": _plain(record.get("policy")),
        "settings": settings.setdefault(shared, len(settings)),
        "own": {name: str(v) if name == "seed" else v for name, v in own.items()},
    }


def _plain(value: Any) -> Any:
    """A value for JSON: numbers that are not finite become text."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _fill(title: str, data: dict[str, Any]) -> str:
    """Put data, style and script into the page; the data is escaped so that it cannot end a tag."""
    style, script = ((_HERE / f"gallery_page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    text = json.dumps(data, allow_nan=False)
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    policy = (
        f"default-src 'none'; img-src 'self' file:; script-src '{_hash(script)}'; "
        f"style-src '{_hash(style)}'; base-uri 'none'; form-action 'none'"
    )
    title = title.encode("utf-8", "replace").decode("utf-8")  # names of folders are bytes
    parts = {"POLICY": policy, "TITLE": html.escape(title), "STYLE": style, "SCRIPT": script}
    parts["DATA"] = text
    page = (_HERE / "gallery_page.html").read_text("utf-8")
    return re.sub(r"%([A-Z]+)%", lambda found: parts[found[1]], page)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return "sha256-" + base64.b64encode(digest).decode("ascii")
