"""`mmaccel evaluate pictures`: distances from other images, prompts read back, CLIP score."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mmaccel.commands.evaluate.distances import ReportFlags, print_report
from mmaccel.commands.flags import with_flags
from mmaccel.commands.options import check_count
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_BATCH, MAX_IMAGES

_FEATURES = "scenes, inception or module:function"


@dataclass(frozen=True, kw_only=True)
class PictureFlags:
    """What images are compared with, and by what."""

    against: Annotated[
        str | None, typer.Option(help="a folder, or scenes: drawn images no training saw")
    ] = None
    features: Annotated[str, typer.Option(help=_FEATURES)] = "scenes"
    weights: Annotated[Path | None, typer.Option(help="of inception")] = None
    clip: Annotated[
        str | None, typer.Option(help="module:function; images and texts to two embeddings")
    ] = None
    count: Annotated[
        int | None, typer.Option(help="images of --against scenes; by default as many")
    ] = None
    batch_size: Annotated[int, typer.Option(help="images extracted together")] = 64

    def check(self) -> None:
        """Refuse options that would be ignored.

        Raises:
            OptionError: with the name of the option.
        """
        check_count("batch-size", self.batch_size, MAX_BATCH)
        if self.count is not None:
            check_count("count", self.count, MAX_IMAGES)
            if self.against != "scenes":
                raise OptionError(
                    f"--count: expected --against scenes with it, received --against "
                    f"{self.against}; of a folder all images are used"
                )
        if self.against is None and (self.features != "scenes" or self.weights is not None):
            raise OptionError(
                "--features, --weights: expected --against with them, received none; give a "
                "folder, or scenes"
            )


@with_flags
def images(
    folder: Annotated[Path, typer.Argument(help="images, such as those of mmaccel generate")],
    *,
    flags: PictureFlags,
    written: ReportFlags,
) -> None:
    """Fréchet distance and KID, with n and bias; scenes' prompts are read back where images
    carry them."""
    from mmaccel.commands.files import new_report
    from mmaccel.evaluation.quality.features import extract_all, load_callable, open_extractor
    from mmaccel.evaluation.quality.image_folder import list_items, read_pixels
    from mmaccel.evaluation.quality.report import (
        check_captions,
        check_sizes,
        measure_clip,
        measure_distances,
        reference_pixels,
        sum_verdicts,
        with_captions,
    )

    flags.check()
    written.check()
    items = list_items(folder)
    embed = None
    extract = None
    others = None
    if flags.clip is not None:
        embed = load_callable(flags.clip, "clip")
        with_captions(items)
    if flags.against is not None:
        extract = open_extractor(flags.features, flags.weights)
        others = None if flags.against == "scenes" else list_items(Path(flags.against))
        check_sizes(items, others, flags.count)
    report: dict[str, Any] = new_report(folder=str(folder), n=len(items))
    if extract is not None:
        own = extract_all(read_pixels(items, flags.batch_size), extract)
        drawn = reference_pixels(others, flags.count or len(items), flags.batch_size)
        theirs = extract_all(drawn, extract)
        report |= {"against": flags.against, "n_against": len(theirs), "features": flags.features}
        report |= measure_distances(own, theirs, written.seed)
    verdicts = check_captions(items, flags.batch_size)
    report["captions"] = sum_verdicts(verdicts)
    scores: dict[str, float] = {}
    if embed is not None:
        found = measure_clip(items, embed, flags.batch_size)
        scores = found.pop("scores")
        report["clip"] = {"by": flags.clip, **found}
    written.write(report, items, verdicts, clip=scores)
    print_report(report, "images", "a folder, or scenes")
