"""The modules of the standard library as text: what `stdlib` was trained on, and what it was not.

Which module is held out follows from its path alone, so that it is held out on every machine and in
every version of Python.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

_LEFT_OUT = {  # tests repeat themselves, tables are no text, and what is installed differs
    "__pycache__",
    "dist-packages",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
_ONE_IN = 20  # modules are held out
_MOST_BYTES = 400_000  # of a module; longer ones are tables


@dataclass(frozen=True)
class Module:
    """A file of the standard library.

    Attributes:
        name: path below the library's folder, with slashes.
        text: what stands in it.
    """

    name: str
    text: str

    @property
    def is_held_out(self) -> bool:
        """Whether no model was trained on it."""
        return int(hashlib.sha256(self.name.encode()).hexdigest(), 16) % _ONE_IN == 0


def read_modules(folder: Path | None = None) -> list[Module]:
    """All modules, in the order of their names.

    Args:
        folder: of the library; None: that of the running Python.
    """
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    found = []
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).parts
        if _LEFT_OUT.isdisjoint(parts) and not parts[0].startswith("config-"):
            data = file.read_bytes()
            if len(data) <= _MOST_BYTES:
                text = data.decode("utf-8", errors="replace")
                found.append(Module("/".join(parts), text))
    return found
