"""What a killed process leaves: temporary files of images that it did not finish."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from mmaccel.batch.item import Item

_NAME = re.compile(r"\.(?P<file>.+\.png)\.\d+\.tmp")


def sweep(folder: Path, items: Iterable[Item]) -> None:
    """Delete temporary files of these items, and of no others: another shard may be writing its.

    The manifest of these items is held by this process, so nobody else writes them, unless other
    numbers of shards run at the same time.
    """
    own = {item.file for item in items}
    for file in folder.glob(".*.tmp"):
        found = _NAME.fullmatch(file.name)
        if found is not None and found["file"] in own:
            file.unlink(missing_ok=True)
