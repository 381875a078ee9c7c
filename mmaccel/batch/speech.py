"""The model, and the rows, of a prompt file whose texts are spoken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mmaccel.batch.prompts import Item, show
from mmaccel.batch.worker import Setup, describe, read_policy_fields
from mmaccel.errors import OptionError
from mmaccel.loading import load_keywords
from mmaccel.options import SAMPLING_FIELDS, given
from mmaccel.outputs.sound_files import write_sound
from mmaccel.pipelines.loading.sources import content_hash
from mmaccel.pipelines.text_to_image.outputs import Request
from mmaccel.pipelines.text_to_speech.plan import make_plan, pick_params, share_seconds
from mmaccel.pipelines.text_to_speech.types import Utterance
from mmaccel.results import Exactness, Stats
from mmaccel.samplers.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mmaccel.pipelines.text_to_speech.pipeline import TextToSpeech

_OF_GUIDANCE = ("guidance_scale", "divergence_temperature")
_PENALTY = "repetition_penalty"  # the one parameter that a row's `params` may have beside sampling


@dataclass(frozen=True)
class SpeechSettings:
    """How a text is spoken.

    Attributes:
        name: short name of the policy.
        policy: the policy.
        params: temperature and truncation.
        options: names and values of further arguments of the call, sampling included.
    """

    name: str
    policy: Any
    params: SamplingParams
    options: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class SpeechOutput:
    """A finished utterance of a request and its cost."""

    request: Request
    utterance: Utterance

    @property
    def shape(self) -> dict[str, Any]:
        """Number of tokens, seconds of sound, their rate, and whether the model ended it."""
        made = self.utterance
        return {
            "tokens": len(made.tokens),
            "seconds": made.seconds,
            "sample_rate": made.sample_rate,
            "is_finished": made.is_finished,
        }

    def cost(self, exactness: Exactness) -> dict[str, Any]:
        """Forward passes, and the divergence of a policy whose `exactness` is "relaxed"."""
        divergence = {"total_variation": self.utterance.total_variation}
        return {"passes": self.utterance.passes, **(divergence if exactness == "relaxed" else {})}


class SpeechGenerator:
    """Speaks the texts of items.

    Args:
        pipe: the model.
    """

    def __init__(self, pipe: TextToSpeech) -> None:
        self._pipe = pipe

    def resize(self, size: tuple[int, int] | None) -> TextToSpeech:
        """The model.

        Raises:
            OptionError: a row with a size.
        """
        if size is not None:
            raise OptionError(
                f"size: expected none for speech, received {size[0]}x{size[1]}; leave it out"
            )
        return self._pipe

    def run_all(
        self,
        requests: Sequence[Request],
        settings: SpeechSettings,
        deliver: Callable[[SpeechOutput], None],
        rows: int,
    ) -> Stats:
        """Speak texts of equal settings; see `TextToSpeech.__call__`."""
        spoken = self._pipe(
            [request.prompt for request in requests],
            seed=[request.seed for request in requests],
            policy=settings.policy,
            batch_size=rows,
            deliver=lambda made: deliver(SpeechOutput(requests[made.index], made)),
            **dict(settings.options),
        )
        return spoken.stats


@dataclass(frozen=True)
class SpeechSetup(Setup):
    """A speech model, a policy and a folder: utterances, each with a JSON file next to it.

    Attributes:
        codec: folder or hub id of the codec; None is the authors'.
        voice: of rows that name none.
        max_seconds: after which an utterance is cut, or each part of a long text.
        repetition_penalty: of rows that name none.
    """

    codec: str | None = None
    voice: str | None = None
    max_seconds: float | None = None
    repetition_penalty: float | None = None

    unit: ClassVar[str] = "utterance"
    one: ClassVar[str] = "an utterance"

    @property
    def suffix(self) -> str:
        return ".wav"

    def open(self) -> Any:
        from transformers.utils import logging

        from mmaccel.pipelines.text_to_speech.pipeline import TextToSpeech

        logging.disable_progress_bar()
        return TextToSpeech.from_pretrained(
            self.model, codec=self.codec, **load_keywords(self.load)
        )

    def open_generator(self, pipe: Any) -> SpeechGenerator:
        return SpeechGenerator(pipe)

    def hash_files(self, pipe: Any) -> dict[str, str]:
        return {"weights": content_hash(pipe.source), "codec": content_hash(pipe.codec)}

    def plan(self, item: Item, pipe: Any) -> SpeechSettings:
        """Settings of an item. How long it may last depends on its own text, so that it is the
        same whatever is spoken beside it. Texts of similar lengths have equal settings, so that
        they are decoded together.
        """
        row = item.row
        own = {k: row.params[k] for k in (*SAMPLING_FIELDS, _PENALTY) if k in row.params}
        wrong = {"negative": row.negative} | {name: own.get(name) for name in _OF_GUIDANCE}
        for name, value in wrong.items():
            if value is not None:
                raise OptionError(
                    f"{name}: expected none for speech, which has no guidance, received "
                    f"{show(value)}; leave it out"
                )
        name, policy = read_policy_fields(self, item, pipe, beside=(*SAMPLING_FIELDS, _PENALTY))
        penalty = self.repetition_penalty
        options = {
            **given(self.sampling),
            **({} if penalty is None else {_PENALTY: penalty}),
            **own,
        }
        params = pick_params(pipe.speech, **options)
        options["voice"] = self.voice if row.voice is None else row.voice
        planned = make_plan(
            pipe.speech,
            [row.prompt],
            [item.seed],
            max_seconds=self.max_seconds,
            in_parts=True,
            **options,
        )
        asked = self.max_seconds
        options["max_seconds"] = share_seconds(pipe.speech, planned) if asked is None else asked
        return SpeechSettings(name, policy, params, tuple(sorted(options.items())))

    def describe(
        self, item: Item, settings: Any, hashes: Mapping[str, str], model: object
    ) -> dict[str, Any]:
        facts = describe(self, item, settings, hashes["weights"], model)
        del facts["size"]
        del facts["guidance_scale"]
        options = {k: value for k, value in settings.options if k not in SAMPLING_FIELDS}
        return {**facts, "codec": hashes["codec"], **options}

    def write(self, file: Path, finished: Any, facts: Mapping[str, Any]) -> None:
        made = finished.utterance
        write_sound(file, made.waveform, made.sample_rate, facts)
