"""The methods of the catalog as Markdown and as a stub: what follows from `METHODS` alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mmaccel
from mmaccel.catalog import METHODS, Entry, load
from mmaccel.evaluation.tables import grid

_DOCS = Path(__file__).resolve().parent.parent / "docs"
_FOLDERS = {"visual_tokens": "reducers", "kv_cache": "layers", "attention": "layers"}
_SHARED = {  # slot -> page of the methods that have none of their own
    "drafts": "policies/jacobi.md",
    "tree": "policies/trees.md",
    "visual_tokens": "reducers/controls.md",
}
_SLOTS = {
    "window": "window policies, for models decoded token after token",
    "canvas": "canvas policies, for masked and diffusion models",
    "drafts": "where drafts come from: `Jacobi(drafts=…)`",
    "tree": "branches beside the drafts: `Jacobi(tree=…)`",
    "visual_tokens": "which visual tokens stay: `visual_tokens=`",
    "kv_cache": "which entries of a prompt stay in the caches: `kv_cache=`",
    "attention": "which cached keys a pass attends to: `attention=`",
}
_UNCHANGED = "the policy's"  # guarantee under drafts and trees


def classes(slot: str) -> dict[str, tuple[str, Entry]]:
    """Class -> its first short name, and the entry; a class may have several names."""
    found: dict[str, tuple[str, Entry]] = {}
    for name, entry in METHODS[slot].items():
        found.setdefault(entry.class_name, (name, entry))
    return found


def page_of(slot: str, name: str, entry: Entry) -> str:
    """The page about a method below docs/: it is named like the method or its file."""
    folder = _FOLDERS.get(slot, "policies")
    stem = entry.module.rpartition(".")[2].replace("_", "-")
    pages = (f"{folder}/{name}.md", f"{folder}/{stem}.md")
    return next((page for page in pages if (_DOCS / page).is_file()), _SHARED.get(slot, pages[0]))


def references(slot: str) -> str:
    """The entries of all methods of a slot in the API reference."""
    return "\n\n".join(
        f"::: mmaccel.{public}\n    options:\n      members: false\n\n"
        f"More: [{public}](../{page_of(slot, name, entry)})."
        for public, (name, entry) in classes(slot).items()
    )


def methods_table(reports: dict[str, Any]) -> str:
    """The README's table: the methods of each slot by their guarantee."""
    rows: list[tuple[str, ...]] = []
    for slot, title in _SLOTS.items():
        by_guarantee: dict[str, list[str]] = {}
        for public, (name, entry) in classes(slot).items():
            shown = name if slot == "drafts" else public  # most sources are given by name
            link = f"[`{shown}`](docs/{page_of(slot, name, entry)})"
            guarantee = getattr(load(entry.target), "exactness", _UNCHANGED)
            if isinstance(guarantee, property):  # it depends on a field
                guarantee = load(entry.target)().exactness
            by_guarantee.setdefault(guarantee, []).append(link)
        for guarantee, links in by_guarantee.items():
            rows.append((title, guarantee, ", ".join(links)))
    return f"\n{grid(('slot', 'guarantee', 'methods'), rows)}\n\n"


def layers_table(reports: dict[str, Any]) -> str:
    """The table of docs/long-contexts.md: the methods of a model's layers."""
    rows: list[tuple[str, ...]] = [
        (f"[`{public}`]({page_of(slot, name, entry)})", f"`{slot}`", entry.summary)
        for slot in ("kv_cache", "attention")
        for public, (name, entry) in classes(slot).items()
    ]
    return f"\n{grid(('method', 'keyword', 'keeps'), rows)}\n\n"


def drafts_table(reports: dict[str, Any]) -> str:
    """The table of docs/policies/jacobi.md: draft sources by name."""
    rows: list[tuple[str, ...]] = [
        (f"`{name}`", entry.summary) for name, entry in METHODS["drafts"].items()
    ]
    return f"\n{grid(('drafts', 'where they come from'), rows)}\n\n"


TABLES = {"methods": methods_table, "layers": layers_table, "drafts": drafts_table}


def stub() -> str:
    """`mmaccel/__init__.pyi`: the public names for type checkers."""
    modules = {name: getattr(mmaccel, name).__module__ for name in mmaccel.__all__[1:]}
    imports = sorted(f"from {module} import {name}" for name, module in modules.items())
    names = [f'    "{name}",' for name in mmaccel.__all__]
    head = '"""The public names for type checkers, written by scripts/update_docs.py."""'
    return "\n".join([head, "", *imports, "", "__version__: str", "__all__ = [", *names, "]", ""])
