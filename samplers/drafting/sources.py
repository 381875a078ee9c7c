"""The draft sources by name, and what a policy's field `drafts` may be."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mmaccel.catalog import METHODS, load
from mmaccel.checks import check_path
from mmaccel.contracts import TokenModel
from mmaccel.samplers.drafting.coarse import Coarse
from mmaccel.samplers.drafting.coarse_model import FOLDER as COARSE
from mmaccel.samplers.drafting.contract import DraftSource
from mmaccel.samplers.drafting.draft_model import DraftModel
from mmaccel.samplers.drafting.heads.eagle import Eagle
from mmaccel.samplers.drafting.heads.eagle_model import FOLDER as EAGLE
from mmaccel.weight_folders import check_files

SOURCES: dict[str, type[DraftSource]] = {
    name: load(entry.target) for name, entry in METHODS["drafts"].items()
}
NAMES = tuple(SOURCES)


def find_source(drafts: object) -> DraftSource | None:
    """The source that a policy's field `drafts` is or names; None if it is no source."""
    if isinstance(drafts, DraftSource):
        return drafts
    named = SOURCES.get(drafts) if isinstance(drafts, str) else None
    return None if named is None else named()


def source_of(policy: Any) -> DraftSource | None:
    return find_source(getattr(policy, "drafts", None))


def draft_by(model: TokenModel) -> DraftSource:
    return DraftModel(model)


def parse_source(text: str | Path) -> str | DraftSource:
    """A draft source from a name, or else a folder (also a missing one, by its separator)."""
    folder = Path(text)
    is_path = text is folder or len(folder.parts) > 1 or os.path.isdir(text)
    if isinstance(text, str) and (text in NAMES or not is_path):
        return text
    check_path(
        "drafts", folder, "folder", hint="of a coarse model or an EAGLE head, or name a source"
    )
    if (folder / EAGLE.config).is_file() and not (folder / COARSE.config).is_file():
        return Eagle(str(text))
    check_files(COARSE, folder)
    return Coarse(str(text))
