"""Loaded models, which ComfyUI alone keeps alive."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from mmaccel.comfy.table import Host

_WIDER = 2  # room is made for files of 16 bits read as 32, or for their passes
_Model = TypeVar("_Model")


class KeptModels(Generic[_Model]):
    """Models by what they were opened with, held weakly.

    Whoever wants a model twice gets it once, and ComfyUI decides how long it stays: its cache of
    outputs holds it, and freeing that cache frees the memory.
    """

    def __init__(self) -> None:
        self._open: WeakValueDictionary[Hashable, _Model] = WeakValueDictionary()
        self._guard = Lock()

    def find(
        self, key: Hashable, host: Host, place: str, files: Sequence[Path],
        load: Callable[[], _Model],
    ) -> _Model:  # fmt: skip
        """A model that is open, or one that is loaded now.

        Args:
            key: what it is opened with.
            host: makes room for it, and may not want it any more.
            place: device.
            files: it is made of.
            load: makes it.
        """
        with self._guard:
            found = self._open.get(key)
            if found is None:
                host.check_interrupt()  # a download may have taken long
                gc.collect()  # a model that nobody holds any more may wait in a cycle for its end
                host.make_room(_WIDER * sum(file.stat().st_size for file in files), place)
                found = self._open[key] = load()
        return found

    def __len__(self) -> int:
        """Models that somebody holds."""
        return len(self._open)

    def __iter__(self) -> Iterator[_Model]:
        """They."""
        return iter(list(self._open.values()))


def state_of(files: Sequence[Path]) -> str:
    """What files look like from outside: another text once one is replaced."""
    facts = [(f.as_posix(), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return repr(sorted(facts))
