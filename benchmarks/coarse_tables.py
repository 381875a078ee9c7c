"""Tables of `benchmarks/coarse_study.py` for docs/policies/coarse-drafts.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmaccel.evaluation.tables import grid

Report = dict[str, Any]


def coarse_study_tables(reports: dict[str, Report]) -> str:
    """Windows and draft sources, coarse models, candidates, and training minutes."""
    parts = []
    for report in (r for r in reports.values() if r.get("coarse_study")):
        machine = report["machine"]
        parts += [
            f"`{report['model']}`, {len(report['captions'])} captions, batch 1, temperature "
            f"{report['temperature']:g}; {machine['name']}, {machine['threads']} threads, torch "
            f"{machine['versions']['torch']}. Made by `{report['command']}`.",
            _windows(report),
            "The coarse models, with their cross-entropy in nats on fresh tokens (in brackets the "
            "large model's own), and tokens a pass by window "
            f"at guidance {_guidance(report):g}.",
            _models(report),
        ]
        candidates = {row["candidates"] for row in report["coarse_study"]} - {None}
        if len(candidates) > 1:
            parts += ["Candidates: how many of a slot's stale scores are corrected."]
            parts += [_candidates(report)]
        if any("curve" in card for card in report["coarse"].values()):
            parts += ["Training minutes, from the cards of the coarse models.", _curves(report)]
    return "\n" + "\n\n".join(parts) + "\n\n" if parts else "\nNot yet measured.\n\n"


def _guidance(report: Report) -> float:
    return float(report["coarse_study"][0]["guidance"])


def _usual(report: Report) -> list[dict[str, Any]]:
    """Rows with the number of candidates that most rows have."""
    rows = report["coarse_study"]
    counts = [row["candidates"] for row in rows if row["candidates"] is not None]
    usual = max(counts, key=counts.count)
    return [row for row in rows if row["candidates"] in (None, usual)]


def _windows(report: Report) -> str:
    rows = sorted(_usual(report), key=lambda row: (row["guidance"], row["window"]))
    neighbour = {
        (row["guidance"], row["window"]): row["seconds"]
        for row in rows
        if row["drafts"] == "neighbour"
    }
    return grid(
        (
            "guidance",
            "window",
            "drafts",
            "tokens a pass",
            "s an image",
            "against neighbour",
            "same tokens",
            "sweep, of a pass",
        ),
        [
            (
                f"{row['guidance']:g}",
                str(row["window"]),
                _drafts(row),
                _gain(row),
                f"{row['seconds']:.3f}",
                f"{_beside(row, neighbour) / row['seconds']:.2f}×",
                f"{row['identical']} of {row['images']}",
                _share(row),
            )
            for row in rows
        ],
    )


def _beside(row: dict[str, Any], neighbour: dict[tuple[float, int], float]) -> float:
    """Seconds of the neighbour source in the same measurement."""
    found = row.get("neighbour_seconds") or neighbour[row["guidance"], row["window"]]
    return float(found)


def _drafts(row: dict[str, Any]) -> str:
    """The source by its folder, and its parallel rounds."""
    rounds = row.get("rounds")
    name = Path(row["drafts"]).name
    return name if rounds is None else f"{name}, {rounds} rounds"


def _models(report: Report) -> str:
    rows = [
        row
        for row in _usual(report)
        if row["guidance"] == _guidance(report) and row.get("rounds") is None
    ]
    windows = list(dict.fromkeys(row["window"] for row in rows))
    gains = {(row["drafts"], row["window"]): row for row in rows}
    return grid(
        (
            "coarse model",
            "parameters",
            "MB",
            "minutes",
            "seen slots",
            "unseen slots",
            *(f"window {window}" for window in windows),
        ),
        [
            (
                Path(folder).name,
                f"{card['parameters']:,}".replace(",", " "),
                f"{card['bytes'] / 1e6:.2f}",
                f"{card['minutes']:g}",
                *_losses(card["cross_entropy"]),
                *(_gain(gains[folder, window]) for window in windows),
            )
            for folder, card in report["coarse"].items()
        ],
    )


def _candidates(report: Report) -> str:
    first = next(iter(report["coarse"]))
    rows = [row for row in report["coarse_study"] if row["drafts"] == first]
    rows = [row for row in rows if row.get("rounds") is None]
    rows.sort(key=lambda row: (row["guidance"], row["window"], row["candidates"]))
    return grid(
        ("guidance", "window", "candidates", "tokens a pass", "sweep, of a pass"),
        [
            (
                f"{row['guidance']:g}",
                str(row["window"]),
                str(row["candidates"]),
                _gain(row),
                _share(row),
            )
            for row in rows
        ],
    )


def _curves(report: Report) -> str:
    lines: list[tuple[str, ...]] = []
    for folder, card in report["coarse"].items():
        for point in card.get("curve", ()):
            gains = ", ".join(
                f"{gain['coarse']:.2f} (guidance {gain['guidance']:g}, window {gain['window']})"
                for gain in point["tokens_per_pass"]
            )
            losses = _losses(point["cross_entropy"])
            lines.append((Path(folder).name, f"{point['minutes']:g}", *losses, gains))
    return grid(("coarse model", "minutes", "seen slots", "unseen slots", "tokens a pass"), lines)


def _losses(entropy: dict[str, float]) -> tuple[str, str]:
    return (
        f"{entropy['seen']:.2f} ({entropy['model_seen']:.2f}; uncorrected {entropy['stale']:.2f})",
        f"{entropy['unseen']:.2f} ({entropy['model_unseen']:.2f})",
    )


def _gain(row: dict[str, Any]) -> str:
    half = row["half_width"]
    return f"{row['tokens_per_pass']:.2f}" + ("" if half is None else f" ± {half:.2f}")


def _share(row: dict[str, Any]) -> str:
    return "–" if row["sweep_share"] is None else f"{100 * row['sweep_share']:.1f} %"
