"""The gallery: one static page over the images of a folder, or of two side by side."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mmaccel.batch.manifest import is_named_inside, read_manifests
from mmaccel.errors import OptionError

_HERE = Path(__file__).parent
_OWN = ("id", "k", "seed", "negative", "model", "policy", "exactness", "tokens", "passes",
        "width", "height", "total_variation", "nats", "sha256")  # fmt: skip
_SHARED = ("policy_options", "guidance_scale", "temperature", "top_k", "top_p", "min_p", "dtype",
           "device", "weights", "versions")  # fmt: skip

_NEEDED = {"prompt", "seed", "policy"}  # what is known of every image that is shown

Key = tuple[Any, ...]


def read_side(folder: Path) -> tuple[dict[Key, dict[str, Any]], list[dict[str, Any]]]:
    """Images of a folder and what is known of each, and the items that failed.

    An image is known by the folder's manifests, or by what it says itself; others are left out.

    Raises:
        OptionError: no folder, or none with images of ours.
    """
    if not folder.is_dir():
        raise OptionError(f"folder: expected one, received {str(folder)!r}; name a run's --out")
    past = read_manifests(folder)
    made: dict[Key, dict[str, Any]] = {}
    failed = []
    for (id, k), record in past.records.items():
        if record["status"] == "failed":
            failed.append(record)
        elif is_named_inside(record) and (folder / record["file"]).is_file():
            facts = _told(folder / record["file"]) | record
            if facts.keys() >= _NEEDED:
                made[id, k] = facts
    known = {record["file"] for record in made.values()}
    alike: Counter[Key] = Counter()
    for file in sorted(folder.glob("*.png")):
        facts = {} if file.name in known else _told(file)
        if facts:
            facts.setdefault("id", file.stem)
            key = str(facts["prompt"]), str(facts["seed"])
            made[*key, alike[key]] = facts | {"file": file.name}  # other settings, other files
            alike[key] += 1
    if not made and not failed:
        raise OptionError(
            f"folder: expected images of mmaccel generate, received {str(folder)!r}, which has "
            "none; name a run's --out"
        )
    return made, failed


def draw_page(folder: Path, against: Path | None, page: Path) -> str:
    """The page.

    Args:
        folder: of the run.
        against: of another run, shown beside; images with the same id and k belong together, and
            where no manifest names them those of the same prompt and seed.
        page: where it will lie: links are relative to it.

    Raises:
        OptionError: see `read_side`.
    """
    folders = [folder] if against is None else [folder, against]
    sides = [read_side(each) for each in folders]
    settings: dict[str, int] = {}
    keys = sorted({key for made, _ in sides for key in made}, key=_natural)
    items = []
    for key in keys:
        records = [made.get(key) for made, _ in sides]
        first = next(record for record in records if record is not None)
        shown = [
            None if record is None else _side(record, each, page.parent, settings)
            for record, each in zip(records, folders)
        ]
        marks = [None if r is None else r.get("sha256") for r in records]
        items.append(
            {
                "name": str(first["id"]) + (f", image {first['k']}" if first.get("k") else ""),
                "prompt": str(first["prompt"]),
                "seed": str(first["seed"]),  # 64 bits do not fit a number there
                "differs": len(set(marks)) > 1,
                "sides": shown,
            }
        )
    policies = {str(r["policy"]) for made, _ in sides for r in made.values() if "policy" in r}
    names = [each.resolve().name for each in folders]
    data = {
        "sides": names,
        "items": items,
        "policies": sorted(policies),
        "settings": [json.loads(text) for text in settings],
        "failed": [
            f"{record['id']}, image {record['k']}: {record.get('error', '')}"
            for _, failed in sides
            for record in failed
        ],
    }
    return _fill(" and ".join(names), data)


def _natural(key: Key) -> list[Any]:
    """Ids in the order people count in: r2 before r10."""
    parts = re.split(r"(\d{1,18})", str(key[0]))  # longer numbers are no numbers to Python
    return [[int(p) if p.isdecimal() else p for p in parts], str(key[1]).zfill(20), *key[2:]]


def _told(file: Path) -> dict[str, Any]:
    """What an image says of itself, or nothing."""
    from PIL import Image

    try:
        with Image.open(file) as image:
            text = getattr(image, "text", {}).get("mmaccel", "{}")
            facts = json.loads(text)
    except (OSError, ValueError, SyntaxError, RecursionError, Image.DecompressionBombError):
        return {}
    is_ours = isinstance(facts, dict) and facts.keys() >= _NEEDED
    return facts if is_ours else {}


def _side(
    record: Mapping[str, Any], folder: Path, home: Path, settings: dict[str, int]
) -> dict[str, Any]:
    """An image on one side of an item; settings that many share stand once in the page."""
    told = {name: _plain(record[name]) for name in _SHARED if name in record}
    shared = json.dumps(told, sort_keys=True)
    path = Path(os.path.relpath((folder / record["file"]).resolve(), home.resolve()))
    own = {name: _plain(record[name]) for name in _OWN if record.get(name) is not None}
    return {
        "file": record["file"],
        "src": quote(path.as_posix()),
        "policy": _plain(record.get("policy")),
        "settings": settings.setdefault(shared, len(settings)),
        "own": {name: str(v) if name == "seed" else v for name, v in own.items()},
    }


def _plain(value: Any) -> Any:
    """A value as JSON has it: what Python reads as not finite becomes text."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _fill(title: str, data: dict[str, Any]) -> str:
    """Put data, style and script into the page; nothing in the data can end a script or a tag."""
    style, script = ((_HERE / f"gallery_page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    text = json.dumps(data, allow_nan=False)
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    policy = (
        f"default-src 'none'; img-src 'self' file:; script-src '{_hash(script)}'; "
        f"style-src '{_hash(style)}'; base-uri 'none'; form-action 'none'"
    )
    parts = {"POLICY": policy, "TITLE": html.escape(title), "STYLE": style, "SCRIPT": script}
    parts["DATA"] = text
    page = (_HERE / "gallery_page.html").read_text("utf-8")
    return re.sub(r"%([A-Z]+)%", lambda found: parts[found[1]], page)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return "sha256-" + base64.b64encode(digest).decode("ascii")
