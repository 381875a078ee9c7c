"""`mmaccel evaluate clips`: distances from other clips, prompts read back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mmaccel.commands.evaluate.distances import ReportFlags, print_report
from mmaccel.commands.flags import with_flags
from mmaccel.commands.options import check_count
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_BATCH, MAX_MEASURED

DRAWN = "moving-scenes"


@dataclass(frozen=True, kw_only=True)
class ClipFlags:
    """What clips are compared with, and by what."""

    against: Annotated[
        str | None, typer.Option(help="a folder, or moving-scenes: drawn clips no training saw")
    ] = None
    features: Annotated[str, typer.Option(help="moving-scenes or module:function")] = DRAWN
    count: Annotated[
        int | None, typer.Option(help="clips of --against moving-scenes; by default as many")
    ] = None
    batch_size: Annotated[int, typer.Option(help="clips extracted together")] = 16

    def check(self) -> None:
        """Refuse options that would be ignored.

        Raises:
            OptionError: with the name of the option.
        """
        check_count("batch-size", self.batch_size, MAX_BATCH)
        if self.count is not None:
            check_count("count", self.count, MAX_MEASURED)
            if self.against != DRAWN:
                raise OptionError(
                    f"--count: expected --against {DRAWN} with it, received --against "
                    f"{self.against}; of a folder all clips are used"
                )
        if self.against is None and self.features != DRAWN:
            raise OptionError(
                f"--features: expected --against with it, received none; give a folder, or {DRAWN}"
            )


@with_flags
def clips(
    folder: Annotated[Path, typer.Argument(help="clips, such as those of mmaccel animate")],
    *,
    flags: ClipFlags,
    written: ReportFlags,
) -> None:
    """FVD-own, the Fréchet distance over features trained here, and KID; prompts of moving scenes
    are read back where clips carry them. No published FVD compares with it."""
    from mmaccel.commands.files import new_report
    from mmaccel.evaluation.quality.features import extract_all, open_clip_extractor
    from mmaccel.evaluation.quality.image_folder import MOVING, list_items, read_clips
    from mmaccel.evaluation.quality.report import (
        check_clip_captions,
        check_sizes,
        measure_distances,
        reference_clips,
        sum_verdicts,
    )

    flags.check()
    written.check()
    items = list_items(folder, MOVING)
    report: dict[str, Any] = new_report(folder=str(folder), n=len(items))
    if flags.against is not None:
        extract = open_clip_extractor(flags.features)
        others = None if flags.against == DRAWN else list_items(Path(flags.against), MOVING)
        check_sizes(items, others, flags.count, "clips")
        own = extract_all(read_clips(items, flags.batch_size), extract)
        theirs = extract_all(
            reference_clips(others, flags.count or len(items), flags.batch_size), extract
        )
        report |= {"against": flags.against, "n_against": len(theirs), "features": flags.features}
        report |= measure_distances(own, theirs, written.seed)
    verdicts = check_clip_captions(items, flags.batch_size)
    report["captions"] = sum_verdicts(verdicts)
    written.write(report, items, verdicts)
    print_report(report, "clips", f"a folder, or {DRAWN}", "FVD-own")
