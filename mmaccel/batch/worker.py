"""A worker: one loaded model that makes the images, clips or utterances of items and writes them.

A `Setup` holds plain values, so that it can be sent to another process. `settings_of` combines it
with a row of the prompt file. `describe` lists everything that an image depends on, and its
`fingerprint` decides whether a later run may keep the image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from mmaccel.batch.job import ItemsFailed
from mmaccel.batch.manifest import Record, WriteError, sha256_of
from mmaccel.batch.prompts import Item
from mmaccel.batch.signals import hold_signals
from mmaccel.catalog import make_policy
from mmaccel.errors import OptionError
from mmaccel.loading import parse_size, pick_name
from mmaccel.options import SAMPLING_FIELDS, LoadOptions, SamplingOptions, given
from mmaccel.outputs.image_files import describe_settings, short_hash, write_png
from mmaccel.outputs.machine import versions
from mmaccel.pipelines.text_to_image.generator import GenerationSettings
from mmaccel.pipelines.text_to_image.model import choose_params, encode_prompts, spread_negatives
from mmaccel.pipelines.text_to_image.outputs import Request
from mmaccel.results import EXACT_DTYPE, Stats, exactness_in
from mmaccel.samplers.drafting.coarse import coarse_facts

if TYPE_CHECKING:
    from mmaccel.pipelines.text_to_image.prompted import PromptPipeline

_MAX_NAMED = 20  # wrong rows that a message names


class Generator(Protocol):
    """Makes items of equal settings: an `ImageGenerator`, or a `SpeechGenerator`."""

    def resize(self, size: tuple[int, int] | None) -> Any:
        """The pipeline for items of a size; None is that of the model.

        Raises:
            OptionError: a size that the model does not have.
        """

    def run_all(
        self,
        requests: Sequence[Request],
        settings: Any,
        deliver: Callable[[Any], None],
        rows: int,
    ) -> Stats:
        """Make them, `rows` at a time; `deliver` is called with each output."""


@dataclass(frozen=True)
class Setup:
    """A model, a policy and a folder, from the command line.

    Attributes:
        model: name, folder, file or hub id.
        out: folder for the files.
        policy: short name; None is an exact one for the model.
        options: fields of the policy.
        sampling: how tokens are drawn, in rows that say nothing else.
        load: how the model is opened; its device and dtype are names.
        decoder: file of the image decoder, for checkpoints without one.
        size: pixels as text, for rows without a size.
        rows: images or clips generated together.
        negative: negative prompt of rows without one.
    """

    model: str
    out: Path
    policy: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    sampling: SamplingOptions = SamplingOptions()
    load: LoadOptions = LoadOptions(device="cpu", dtype=EXACT_DTYPE)
    decoder: Path | None = None
    size: str | None = None
    rows: int = 8
    negative: str | None = None

    unit: ClassVar[str] = "image"
    """Noun for what is made."""
    one: ClassVar[str] = "an image"
    """The same with its article."""

    @property
    def suffix(self) -> str:
        """Of the files."""
        return ".png"

    def open(self) -> PromptPipeline:
        """Load the model for images of `size`.

        Raises:
            OptionError, UnsupportedModelError: see `mmaccel.loading.open_pipeline`.
        """
        from mmaccel.loading import open_pipeline

        return open_pipeline(self.model, self.load, size=self.size, decoder=self.decoder)

    def open_generator(self, pipe: Any) -> Generator:
        """What makes items with a loaded model."""
        from mmaccel.pipelines.text_to_image.generator import ImageGenerator

        return ImageGenerator(pipe)

    def hash_files(self, pipe: Any) -> dict[str, str]:
        """Hashes of what a loaded model was read from, by name; one is `weights`."""
        from mmaccel.pipelines.loading.sources import content_hash

        assert pipe.source is not None  # it was opened by name
        return {"weights": content_hash(pipe.source, self.decoder)}

    def plan(self, item: Item, pipe: Any) -> Any:
        """Settings of an item: its row's values, else these; they have `name`, `policy` and
        `params`, and equal ones are made together.

        Raises:
            OptionError: a value that the model or the policy does not accept.
        """
        return settings_of(self, item, pipe)

    def describe(
        self, item: Item, settings: Any, hashes: Mapping[str, str], model: object
    ) -> dict[str, Any]:
        """Everything that an item depends on, ready for JSON; equal in every run."""
        return describe(self, item, settings, hashes["weights"], model)

    def write(self, file: Path, finished: Any, facts: Mapping[str, Any]) -> None:
        """Write an output of the generator, whole or not at all.

        Raises:
            OSError: no space or no permission.
        """
        write_png(file, finished.image, {**facts})


@dataclass(frozen=True)
class ClipSetup(Setup):
    """The same for a text-to-video model: clips, each with a JSON file next to it.

    Attributes:
        file_format: one of `mmaccel.outputs.video_files.FORMATS`.
    """

    file_format: str = "mp4"

    unit: ClassVar[str] = "clip"
    one: ClassVar[str] = "a clip"

    @property
    def suffix(self) -> str:
        return f".{self.file_format}"

    def open(self) -> PromptPipeline:
        from mmaccel.loading import open_clip_pipeline
        from mmaccel.outputs.video_files import check_sides

        pipe = open_clip_pipeline(self.model, self.load)
        check_sides(self.suffix, pipe.size)
        return pipe

    def write(self, file: Path, finished: Any, facts: Mapping[str, Any]) -> None:
        from mmaccel.outputs.video_files import write_video

        write_video(file, finished.clip.frames, finished.clip.fps, facts)


def settings_of(setup: Setup, item: Item, pipe: PromptPipeline) -> GenerationSettings:
    """Policy and sampling parameters of an item: its row's values, else those of the setup.

    Raises:
        OptionError: a value that the model or the policy does not accept.
    """
    row = item.row
    if row.voice is not None:
        raise OptionError(
            f"voice: expected none for {setup.unit}s, received {row.voice!r}; leave it out, or "
            "take mmaccel speak"
        )
    own = {name: value for name, value in row.params.items() if name in SAMPLING_FIELDS}
    params = choose_params(pipe.prompted_model.params, **{**given(setup.sampling), **own})
    name, policy = read_policy_fields(setup, item, pipe, beside=SAMPLING_FIELDS)
    encode_prompts(pipe.prompted_model, [row.prompt], [negative_of(setup, item)], params)
    return GenerationSettings(name, policy, params)


def read_policy_fields(
    setup: Setup, item: Item, pipe: Any, beside: Sequence[str]
) -> tuple[str, Any]:
    """Short name and policy of an item.

    Args:
        setup: has those of rows that name none.
        item: its row may have others.
        pipe: the model.
        beside: names in the row's `params` that are no fields of the policy.

    Raises:
        OptionError: a value that the policy does not accept.
    """
    row = item.row
    fields = {name: value for name, value in row.params.items() if name not in beside}
    kind = pipe.model.kind
    default, options = pick_name(setup.policy, {**setup.options}, kind)
    name = default if row.policy is None else row.policy
    name, options = pick_name(name, (options if name == default else {}) | fields, kind)
    return name, make_policy(name, **options)


def negative_of(setup: Setup, item: Item) -> str | None:
    """The negative prompt of an item; None is the model's own."""
    negative = setup.negative if item.row.negative is None else item.row.negative
    return spread_negatives(negative, 1)[0]


def describe(
    setup: Setup, item: Item, settings: GenerationSettings, weights: str, model: object = None
) -> dict[str, Any]:
    """Everything that an image depends on, ready for JSON; equal in every run.

    Args:
        weights: content hash of the model.
        model: the token model, which may have a coarse model of its own.
    """
    size = parse_size(setup.size) if item.row.size is None else item.row.size
    negative = negative_of(setup, item)
    return {
        "id": item.row.id,
        "k": item.k,
        "prompt": item.row.prompt,
        **({} if negative is None else {"negative": negative}),
        "seed": item.seed,
        "model": setup.model,
        "weights": weights,
        "size": None if size is None else list(size),
        "dtype": setup.load.dtype,
        "device": setup.load.device.split(":")[0],
        **describe_settings(settings.name, settings.policy, settings.params),
        **coarse_facts(settings.policy, model),
        "exactness": exactness_in(settings.policy.exactness, setup.load.dtype),
        "versions": versions(),
    }


def fingerprint(facts: dict[str, Any]) -> str:
    """Eight digits that differ where two descriptions give different images."""
    ignored = ("model", "versions", "exactness", "device")  # the hash of the weights is included
    return short_hash({name: value for name, value in facts.items() if name not in ignored})


class Worker:
    """One loaded model, and a folder for what it makes.

    Args:
        setup: model and folder.

    Raises:
        OptionError, UnsupportedModelError: the model cannot be opened.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        pipe = setup.open()
        self._generator = setup.open_generator(pipe)
        self._hashes = setup.hash_files(pipe)
        self._model = pipe.model
        # a million equal settings are one object
        self._same: dict[Any, Any] = {}
        self._settings: dict[str, Any] = {}  # by the id of a row

    def check(self, items: Sequence[Item]) -> Callable[[Item], str]:
        """Check all items before any image is generated.

        Returns:
            What gives the fingerprint of an item.

        Raises:
            OptionError: rows that this model cannot generate, each with its line number.
        """
        wrong: dict[int, str] = {}
        for group in _by_size(items):
            try:
                pipe = self._generator.resize(group[0].row.size)
            except OptionError as error:
                wrong.setdefault(group[0].row.line, str(error))
                continue
            for item in {item.row.id: item for item in group}.values():
                try:
                    self._plan(item, pipe)
                except OptionError as error:
                    wrong.setdefault(item.row.line, str(error))
        if wrong:
            named = [f"line {line}: {text}" for line, text in sorted(wrong.items())]
            more = f" (and {len(named) - _MAX_NAMED} more)" if len(named) > _MAX_NAMED else ""
            raise OptionError(
                f"--prompts: expected rows that {self.setup.model} can make, received {len(named)} "
                f"that it cannot. {'. '.join(named[:_MAX_NAMED])}{more}"
            )
        return lambda item: fingerprint(self._describe(item))

    def close(self) -> None:
        """See `mmaccel.batch.job.Executor`; the model is freed with this object."""

    def run(self, item: Item) -> Record:
        """Generate and write one image; returns its record."""
        records: list[Record] = []
        self.run_all([item], records.append)
        return records[0]

    def run_all(
        self, items: Sequence[Item], on_finish: Callable[[Record], None], rows: int | None = None
    ) -> None:
        """Generate images by continuous batching: the next item replaces a finished one.

        Args:
            items: any number, in any order.
            on_finish: called with the record of an item as soon as its image is on the disk.
            rows: images generated together; None takes the setup's.

        Raises:
            WriteError: an image cannot be written.
            ItemsFailed: from any exception of the model; finished items stay finished.
        """
        rows = self.setup.rows if rows is None else rows
        for group in _by_size(items):
            pipe = self._generator.resize(group[0].row.size)
            settings = [self._plan(item, pipe) for item in group]
            for indices in _by_settings(settings):
                part = [group[k] for k in indices]
                self._run_together(part, settings[indices[0]], on_finish, rows)

    def _run_together(
        self,
        items: list[Item],
        settings: Any,
        on_finish: Callable[[Record], None],
        rows: int,
    ) -> None:
        """Generate items of equal size and settings."""
        left = {item.key: item for item in items}

        def write(finished: Any) -> None:
            try:
                with hold_signals():
                    on_finish(self._write(finished))
            except Exception as error:
                raise _CallbackFailed from error
            del left[finished.request.tag.key]

        requests = [
            Request(item.row.prompt, item.seed, item, negative_of(self.setup, item))
            for item in items
        ]
        try:
            self._generator.run_all(requests, settings, write, rows)
        except _CallbackFailed as error:
            assert error.__cause__ is not None
            raise error.__cause__ from None
        except Exception as error:
            known = [items[row] for row in getattr(error, "rows", None) or ()]
            # items start in order, so that the first unfinished ones are those in progress
            raise ItemsFailed(known or list(left.values())[:rows], error) from error

    def _write(self, finished: Any) -> Record:
        item: Item = finished.request.tag
        settings = self._settings[item.row.id]
        facts = self._describe(item)
        file = self.setup.out / item.file
        try:
            self.setup.write(file, finished, {**facts, **finished.shape})
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
                f"{file}: expected space and permission to write {self.setup.one}, received: "
                f"{error.strerror}; the {self.setup.unit}s in the manifest are complete, continue "
                "with --resume"
            ) from error
        shared = ("prompt", "negative", "voice", "seed", "model", "policy", "exactness")
        record |= {name: facts[name] for name in shared if name in facts}
        return {
            **record,
            **finished.shape,
            **finished.cost(settings.policy.exactness),
            "fingerprint": fingerprint(facts),
        }

    def _plan(self, item: Item, pipe: Any) -> Any:
        """Settings of an item, which all items of its row have."""
        row = item.row.id
        if row not in self._settings:
            settings = self.setup.plan(item, pipe)
            self._settings[row] = self._same.setdefault(settings, settings)
        return self._settings[row]

    def _describe(self, item: Item) -> dict[str, Any]:
        return self.setup.describe(item, self._settings[item.row.id], self._hashes, self._model)


class _CallbackFailed(Exception):
    """Carries an exception of `on_finish` through the model, which did not fail."""


def _by_size(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Items of equal size, each group in the order given."""
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault(item.row.size, []).append(item)
    yield from groups.values()


def _by_settings(settings: Sequence[Any]) -> Iterator[list[int]]:
    """Indices of equal settings."""
    groups: dict[Any, list[int]] = {}
    for k, each in enumerate(settings):
        groups.setdefault(each, []).append(k)
    yield from groups.values()
