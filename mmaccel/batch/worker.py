"""A worker: one loaded model that makes the items of a modality and writes them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mmaccel.batch.manifest import Record, WriteError, sha256_of
from mmaccel.batch.modalities import Modality, Settings
from mmaccel.batch.prompts import Item, name_wrong
from mmaccel.errors import MMAccelError, OptionError
from mmaccel.outputs.image_files import short_hash
from mmaccel.results import Stats, add_stats

_IGNORED = ("model", "versions", "exactness", "device")  # the hash of the weights is included
_NOTED = ("prompt", "negative", "voice", "seed", "model", "policy", "exactness")  # in a record

Fingerprint = Callable[[Item], str]


class ItemsFailed(MMAccelError, RuntimeError):
    """The model raised an exception, the cause, while it made these items, some at fault."""

    def __init__(self, items: Sequence[Item], cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.items = list(items)


class Worker:
    """One loaded model, and a folder for what it makes."""

    def __init__(self, modality: Modality) -> None:
        self.modality = modality
        self.pipe = modality.open()
        self._size = self.pipe.size
        self._hashes = modality.hash_files(self.pipe)
        self._same: dict[Settings, Settings] = {}  # a million equal settings are one object
        self._settings: dict[str, Settings] = {}  # by the id of a row

    def check(self, items: Sequence[Item]) -> Fingerprint:
        """Check all items before any is made, or an OptionError with the rows' line numbers.
        Returns what gives an item's fingerprint: eight digits that differ where two items do.
        """
        wrong: dict[int, str] = {}
        for item in {item.row.id: item for item in _by_size(items)}.values():
            try:
                self.plan(item)
            except OptionError as error:
                wrong[item.row.line] = f"line {item.row.line}: {error}"
        if wrong:
            named = [wrong[line] for line in sorted(wrong)]
            raise OptionError(
                f"--prompts: expected rows that {self.modality.model} can make, received "
                f"{len(named)} that it cannot. {name_wrong(named)}"
            )
        return lambda item: fingerprint(self.describe(item))

    def plan(self, item: Item) -> Settings:
        """Settings of an item, which all items of its row have."""
        row = item.row.id
        if row not in self._settings:
            settings = self.modality.plan(item, self._resize(item))
            self._settings[row] = self._same.setdefault(settings, settings)
        return self._settings[row]

    def describe(self, item: Item) -> dict[str, Any]:
        return self.modality.describe(item, self.plan(item), self._hashes, self.pipe.model)

    def run_all(
        self,
        items: Sequence[Item],
        on_finish: Callable[[Record], None],
        rows: int | None = None,
        on_step: Any = None,
        look: Callable[[Item, Any], None] | None = None,
    ) -> Stats:
        """Make items by continuous batching: the next one replaces a finished one.

        Args:
            on_finish: called with the record of an item as soon as its file is on the disk.
            look: called with each item and what was made, before `on_finish`.
        """
        rows = self.modality.rows if rows is None else rows
        groups: dict[Any, list[Item]] = {}
        for item in _by_size(items):
            groups.setdefault((item.row.size, self.plan(item)), []).append(item)
        parts = []
        for (_, settings), group in groups.items():
            # methods of layers take rows that begin together
            step = rows if self.modality.layers else len(group)
            for first in range(0, len(group), step):
                part = group[first : first + step]
                parts.append(self._run_together(part, settings, on_finish, rows, on_step, look))
        return add_stats(parts)

    def _run_together(
        self,
        items: list[Item],
        settings: Settings,
        on_finish: Callable[[Record], None],
        rows: int,
        on_step: Any,
        look: Callable[[Item, Any], None] | None,
    ) -> Stats:
        unfinished = {item.key: item for item in items}
        broken: list[Exception] = []  # of what is done with an output, which the model passes on

        def finish(item: Item, made: Any) -> None:
            try:
                with hold_signals():
                    record = self._write(item, made)
                    if look is not None:
                        look(item, made)
                    on_finish(record)
            except Exception as error:
                broken.append(error)
                raise
            del unfinished[item.key]

        pipe = self._resize(items[0])
        try:
            return self.modality.serve(pipe, items, settings, finish, rows, on_step)
        except Exception as error:
            if broken:
                raise broken[0] from None
            known = [items[row] for row in getattr(error, "rows", None) or ()]
            # items start in order, so that the first unfinished ones are those in progress
            raise ItemsFailed(known or list(unfinished.values())[:rows], error) from error

    def _write(self, item: Item, made: Any) -> Record:
        modality, unit = self.modality, self.modality.unit
        facts = self.describe(item)
        shape = modality.measure(made)
        cost = {"passes": made.passes}
        if self.plan(item).policy.exactness == "relaxed":
            sums = ("total_variation", "nats")
            cost |= {name: getattr(made, name) for name in sums if hasattr(made, name)}
        inside = {**facts, **shape}
        if not modality.has_manifest:
            inside |= {**cost, "tokens_per_pass": shape["tokens"] / max(1, made.passes)}
            del inside["id"], inside["k"]
        file = modality.out / item.file
        try:
            modality.write(file, made, inside)
            size, digest = file.stat().st_size, sha256_of(file)
        except OSError as error:
            raise WriteError(
                f"{file}: expected space and permission to write {'a' if unit == 'clip' else 'an'} "
                f"{unit}, received: {error.strerror or error}; finished {unit}s stay, free some "
                f"space and run it again{' with --resume' * modality.has_manifest}"
            ) from error
        return {
            "id": item.row.id,
            "k": item.k,
            "status": "ok",
            "file": item.file,
            "bytes": size,
            "sha256": digest,
            **{name: facts[name] for name in _NOTED if name in facts},
            **shape,
            **cost,
            "fingerprint": fingerprint(facts),
        }

    def _resize(self, item: Item) -> Any:
        size = item.row.size or self._size
        if size != self.pipe.size:
            self.pipe = self.modality.resize(self.pipe, size)
        return self.pipe


def fingerprint(facts: dict[str, Any]) -> str:
    """Eight digits that differ where two descriptions give different items."""
    return short_hash({name: value for name, value in facts.items() if name not in _IGNORED})


def _by_size(items: Sequence[Item]) -> list[Item]:
    sizes = {size: k for k, size in enumerate(dict.fromkeys(item.row.size for item in items))}
    return sorted(items, key=lambda item: sizes[item.row.size])


@contextmanager
def hold_signals() -> Iterator[None]:
    """Inside the block, in the main thread, signals that stop a command wait for its end, so that
    there is no file without its record."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[tuple[int, Any]] = []
    before: dict[int, Any] = {}
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and callable(signal.getsignal(number)):
            before[number] = signal.signal(number, lambda *given: received.append(given))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number, frame in received:
            before[number](number, frame)
