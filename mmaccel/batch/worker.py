"""The worker writes what an `ImageGenerator` makes, in this process, a shard's or an actor's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mmaccel.batch.failures import ItemsFailed, Outside, WriteError
from mmaccel.batch.item import Item
from mmaccel.batch.manifest import Record, sha256_of
from mmaccel.batch.recipe import describe, fingerprint, make_recipe, negative_of
from mmaccel.batch.setup import Setup
from mmaccel.errors import OptionError
from mmaccel.outputs.image_files import write_png

if TYPE_CHECKING:
    from mmaccel.pipelines.text_to_image.outputs import RequestOutput
    from mmaccel.pipelines.text_to_image.pipeline import GenerationSettings, TextToImage

_NAMED = 20  # bad rows a message names


class Worker:
    """One loaded model, and a folder to write into.

    Args:
        setup: which.

    Raises:
        OptionError, UnsupportedModelError: the model cannot be opened.
    """

    def __init__(self, setup: Setup) -> None:
        from mmaccel.pipelines.loading.sources import content_hash
        from mmaccel.pipelines.text_to_image.pipeline import ImageGenerator

        self.setup = setup
        pipe = setup.open()
        assert pipe.source is not None  # it was opened by name
        self._generator = ImageGenerator(pipe)
        self._weights = content_hash(pipe.source, setup.decoder)
        # one object for all items that are made alike
        self._same: dict[GenerationSettings, GenerationSettings] = {}
        self._plans: dict[tuple[str, int], tuple[GenerationSettings, str]] = {}

    def check(self, items: Sequence[Item]) -> dict[tuple[str, int], str]:
        """Find out before any work whether all items can be made, and what each is made from.

        Returns:
            The fingerprint of every item, see `mmaccel.batch.recipe.fingerprint`.

        Raises:
            OptionError: rows that cannot be made, each with its line.
        """
        wrong: dict[int, str] = {}
        for group in _groups(items):
            try:
                pipe = self._generator.resize(group[0].row.size)
            except OptionError as error:
                wrong.setdefault(group[0].row.line, str(error))
                continue
            for item in group:
                try:
                    self._plan(item, pipe)
                except OptionError as error:
                    wrong.setdefault(item.row.line, str(error))
        if wrong:
            named = [f"line {line}: {text}" for line, text in sorted(wrong.items())]
            more = f" (and {len(named) - _NAMED} more)" if len(named) > _NAMED else ""
            raise OptionError(
                f"--prompts: expected rows that {self.setup.model} can make, received {len(named)} "
                f"that it cannot. {'. '.join(named[:_NAMED])}{more}"
            )
        return {item.key: self._plans[item.key][1] for item in items}

    def close(self) -> None:
        """Nothing: the model goes with this object."""

    def run(self, item: Item) -> Record:
        """Make one item and write it; its record."""
        records: list[Record] = []
        self.run_all([item], records.append)
        return records[0]

    def run_all(
        self, items: Sequence[Item], deliver: Callable[[Record], None], rows: int | None = None
    ) -> None:
        """Make items, `rows` at a time; the place of a finished one is taken by the next.

        Args:
            items: any number, in any order.
            deliver: called with an item's record as soon as its image is on the disk.
            rows: images made together; None takes the setup's.

        Raises:
            WriteError: an image cannot be written.
            ItemsFailed: from whatever the model raises; what was delivered stays.
        """
        rows = self.setup.rows if rows is None else rows
        for group in _groups(items):
            pipe = self._generator.resize(group[0].row.size)
            recipes = [self._plan(item, pipe)[0] for item in group]
            for alike in _alike(recipes):
                part = [group[k] for k in alike]
                self._serve(part, recipes[alike[0]], deliver, rows)

    def _serve(
        self,
        items: list[Item],
        recipe: GenerationSettings,
        deliver: Callable[[Record], None],
        rows: int,
    ) -> None:
        """Make items that may be decoded together."""
        from mmaccel.pipelines.text_to_image.outputs import Request

        left = {item.key: item for item in items}

        def write(made: RequestOutput) -> None:
            try:
                deliver(self._write(made))
            except Exception as error:
                raise Outside from error
            del left[made.request.tag.key]

        requests = [
            Request(item.row.prompt, item.seed, item, negative_of(self.setup, item))
            for item in items
        ]
        try:
            self._generator.run_all(requests, recipe, write, rows)
        except Outside as error:
            assert error.__cause__ is not None
            raise error.__cause__ from None
        except Exception as error:
            known = [items[row] for row in getattr(error, "rows", None) or ()]
            # places are filled in order: what is being made are the first that are not finished
            raise ItemsFailed(known or list(left.values())[:rows], error) from error

    def _write(self, made: RequestOutput) -> Record:
        item: Item = made.request.tag
        recipe, mark = self._plans[item.key]
        facts = describe(self.setup, item, recipe, self._weights)
        file = self.setup.out / item.file
        try:
            write_png(file, made.image, {**facts, **made.shape})
            record: Record = {
                "id": item.row.id,
                "k": item.k,
                "status": "ok",
                "file": item.file,
                "bytes": file.stat().st_size,
                "sha256": sha256_of(file),
            }
        except OSError as error:
            raise WriteError(
                f"{file}: expected room and leave to write an image, received: {error.strerror}; "
                "what is in the manifest is kept, go on with --resume"
            ) from error
        told = ("prompt", "negative", "seed", "model", "policy", "exactness")
        record |= {name: facts[name] for name in told if name in facts}
        return {**record, **made.shape, **made.cost(recipe.policy.exactness), "recipe": mark}

    def _plan(self, item: Item, pipe: TextToImage) -> tuple[GenerationSettings, str]:
        """How an item is made, and the fingerprint of what it is made from."""
        found = self._plans.get(item.key)
        if found is None:
            recipe = make_recipe(self.setup, item, pipe)
            recipe = self._same.setdefault(recipe, recipe)
            mark = fingerprint(describe(self.setup, item, recipe, self._weights))
            found = self._plans[item.key] = recipe, mark
        return found


def _groups(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Items of one size after another, each in its order."""
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault(item.row.size, []).append(item)
    yield from groups.values()


def _alike(recipes: Sequence[GenerationSettings]) -> Iterator[list[int]]:
    """Indices of items that may be decoded together."""
    groups: dict[GenerationSettings, list[int]] = {}
    for k, recipe in enumerate(recipes):
        groups.setdefault(recipe, []).append(k)
    yield from groups.values()
