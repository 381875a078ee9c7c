"""The gallery: one static page that shows the images of a folder, or of two side by side."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mmaccel.batch.manifest import names_file_inside, read_manifests
from mmaccel.errors import OptionError
from mmaccel.limits import parse_json
from mmaccel.options import SAMPLING_FIELDS
from mmaccel.pipelines.loading.pictures import open_picture

_HERE = Path(__file__).parent
_SHOWN = (
    *("id", "k", "seed", "negative", "model", "policy", "exactness", "tokens", "passes"),
    *("width", "height", "total_variation", "nats", "sha256", "policy_options"),
    *(*SAMPLING_FIELDS, "dtype", "device", "weights", "versions"),
)
_NEEDED = {"prompt": str, "seed": str | int, "policy": object}  # facts of every shown image

Facts = dict[str, Any]
OnSkip = Callable[[str], None]
"""Receives why an image or a line of a manifest is left out of a page."""


def _read_side(folder: Path, on_skip: OnSkip) -> tuple[dict[tuple[Any, ...], Facts], list[Facts]]:
    """The facts of the images of a folder, by (id, k), and the records of failed items.

    Facts come from the manifests of the folder and from the text chunk of the image. Images
    without facts are left out, such as sheets and those of other programs.

    Args:
        folder: of the run.
        on_skip: called for images and lines that should be there and cannot be read.

    Raises:
        OptionError: no folder, or no such images in it.
    """
    past = read_manifests(folder)
    for line in past.torn:
        on_skip(f"{line}: no record of an image")
    failed = []
    records: dict[str, Facts] = {}
    for (id, k), record in past.records.items():
        if record["status"] == "failed":
            failed.append(record)
        elif names_file_inside(record) and (folder / record["file"]).is_file():
            records[record["file"]] = record
        else:
            on_skip(f"{id[:100]}, image {k}: its file is not in the folder")
    images: dict[tuple[Any, ...], Facts] = {}
    alike = Counter[tuple[str, str]]()  # images of equal prompt and seed have other settings
    for name in sorted({*records, *(file.name for file in folder.glob("*.png"))}):
        try:
            facts = _embedded_facts(folder / name) | records.get(name, {})
        except OptionError as error:
            on_skip(f"{name}: {error}")
            continue
        if not all(isinstance(facts.get(each), kind) for each, kind in _NEEDED.items()):
            continue
        if name in records:
            key: tuple[Any, ...] = facts["id"], facts["k"]
        else:
            told = facts["prompt"], str(facts["seed"])
            key = (*told, alike[told])
            alike[told] += 1
            facts = {"id": Path(name).stem, **facts, "file": name}
        images[key] = facts
    if not images and not failed:
        raise OptionError(
            f"folder: expected images of mmaccel generate, received {str(folder)!r}, which has "
            "none; name a run's --out"
        )
    return images, failed


def _embedded_facts(file: Path) -> Facts:
    """The facts in the text chunk of an image; empty where there are none.

    Raises:
        OptionError: see `open_picture`.
    """
    with open_picture(file) as image, suppress(ValueError):
        facts = parse_json(getattr(image, "text", {}).get("mmaccel", "{}"))
        return facts if isinstance(facts, dict) else {}
    return {}


def draw_page(folder: Path, against: Path | None, page: Path, on_skip: OnSkip) -> str:
    """The HTML of the page.

    Args:
        folder: of the run.
        against: of another run, shown next to it. Images with the same id and k form a pair; of
            folders without a manifest, those with the same prompt and seed.
        page: path of the page; links are relative to it.
        on_skip: see `_read_side`.

    Raises:
        OptionError: see `_read_side`.
    """
    folders = [folder] if against is None else [folder, against]
    sides = [_read_side(each, on_skip) for each in folders]

    def show(facts: Facts, folder: Path) -> Facts:
        path = os.path.relpath((folder / facts["file"]).resolve(), page.parent.resolve())
        shown = {name: facts[name] for name in _SHOWN if facts.get(name) is not None}
        return {
            "file": facts["file"],
            "src": quote(os.fsencode(Path(path).as_posix())),
            "policy": facts["policy"],
            "facts": shown | {"seed": str(facts["seed"])},  # a number of JavaScript has 53 bits
        }

    items = []
    for key in sorted({key for images, _ in sides for key in images}, key=_natural):
        pair = [images.get(key) for images, _ in sides]
        first = pair[0] or pair[-1]
        assert first is not None
        items.append(
            {
                "name": str(first["id"]) + (f", image {first['k']}" if first.get("k") else ""),
                "prompt": first["prompt"],
                "seed": str(first["seed"]),
                "differs": (pair[0] or {}).get("sha256") != (pair[-1] or {}).get("sha256"),
                "sides": [each and show(each, home) for each, home in zip(pair, folders)],
            }
        )
    names = [each.resolve().name for each in folders]
    data = {
        "sides": names,
        "items": items,
        "policies": sorted({str(s["policy"]) for item in items for s in item["sides"] if s}),
        "failed": [
            f"{record['id']}, image {record['k']}: {record.get('error') or ''}"
            for _, failed in sides
            for record in failed
        ],
    }
    return _fill(" and ".join(names), data)


def _natural(key: tuple[Any, ...]) -> list[Any]:
    """Sort key that compares digits as numbers: r2 before r10."""
    parts = re.split(r"(\d{1,18})", str(key[0]))  # int() refuses very long numbers
    return [[int(p) if p.isdecimal() else p for p in parts], str(key[1]).zfill(20), *key[2:]]


def _fill(title: str, data: dict[str, Any]) -> str:
    """Put data, style and script into the page; the data is escaped so that it cannot end a tag."""
    style, script = ((_HERE / f"gallery_page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    finite = json.loads(json.dumps(data), parse_constant=str)  # JSON has no NaN
    text = json.dumps(finite).replace("<", "\\u003c").replace(">", "\\u003e")
    policy = (
        f"default-src 'none'; img-src 'self' file:; script-src '{_hash(script)}'; "
        f"style-src '{_hash(style)}'; base-uri 'none'; form-action 'none'"
    )
    title = title.encode("utf-8", "replace").decode("utf-8")  # names of folders are bytes
    parts = {"POLICY": policy, "TITLE": html.escape(title), "STYLE": style, "SCRIPT": script}
    parts["DATA"] = text.replace("&", "\\u0026")
    page = (_HERE / "gallery_page.html").read_text("utf-8")
    return re.sub(r"%([A-Z]+)%", lambda found: parts[found[1]], page)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return "sha256-" + base64.b64encode(digest).decode("ascii")
