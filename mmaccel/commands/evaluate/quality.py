"""`mmaccel evaluate pictures | clips | speech`: distances from other folders, prompts read back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from mmaccel.commands.flags import as_command
from mmaccel.commands.options import JsonFile, parse_path, read_seed
from mmaccel.commands.terminal import print_rows, say
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_BATCH
from mmaccel.options import option

ItemsFile = Annotated[
    Path | None,
    typer.Option(
        "--items", help="write a line for each item here", parser=parse_path, metavar="FILE"
    ),
]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A folder, what it is compared with, and where the report goes."""

    folder: Annotated[Path, typer.Argument(help="WAV files, such as those of mmaccel speak")]
    against: Annotated[
        str | None, typer.Option(help="a folder of WAV files", parser=str, metavar="FOLDER")
    ] = None
    features: str = option("voices", "voices or module:function")
    seed: Annotated[int, typer.Option(help="of subsets and splits", callback=read_seed)] = 0
    json_file: JsonFile = None
    batch_size: ClassVar[int] = 1
    count: ClassVar[int | None] = None
    items_file: ClassVar[Path | None] = None
    kind: ClassVar[str]
    """Of `mmaccel.evaluation.quality.report`."""

    def run(self) -> None:
        from mmaccel.commands.files import check_file, new_report, write_json, write_lines
        from mmaccel.demo.features import draw_reference
        from mmaccel.evaluation.quality import report as reports
        from mmaccel.evaluation.quality.distances import measure_distances
        from mmaccel.evaluation.quality.features import extract_all, open_extractor
        from mmaccel.evaluation.quality.image_folder import list_items

        kind: reports.Kind = getattr(reports, self.kind)
        size = self.batch_size
        check_file("--json", self.json_file)
        check_file("--items", self.items_file)
        items = list_items(self.folder, kind.suffixes)
        report: dict[str, Any] = new_report(folder=str(self.folder), n=len(items))
        if self.against is not None:
            extract = open_extractor(self.features, kind.own)
            if kind.judge is not None and self.against == kind.own:
                n_others = self.count or len(items)
                firsts = range(0, n_others, size)
                parts: Iterable[Any] = (
                    draw_reference(kind.own, k, min(size, n_others - k)) for k in firsts
                )
            else:
                others = list_items(Path(self.against), kind.suffixes)
                n_others, parts = len(others), kind.read(others, size)
            sets = []
            of_folder = kind.read(items, size)
            for option_name, batches in (("FOLDER", of_folder), ("--against or --count", parts)):
                features = extract_all(batches, extract)
                sets.append(features)
                if len(features) < 2:
                    raise OptionError(
                        f"{option_name}: expected at least 2 rows of features, since distances are "
                        f"of sets, received {len(features)}; give more"
                    )
            report |= {"against": self.against, "n_against": n_others, "features": self.features}
            report |= measure_distances(sets[0], sets[1], self.seed)
        verdicts = reports.judge_items(kind, items, size)
        if kind.judge is not None:
            report["captions"] = reports.sum_verdicts(verdicts)
        write_json(self.json_file, report)
        lines = [
            {
                "file": item.file.name,
                "prompt": item.prompt,
                "seed": item.seed,
                "verdict": verdict,
            }
            for item, verdict in zip(items, verdicts, strict=True)
        ]
        write_lines(self.items_file, lines)
        heads = ("figure", "value", "n", "method")
        rows = [dict(zip(heads, row)) for row in _list_figures(report, kind.distance)]
        if rows:
            print_rows(report["folder"], {head: f"{{{head}}}" for head in heads}, rows)
        compared = f"no distances: give --against a folder, or {kind.own}"
        if "frechet" in report:
            width = report["frechet"]["width"]
            compared = f"features {self.features} of width {width}, against {self.against}"
        say(f"{len(items)} {kind.unit}, {compared}.")


def _list_figures(report: dict[str, Any], distance: str) -> Iterator[tuple[str, ...]]:
    """Rows of the table: figure, value, n, method."""
    if "frechet" in report:
        frechet, kid = report["frechet"], report["kid"]
        sizes = f"{frechet['n_first']} and {frechet['n_second']}"
        yield distance, f"{frechet['distance']:.4f}", sizes, frechet["bias"]
        yield "its floor", f"{frechet['floor']:.4f}", sizes, "random splits of both"
        yield "KID", f"{kid['value']:.6f}", sizes, kid["bias"]
        of = f"{kid['subsets']} subsets of {kid['subset_size']}"
        if kid["subset_size"] < max(kid["n_first"], kid["n_second"]):  # else all are equal
            yield "KID of subsets", f"{kid['mean']:.6f} ± {kid['std']:.6f}", sizes, of
    captions: dict[str, Any] = report.get("captions") or {"shares": {}}
    for name, share in captions["shares"].items():
        low, high = (100 * bound for bound in captions["intervals"][name])
        value = f"{100 * share:.1f} %"
        yield f"prompt: {name}", value, str(captions["n"]), f"{low:.1f}…{high:.1f} %"


@dataclass(frozen=True, kw_only=True)
class Pictures(Compared):
    """Fréchet distance and KID, with n and bias; scenes' prompts are read back where images
    carry them."""

    folder: Annotated[Path, typer.Argument(help="images, such as those of mmaccel generate")]
    against: str | None = option(None, "a folder, or scenes: drawn images no training saw")
    features: str = option("scenes", "scenes or module:function")
    count: int | None = option(None, "images of --against scenes; by default as many")  # type: ignore[misc]
    batch_size: int = option(  # type: ignore[misc]
        64, "images extracted together", min=1, max=MAX_BATCH
    )
    items_file: ItemsFile = None  # type: ignore[misc]
    kind: ClassVar[str] = "PICTURES"


@dataclass(frozen=True, kw_only=True)
class Clips(Compared):
    """FVD-own, the Fréchet distance over features trained here, and KID; prompts of moving scenes
    are read back where clips carry them. No published FVD compares with it."""

    folder: Annotated[Path, typer.Argument(help="clips, such as those of mmaccel animate")]
    against: str | None = option(None, "a folder, or moving-scenes: drawn clips no training saw")
    features: str = option("moving-scenes", "moving-scenes or module:function")
    count: int | None = option(None, "clips of --against moving-scenes; by default as many")  # type: ignore[misc]
    batch_size: int = option(  # type: ignore[misc]
        16, "clips extracted together", min=1, max=MAX_BATCH
    )
    items_file: ItemsFile = None  # type: ignore[misc]
    kind: ClassVar[str] = "CLIPS"


@dataclass(frozen=True, kw_only=True)
class Speech(Compared):
    """FAD-own, the Fréchet distance over features trained here, and KID. No published FAD compares
    with it."""

    kind: ClassVar[str] = "SPEECH"


pictures = as_command(Pictures, pauses=False)
clips = as_command(Clips, pauses=False)
speech = as_command(Speech, pauses=False)
