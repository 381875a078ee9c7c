"""Where a model lies that was named: a path, one that ships, or an id of the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from mmaccel.errors import OptionError

_HUB = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def find_model(name: str | Path, shipped: Mapping[str, Path], option: str = "model") -> Path:
    """The folder or file of a model.

    Args:
        name: a path, a name of `shipped`, or an id of the hub, which `huggingface_hub` downloads to
            its cache and finds there the next time.
        shipped: what comes with the package, by name.
        option: what named it, for the message.

    Raises:
        OptionError: there is none; with the names that ship.
    """
    reason = ""
    if isinstance(name, str | Path) and str(name).strip():
        for path in [*([shipped[str(name)]] if str(name) in shipped else []), Path(name)]:
            if os.path.exists(path):  # which takes a name that is too long for no path
                return path
        if is_hub_id(str(name)):
            try:
                return _download(str(name))
            except (OSError, ValueError) as error:
                reason = f" ({' '.join(str(error).split())[:160]})"
    known = f", or one of: {', '.join(shipped)}" if shipped else ""
    raise OptionError(
        f"{option}: expected a folder, a file, an id of the Hugging Face hub such as owner/name"
        f"{known}; received {name if name is None else str(name)!r}{reason}; check the spelling"
    )


def is_hub_id(name: str) -> bool:
    """Whether a name may be an id of the hub, which only asking the hub can tell."""
    return _HUB.fullmatch(name) is not None


def _download(name: str) -> Path:
    """From the hub, or what is cached of it where the hub cannot be reached."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name))
