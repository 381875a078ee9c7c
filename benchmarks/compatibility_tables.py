"""The tables of docs/compatibility.md, from what `tests.compatibility.measure` wrote."""

from __future__ import annotations

from typing import Any

from mmaccel.evaluation.tables import grid

_HEADS = {
    "attached": ("model", "policies", "visual tokens", "CUDA graph", "int8 weights", "LoRA"),
    "pipelines": ("family", "policies", "CUDA graph"),
    "canvas": ("model", "policies", "CUDA graph", "int8 weights"),
}
_CELLS = {
    "policies": "policy",
    "visual tokens": "visual_tokens",
    "CUDA graph": "cuda_graphs",
    "int8 weights": "int8",
    "LoRA": "lora",
    "batch": "batch",
}
_TITLES = {
    "attached": "Models of transformers under `mmaccel.attach`",
    "pipelines": "`TextToImage`, `TextToSpeech`, `ImageToVideo`",
    "canvas": "Masked and diffusion models",
}
_KINDS = {"Jacobi": "window", "LosslessUnmask": "canvas", "Stepwise": "canvas, not LosslessUnmask"}
_SOURCES = {"stand-in": "written for the tests", "mmaccel": "ours"}


def compatibility_tables(reports: dict[str, Any]) -> str:
    """What runs with what, by section; reasons are numbered below each table."""
    parts = []
    for report in (r for r in reports.values() if "compatibility" in r):
        versions = ", ".join(f"{k} {v}" for k, v in report["machine"]["versions"].items())
        parts += [f"On a CPU with {versions}. Made by `{report['command']}`."]
        for section, title in _TITLES.items():
            rows = [row for row in report["compatibility"] if row["section"] == section]
            parts += [f"### {title}", *_section(rows, _HEADS[section])]
    return "\n" + "\n\n".join(parts) + "\n\n" if parts else "\nNot yet measured.\n\n"


def _section(rows: list[dict[str, str]], heads: tuple[str, ...]) -> list[str]:
    reasons: list[str] = []

    def cell(row: dict[str, str], head: str) -> str:
        if head == "name":
            return ", ".join(f"`{name}`" for name in row["names"])
        if head == "classes":
            return _SOURCES.get(row["source"], row["source"])
        value = row[_CELLS[head]]
        if head == "policies":
            return _KINDS.get(value, value)
        if value == "-" or value.startswith(("yes", "all")):
            return value
        if value not in reasons:
            reasons.append(value)
        return f"no ({reasons.index(value) + 1})"

    heads = (heads[0], "name", *heads[1:], "batch", "classes")
    lines = [(row["title"], *(cell(row, head) for head in heads[1:])) for row in _merged(rows)]
    notes = "; ".join(f"({number}) {reason}" for number, reason in enumerate(reasons, 1))
    return [grid(heads, lines), *([f"{notes}."] if notes else [])]


def _merged(rows: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Rows of one title and of the same cells in one, with `names`."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        same = tuple(value for key, value in row.items() if key != "name")
        found.setdefault(same, row | {"names": []})["names"].append(row["name"])
    return list(found.values())
