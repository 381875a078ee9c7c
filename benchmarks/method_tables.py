"""The methods of the catalog as Markdown and as a stub: what follows from `METHODS` alone."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import mmaccel
from mmaccel.catalog import METHODS, Entry, load, make
from mmaccel.evaluation.tables import grid

_DOCS = Path(__file__).resolve().parent.parent / "docs"
_FOLDERS = {"visual_tokens": "reducers", "kv_cache": "layers", "attention": "layers"}
_SHARED = {  # slot -> page of the methods that have none of their own
    "drafts": "policies/jacobi.md",
    "tree": "policies/trees.md",
    "siblings": "policies/trees.md",
    "visual_tokens": "reducers/controls.md",
}
_SLOTS = {
    "window": "window policies, for models decoded token after token",
    "canvas": "canvas policies, for masked and diffusion models",
    "drafts": "where drafts come from: `Jacobi(drafts=…)`",
    "tree": "branches beside the drafts: `Jacobi(tree=…)`",
    "siblings": "which of several drafts of a slot is accepted: `Speculative(siblings=…)`",
    "visual_tokens": "which visual tokens stay: `visual_tokens=`",
    "kv_cache": "which entries of a prompt stay in the caches: `kv_cache=`",
    "attention": "which cached keys a pass attends to: `attention=`",
}
_DEPTH = 24  # layers of a tower, for tables
_STAGES = {
    "pixels": "before the encoder",
    "encoder_layer": "encoder layers",
    "encoder_exit": "encoder exit",
    "llm_layer": "LLM layers",
}
_LOOKS = {  # what a method needs -> what it looks at
    "pixels": "pixels",
    "keys": "keys",
    "cls_attention": "class token's attention",
    "all_attention": "all attention",
    "last_attention": "last token's attention",
    "text_attention": "text's attention",
    "text": "text",
    "grid": "grid",
    "tiles": "tiles",
    "frames": "frames",
}
_PAPER = re.compile(r"arXiv:(\d{4}\.\d{5})")
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


def layer_support_tables(reports: dict[str, Any]) -> str:
    """The table of docs/cache-policies.md: what the methods of a model's layers work with."""
    parts = []
    for report in (r for r in reports.values() if "layer_support" in r):
        rows: list[tuple[str, ...]] = [
            (
                f"[`{row['method']}`]({page_of(row['slot'], row['name'], entry)})",
                *(row[column] for column in ("window", "guidance", "batch", "memory")),
            )
            for row in report["layer_support"]
            for entry in (METHODS[row["slot"]][row["name"]],)
        ]
        heads = ("method", "windows of drafts", "guidance pair", "batch", "frees memory")
        parts += [f"Made by `{report['command']}`.", grid(heads, rows)]
    return "\n" + "\n\n".join(parts or ["Not yet measured."]) + "\n\n"


def reducers_table(reports: dict[str, Any]) -> str:
    """The table of docs/visual-tokens.md: the reducers, where they work and what they look at."""
    rows: list[tuple[str, ...]] = []
    for public, (name, entry) in classes("visual_tokens").items():
        method: Any = make("visual_tokens", name, keep=0.5)
        link = f"[`{public}`]({page_of('visual_tokens', name, entry)})"
        looks = [word for need, word in _LOOKS.items() if need in method.needs]
        source = _find_source(load(entry.target).__module__)
        rows.append((link, entry.summary, _stage_of(method), ", ".join(looks) or "-", source))
    return f"\n{grid(('method', 'keeps', 'works', 'looks at', 'source'), rows)}\n\n"


def _stage_of(method: Any) -> str:
    layers = method.layers_in(_DEPTH)
    stage = _STAGES[method.stage]
    if not layers:
        return stage
    listed = ", ".join(map(str, layers))
    if len(layers) > 2 and layers == tuple(range(layers[0], layers[-1] + 1)):
        listed = f"{layers[0]} to {layers[-1]}"
    return f"{stage}: {listed}"


def _find_source(module: str) -> str:
    """The papers that the head of a method's file names before its departures."""
    head = str(import_module(module).__doc__).partition("Departures")[0]
    papers = dict.fromkeys(_PAPER.findall(head))
    return ", ".join(f"arXiv:{paper}" for paper in papers) or "control"


def drafts_table(reports: dict[str, Any]) -> str:
    """The table of docs/policies/jacobi.md: draft sources by name."""
    rows: list[tuple[str, ...]] = [
        (f"`{name}`", entry.summary) for name, entry in METHODS["drafts"].items()
    ]
    return f"\n{grid(('drafts', 'where they come from'), rows)}\n\n"


TABLES = {
    "methods": methods_table,
    "layers": layers_table,
    "drafts": drafts_table,
    "reducers": reducers_table,
    "layer-support": layer_support_tables,
}


def stub() -> str:
    """`mmaccel/__init__.pyi`: the public names for type checkers."""
    modules = {name: getattr(mmaccel, name).__module__ for name in mmaccel.__all__[1:]}
    imports = sorted(f"from {module} import {name}" for name, module in modules.items())
    names = [f'    "{name}",' for name in mmaccel.__all__]
    head = '"""The public names for type checkers, written by scripts/update_docs.py."""'
    return "\n".join([head, "", *imports, "", "__version__: str", "__all__ = [", *names, "]", ""])
