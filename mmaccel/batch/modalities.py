"""What a job makes with one model: images, clips, utterances, or continuations of frames.

A modality opens its model, says how an item is made and what it depends on, and writes a file. It
holds plain values, so that it can be sent to another process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mmaccel import loading
from mmaccel.batch.prompts import Item, Row
from mmaccel.catalog import make_policy
from mmaccel.checks import show
from mmaccel.errors import OptionError
from mmaccel.options import SAMPLING_FIELDS, LoadOptions, SamplingOptions, given
from mmaccel.outputs.image_files import describe_settings, hash_pixels, write_png
from mmaccel.outputs.machine import versions
from mmaccel.outputs.sound_files import write_sound
from mmaccel.outputs.video_files import check_sides, write_video
from mmaccel.pipelines.hosts.loading.sources import content_hash
from mmaccel.pipelines.text_to_image.model import choose_params, encode_prompts, spread_negatives
from mmaccel.pipelines.text_to_image.outputs import Request
from mmaccel.pipelines.text_to_speech.plan import make_plan, pick_params, share_seconds
from mmaccel.results import EXACT_DTYPE, Stats, exactness_in
from mmaccel.samplers.drafting.coarse import coarse_facts
from mmaccel.samplers.sampling_params import SamplingParams

if TYPE_CHECKING:
    from PIL.Image import Image

Deliver = Callable[[Item, Any], None]


@dataclass(frozen=True)
class Settings:
    """How an item is made; items of equal settings are made together. `options` are further
    arguments of the pipeline's call.
    """

    name: str
    policy: Any
    params: SamplingParams
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Modality(ABC):
    """A model, a policy and a folder.

    Attributes:
        policy, options: short name, None for an exact one of the model's; its fields.
        layers: methods of the model's layers by slot; their items begin together.
        load: how the model is opened; its device and dtype are names.
        rows: items made together.
        has_manifest: whether a manifest says what an item cost; if not, its file does.
    """

    model: str
    out: Path = Path("out")
    policy: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    layers: Mapping[str, Any] = field(default_factory=dict)
    sampling: SamplingOptions = SamplingOptions()
    load: LoadOptions = LoadOptions(device="cpu", dtype=EXACT_DTYPE)
    rows: int = 8
    suffix: str = ".png"
    has_manifest: bool = True

    unit: ClassVar[str]
    """Noun for what is made."""
    not_of_rows: ClassVar[tuple[str, ...]] = ()
    """Fields and parameters that rows must not have."""
    beside: ClassVar[tuple[str, ...]] = SAMPLING_FIELDS
    """Names in a row's `params` that are no fields of the policy."""

    @abstractmethod
    def open(self) -> Any: ...

    def resize(self, pipe: Any, size: tuple[int, int]) -> Any:
        """The pipeline for another size."""
        raise OptionError(
            f"size: expected none for {self.unit}s, received {size[0]}x{size[1]}; leave it out"
        )

    def hash_files(self, pipe: Any) -> dict[str, str]:
        """Hashes of what a loaded model was read from, by name; one is `weights`."""
        return {"weights": content_hash(pipe.source)}

    @abstractmethod
    def plan(self, item: Item, pipe: Any) -> Settings:
        """The settings of an item: its row's values, else these."""

    def choose_policy(self, row: Row, pipe: Any) -> tuple[str, Any]:
        """Short name and policy of a row; fields of its own replace those of the command line."""
        for name in self.not_of_rows:
            value = row.params.get(name, getattr(row, name, None))
            if value is not None:
                raise OptionError(
                    f"{name}: expected none for {self.unit}s, received {show(value)}; leave it out"
                )
        default = loading.pick_name(self.policy, pipe.model)
        name = default if row.policy is None else loading.pick_name(row.policy, pipe.model)
        options = {**self.options} if name == default else {}
        options |= {key: value for key, value in row.params.items() if key not in self.beside}
        return name, make_policy(name, **options)

    def sampling_of(self, row: Row) -> dict[str, Any]:
        of_row = {name: row.params[name] for name in self.beside if name in row.params}
        return given(self.sampling) | of_row

    def title_of(self, item: Item) -> str:
        """What the name of a file begins with that is not of a prompt file."""
        return item.row.prompt

    @abstractmethod
    def serve(
        self,
        pipe: Any,
        items: Sequence[Item],
        settings: Settings,
        deliver: Deliver,
        rows: int,
        on_step: Any = None,
    ) -> Stats:
        """Make items of equal settings, `rows` at a time; each is delivered when it is finished."""

    def describe(
        self, item: Item, settings: Settings, hashes: Mapping[str, str], model: object
    ) -> dict[str, Any]:
        """Everything that an item depends on, ready for JSON; equal in every run."""
        facts: dict[str, Any] = {
            "id": item.row.id,
            "k": item.k,
            "prompt": item.row.prompt,
            "negative": None,
            "seed": item.seed,
            "model": self.model,
            **hashes,
            "size": None,
            "dtype": self.load.dtype,
            "device": self.load.device.split(":")[0],
            **describe_settings(settings.name, settings.policy, settings.params),
            **{slot: repr(method) for slot, method in self.layers.items()},
            **coarse_facts(settings.policy, model),
            "exactness": exactness_in(
                "relaxed" if self.layers else settings.policy.exactness, self.load.dtype
            ),
            "versions": versions(),
        }
        facts |= self.own_facts(item, settings)
        left_out = self.not_facts if facts["negative"] else (*self.not_facts, "negative")
        return {name: value for name, value in facts.items() if name not in left_out}

    @property
    def not_facts(self) -> tuple[str, ...]:
        """What `describe` leaves out."""
        return ()

    @abstractmethod
    def own_facts(self, item: Item, settings: Settings) -> dict[str, Any]:
        """What an item of this modality depends on too."""

    @abstractmethod
    def measure(self, made: Any) -> dict[str, Any]:
        """What a manifest notes of an output: its number of tokens, and how large it is."""

    @abstractmethod
    def write(self, file: Path, made: Any, facts: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Images(Modality):
    """Images of prompts. `decoder` is the file of one, for checkpoints without; size and negative
    prompt are those of rows without.
    """

    decoder: Path | None = None
    size: str | None = None
    negative: str | None = None

    unit: ClassVar[str] = "image"
    not_of_rows: ClassVar[tuple[str, ...]] = ("voice",)

    def open(self) -> Any:
        return loading.open_pipeline(self.model, self.load, size=self.size, decoder=self.decoder)

    def resize(self, pipe: Any, size: tuple[int, int]) -> Any:
        return pipe.resize(size)

    def hash_files(self, pipe: Any) -> dict[str, str]:
        return {"weights": content_hash(pipe.source, self.decoder)}

    def plan(self, item: Item, pipe: Any) -> Settings:
        row = item.row
        name, policy = self.choose_policy(row, pipe)
        params = choose_params(pipe.prompted_model.params, **self.sampling_of(row))
        encode_prompts(pipe.prompted_model, [row.prompt], [self.negative_of(row)], params)
        return Settings(name, policy, params)

    def negative_of(self, row: Row) -> str | None:
        return spread_negatives(self.negative if row.negative is None else row.negative, 1)[0]

    def serve(
        self,
        pipe: Any,
        items: Sequence[Item],
        settings: Settings,
        deliver: Deliver,
        rows: int,
        on_step: Any = None,
    ) -> Stats:
        requests = [
            Request(item.row.prompt, item.seed, item, self.negative_of(item.row)) for item in items
        ]
        stats: Stats = pipe.serve(
            requests,
            settings.params,
            policy=settings.policy,
            **self.layers,
            rows=rows,
            deliver=lambda made: deliver(made.request.tag, self.take(made)),
            on_step=on_step,
        )
        return stats

    def take(self, made: Any) -> Any:
        """The image or clip of an output of the pipeline."""
        return made

    def own_facts(self, item: Item, settings: Settings) -> dict[str, Any]:
        size = loading.parse_size(self.size) if item.row.size is None else item.row.size
        negative = self.negative_of(item.row)
        return {"negative": negative, "size": size and list(size)}

    def measure(self, made: Any) -> dict[str, Any]:
        width, height = made.image.size
        return {"tokens": len(made.tokens), "width": width, "height": height}

    def write(self, file: Path, made: Any, facts: Mapping[str, Any]) -> None:
        write_png(file, made.image, facts)


@dataclass(frozen=True, kw_only=True)
class Clips(Images):
    """Clips of prompts, each with a JSON file next to it; they may begin with `frames`, read from
    `start`.
    """

    suffix: str = ".mp4"
    start: str | None = None
    frames: Sequence[Image] = ()

    unit: ClassVar[str] = "clip"

    def open(self) -> Any:
        pipe = loading.open_with_parts("TextToVideo", self.model, self.load)
        check_sides(self.suffix, pipe.size)
        return pipe.start_with(self.frames) if self.frames else pipe

    def take(self, made: Any) -> Any:
        return made.clip

    def own_facts(self, item: Item, settings: Settings) -> dict[str, Any]:
        facts = super().own_facts(item, settings)
        start = {"start": self.start, "start_pixels": hash_pixels(self.frames)}
        return {**facts, **start} if self.frames else facts

    def measure(self, made: Any) -> dict[str, Any]:
        frames, height, width, _ = made.frames.shape
        return {
            "tokens": made.tokens.numel(),
            "frames": frames,
            "n_given": made.n_given,
            "fps": made.fps,
            "width": width,
            "height": height,
        }

    def write(self, file: Path, made: Any, facts: Mapping[str, Any]) -> None:
        write_video(file, made.frames, made.fps, facts)


@dataclass(frozen=True, kw_only=True)
class Continuations(Clips):
    """Clips that continue the frames `starts`, by the id of a row, by a model with a codec;
    `prompt` is what happens in all clips, None for a model that reads no text.
    """

    codec: str | None = None
    text_encoder: str | None = None
    starts: Mapping[str, Sequence[Image]] = field(default_factory=dict)
    prompt: str | None = None

    def open(self) -> Any:
        parts = {"codec": self.codec, "text_encoder": self.text_encoder}
        pipe = loading.open_with_parts("ImageToVideo", self.model, self.load, **parts)
        check_sides(self.suffix, pipe.size)
        pipe.video.encode_prompt(self.prompt)
        return pipe

    def hash_files(self, pipe: Any) -> dict[str, str]:
        parts = {"weights": pipe.source, "codec": pipe.codec, "text_encoder": pipe.text_encoder}
        return {name: content_hash(file) for name, file in parts.items() if file is not None}

    def title_of(self, item: Item) -> str:
        return Path(item.row.id).stem

    def plan(self, item: Item, pipe: Any) -> Settings:
        params = choose_params(pipe.video.params, **self.sampling_of(item.row))
        start = ("start", item.row.id)  # clips of other starts are made apart
        return Settings(*self.choose_policy(item.row, pipe), params, (start,))

    def serve(
        self,
        pipe: Any,
        items: Sequence[Item],
        settings: Settings,
        deliver: Deliver,
        rows: int,
        on_step: Any = None,
    ) -> Stats:
        stats: Stats = pipe.serve(
            self.starts[items[0].row.id],
            settings.params,
            prompt=self.prompt,
            policy=settings.policy,
            seed=[item.seed for item in items],
            batch_size=rows,
            deliver=lambda clip: deliver(items[clip.index], clip),
            on_step=on_step,
            **self.layers,
        )
        return stats

    @property
    def not_facts(self) -> tuple[str, ...]:
        return "size", "guidance_scale", *(() if self.prompt else ("prompt",))

    def own_facts(self, item: Item, settings: Settings) -> dict[str, Any]:
        start = item.row.id
        return {"start": Path(start).name, "start_pixels": hash_pixels(self.starts[start])}


@dataclass(frozen=True, kw_only=True)
class Speech(Modality):
    """Utterances of texts, each with a JSON file next to it. Codecs are folders or hub ids, None
    the authors'; voice and penalty are those of rows that name none; `max_seconds` cuts each part
    of a long text.
    """

    suffix: str = ".wav"
    codec: str | None = None
    voice: str | None = None
    max_seconds: float | None = None
    repetition_penalty: float | None = None

    unit: ClassVar[str] = "utterance"
    not_of_rows: ClassVar[tuple[str, ...]] = (
        "negative", "guidance_scale", "divergence_temperature",
    )  # fmt: skip
    beside: ClassVar[tuple[str, ...]] = (*SAMPLING_FIELDS, "repetition_penalty")

    def open(self) -> Any:
        return loading.open_with_parts("TextToSpeech", self.model, self.load, codec=self.codec)

    def hash_files(self, pipe: Any) -> dict[str, str]:
        return {"weights": content_hash(pipe.source), "codec": content_hash(pipe.codec)}

    def plan(self, item: Item, pipe: Any) -> Settings:
        """See `Modality.plan`. How long an item may last depends on its own text alone. Texts of
        similar lengths have equal settings, so that they are decoded together.
        """
        row = item.row
        name, policy = self.choose_policy(row, pipe)
        options = self.sampling_of(row)
        if self.repetition_penalty is not None:
            options.setdefault("repetition_penalty", self.repetition_penalty)
        if not self.has_manifest:  # whose fingerprints leave out what the authors recommend
            options.setdefault("repetition_penalty", pipe.speech.repetition_penalty)
        params = pick_params(pipe.speech, **options)
        options["voice"] = self.voice if row.voice is None else row.voice
        planned = make_plan(
            pipe.speech, [row.prompt], [item.seed], max_seconds=self.max_seconds, in_parts=True,
            **options,
        )  # fmt: skip
        asked = self.max_seconds
        options["max_seconds"] = share_seconds(pipe.speech, planned) if asked is None else asked
        return Settings(name, policy, params, tuple(sorted(options.items())))

    def serve(
        self,
        pipe: Any,
        items: Sequence[Item],
        settings: Settings,
        deliver: Deliver,
        rows: int,
        on_step: Any = None,
    ) -> Stats:
        spoken = pipe(
            [item.row.prompt for item in items],
            seed=[item.seed for item in items],
            policy=settings.policy,
            **self.layers,
            batch_size=rows,
            deliver=lambda made: deliver(items[made.index], made),
            on_step=on_step,
            **dict(settings.options),
        )
        stats: Stats = spoken.stats
        return stats

    @property
    def not_facts(self) -> tuple[str, ...]:
        return "size", "guidance_scale"

    def own_facts(self, item: Item, settings: Settings) -> dict[str, Any]:
        return {name: v for name, v in settings.options if name not in SAMPLING_FIELDS}

    def measure(self, made: Any) -> dict[str, Any]:
        return {
            "tokens": len(made.tokens),
            "seconds": made.seconds,
            "sample_rate": made.sample_rate,
            "is_finished": made.is_finished,
        }

    def write(self, file: Path, made: Any, facts: Mapping[str, Any]) -> None:
        write_sound(file, made.waveform, made.sample_rate, {"text": facts["prompt"], **facts})
