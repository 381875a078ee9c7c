"""The draft sources by name, and what a policy's field `drafts` may be."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mmaccel.catalog import METHODS, load
from mmaccel.checks import check_choice, check_path
from mmaccel.contracts import TokenModel
from mmaccel.errors import OptionError
from mmaccel.results import Exactness
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
    """The draft source of a policy; None for one without, such as a canvas policy."""
    return find_source(getattr(policy, "drafts", None))


def draft_by(model: TokenModel) -> DraftSource:
    """The source of a small model's drafts."""
    return DraftModel(model)


def check_drafts(
    drafts: object,
    exactness: Exactness,
    takes_corrections: bool = True,
    takes_guesses: bool = True,
) -> None:
    """Raise OptionError unless a policy takes what `drafts` is or names.

    Args:
        drafts: a draft source, or its name.
        takes_corrections: whether it lets a source correct its drafts.
        takes_guesses: whether it takes sources that `learns_guesses`.
    """
    source = find_source(drafts)
    is_bitwise = exactness == "bitwise"
    if source is None:
        known = {
            name: each for name, each in SOURCES.items() if is_bitwise or not each.only_bitwise
        }
        names = [
            name
            for name, each in known.items()
            if (takes_corrections or not each.corrects)
            and (takes_guesses or not each.learns_guesses)
        ]
        suited = "auto" if "auto" in names else "ngram"
        check_choice("drafts", drafts, names, hint=f"{suited} suits most models")
    elif source.corrects and not takes_corrections:
        raise OptionError(
            f"drafts={source.name or repr(source)!r}: expected a source whose drafts are final, "
            "received one that corrects them; use it with Jacobi or SpeculativeJacobi"
        )
    elif source.learns_guesses and not takes_guesses:
        raise OptionError(
            f"drafts={source.name or repr(source)!r}: expected a source that learns accepted "
            "tokens alone, as tokens depend on drafts, received one that learns what passes "
            "guess of later slots; use drafts='auto'"
        )
    elif source.only_bitwise and not is_bitwise:
        raise OptionError(
            f"drafts={source.name or repr(source)!r}: expected a bitwise policy (its drafts "
            "depend on noise or on other rows), received one whose exactness is "
            f"{exactness}; use drafts='coarse' for images, drafts='token-recycling' for text"
        )


def parse_source(text: str | Path) -> str | DraftSource:
    """A draft source from a text: a name, or the folder of a coarse model or of an EAGLE head.

    A text that is no name counts as a folder if it is one or has a separator of paths in it.

    Raises:
        OptionError: a folder without either.
    """
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
