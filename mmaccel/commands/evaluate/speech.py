"""`mmaccel evaluate speech`: distances of sound from other sound."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mmaccel.commands.evaluate.distances import print_report
from mmaccel.commands.flags import with_flags
from mmaccel.commands.options import JsonFile, parse_path, read_seed
from mmaccel.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class SpeechFlags:
    """What sound is compared with, and by what."""

    against: Annotated[
        Path | None, typer.Option(help="a folder of WAV files", parser=parse_path, metavar="FOLDER")
    ] = None
    features: Annotated[str, typer.Option(help="voices or module:function")] = "voices"
    seed: Annotated[int, typer.Option(help="of subsets and splits", callback=read_seed)] = 0
    json_file: JsonFile = None


@with_flags
def speech(
    folder: Annotated[Path, typer.Argument(help="WAV files, such as those of mmaccel speak")],
    *,
    flags: SpeechFlags,
) -> None:
    """FAD-own, the Fréchet distance over features trained here, and KID. No published FAD compares
    with it."""
    from mmaccel.commands.files import check_file, new_report, write_json
    from mmaccel.evaluation.quality.features import extract_sounds, open_sound_extractor
    from mmaccel.evaluation.quality.image_folder import SOUNDS, list_items
    from mmaccel.evaluation.quality.report import check_sizes, measure_distances
    from mmaccel.outputs.sound_files import read_sound

    check_file("--json", flags.json_file)
    if flags.against is None:
        raise OptionError(
            "--against: expected a folder of WAV files, received none; give one, since a distance "
            "has two sides"
        )
    items = list_items(folder, SOUNDS)
    others = list_items(flags.against, SOUNDS)
    check_sizes(items, others, None, "sounds")
    hear = open_sound_extractor(flags.features)
    own = extract_sounds((read_sound(item.file) for item in items), hear)
    theirs = extract_sounds((read_sound(item.file) for item in others), hear)
    report: dict[str, Any] = new_report(
        folder=str(folder),
        n=len(items),
        against=str(flags.against),
        n_against=len(others),
        features=flags.features,
        **measure_distances(own, theirs, flags.seed),
    )
    write_json(flags.json_file, report)
    print_report(report, "sounds", "a folder", "FAD-own", counted="n (windows)")
