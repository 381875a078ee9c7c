"""Text to speech: texts to a codec's tokens under a decoding policy, then tokens to sound.

Utterances end where the model ends them: rows are decoded with continuous batching.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor

from mmaccel.checks import within
from mmaccel.contracts import Arrivals, FinishedRow
from mmaccel.errors import NumericsError, OptionError
from mmaccel.options import LoadKeywords, sampling_of, takes
from mmaccel.pipelines.call_options import DecodingOptions, ServeOptions, TokenOptions
from mmaccel.pipelines.media import RowPlan, RunningRequests, collect_payloads
from mmaccel.pipelines.pipeline import Pipeline, read_loading
from mmaccel.pipelines.text_to_speech.plan import (
    CHUNK_SECONDS,
    SpeechPlan,
    count_chunk_frames,
    join_plans,
    make_plan,
    take_codes,
)
from mmaccel.pipelines.text_to_speech.registry import open_speech
from mmaccel.pipelines.text_to_speech.streaming import (
    ChunkSender,
    RowSound,
    RunningSound,
    SpeechStream,
    check_sound,
)
from mmaccel.pipelines.text_to_speech.types import (
    Speech,
    SpeechChunk,
    SpeechModel,
    SpeechRequest,
    Utterance,
)
from mmaccel.results import OnStep, Progress, Stats
from mmaccel.samplers.noise import choose_one_seed, choose_seed
from mmaccel.samplers.run_lock import alone


@dataclass(frozen=True, kw_only=True)
class SpeechCall(DecodingOptions, TokenOptions):
    """The arguments of `TextToSpeech.__call__`, which explains them."""

    text: str | Sequence[str] = field(kw_only=False)
    voice: str | None = None
    seed: int | Sequence[int | None] | None = None
    max_seconds: float | None = None
    repetition_penalty: float | None = None
    batch_size: int | None = within(None, 1, hint="ask for 1 or more")
    deliver: Callable[[Utterance], None] | None = None
    on_step: OnStep | None = None
    return_dict: bool = True


@dataclass(frozen=True, kw_only=True)
class SpeechStreamCall(DecodingOptions, TokenOptions):
    """The arguments of `TextToSpeech.stream`, which explains them."""

    text: str = field(kw_only=False)
    voice: str | None = None
    seed: int | None = None
    max_seconds: float | None = None
    repetition_penalty: float | None = None
    chunk_seconds: float = CHUNK_SECONDS
    on_step: OnStep | None = None


@dataclass(frozen=True, kw_only=True)
class SpeechServe(ServeOptions, TokenOptions):
    """The arguments of `TextToSpeech.serve`, which explains them."""

    max_seconds: float
    repetition_penalty: float | None = None
    chunk_seconds: float = CHUNK_SECONDS
    deliver_chunk: Callable[[SpeechRequest, SpeechChunk], None] | None = None


class TextToSpeech(Pipeline):
    """Speech from text, by any policy of the model's kind. One run at a time: a model keeps one
    cache.
    """

    modality = "Speech"

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        codec: str | Path | None = None,
        **options: Unpack[LoadKeywords],
    ) -> TextToSpeech:
        """Load a model from disk or from the Hugging Face hub.

        Args:
            name: "voices", "voices-masked", a folder, or an id of the hub (downloaded to its
                cache).
            codec: the same of the codec, which turns tokens into sound and runs in float32; None
                takes the one in the model's folder, or its authors' from the hub.
            **options: fields of `mmaccel.options.LoadOptions`; families are in docs/speech.md.

        Raises:
            OptionError: no such model, codec or family, or a bad option.
            UnsupportedModelError: an unknown family, or files that do not fit or are not trusted.
            MissingBackendError: a package that the family's codec needs is not installed.
        """
        engine, config = read_loading(options)
        speech, source, codec_source = open_speech(name, codec, config)
        return cls(speech, source, engine, codec_source)

    @property
    def speech(self) -> SpeechModel:
        speech: SpeechModel = self.host
        return speech

    @takes(SpeechCall)
    def __call__(self, call: SpeechCall) -> Speech:
        """Speak texts; arguments that are not named here are those of `TextToImage.__call__`.

        Args:
            text: one or several.
            policy: how to decode; None is `Jacobi()`, on a canvas `LosslessUnmask()`.
            voice: the speaker, for models with several voices.
            seed: one for all (text b is item b of it), or one per text. With one per text an
                utterance depends on its own seed and text alone, and on `max_seconds`.
            max_seconds: after which an utterance is cut, or each part of a text that is too long
                for the model. None is 30, or less where the model has no positions for 30 s after
                the longest text.
            repetition_penalty: over prompt and utterance, as transformers counts it. 1 is none;
                None takes the value that the authors recommend.
            batch_size: utterances that are decoded at a time at most; None decodes all together.
                The next text starts when one has finished.
            deliver: called with every utterance as soon as it is finished, in the order they end.
                An exception from it ends the run and reaches the caller.
            return_dict: False returns a tuple of the waveforms alone, as diffusers' pipelines do.

        Returns:
            Utterances in the order of the texts, and stats. A bitwise `policy` and `batch_size`
            change the cost, not the sound.

        Raises:
            NumericsError: the model or its codec returned NaN; its `rows` are indices of texts.
        """
        seed = choose_seed(call.seed)
        plan = make_plan(
            self.speech,
            [call.text] if isinstance(call.text, str) else call.text,
            seed,
            voice=call.voice,
            max_seconds=call.max_seconds,
            batch_size=call.batch_size,
            repetition_penalty=call.repetition_penalty,
            in_parts=True,
            **sampling_of(call),
        )
        decoding = self.choose(call)
        utterances: dict[int, Utterance] = {}
        collect = collect_payloads(utterances, call.deliver)

        parts: dict[int, dict[int, Utterance]] = defaultdict(dict)  # by text, by row
        counts = Counter(plan.owners)

        def finish(row: FinishedRow) -> Utterance | None:
            part = finish_utterance(self.speech, plan, row, index=row.row)
            of_text = parts[part.index]
            of_text[row.row] = part
            if len(of_text) < counts[part.index]:
                return None
            return join_parts([of_text[k] for k in sorted(of_text)])

        with alone(self.model), self._at_work(), naming_texts(plan):
            stats = self.decode_rows(
                decoding, plan, finish=finish, deliver=collect, on_step=call.on_step
            )
        stats.seed = seed
        speech = Speech([utterances[k] for k in range(len(plan.texts))], stats)
        if not call.return_dict:
            return ([one.waveform for one in speech.utterances],)  # type: ignore[return-value]
        return speech

    @takes(SpeechStreamCall)
    def stream(self, call: SpeechStreamCall) -> SpeechStream:
        """Speak a text in chunks, while it is decoded; other arguments are those of `__call__`.

        Args:
            text: one. Parts of a long text follow one after the other.
            chunk_seconds: of each chunk but the last one, at least. A chunk is decoded to sound
                when the frames behind it that the codec reads are there too; shorter ones come
                earlier and cost more: their surroundings are decoded with each.
            on_step: called after every pass, in the thread that decodes. Of a row that it ends,
                chunks that were sent before stay in the waveform.

        Returns:
            An iterator of `SpeechChunk`, which decodes in a thread of its own; `utterance` and
            `stats` are there at the end. Leaving the loop, `close()`, or an exception in the loop
            ends decoding after the pass that runs. Tokens are those of `__call__`; how the sound
            differs from it, `SpeechModel.sound_context` and docs/speech.md say.

        Raises:
            NumericsError, BusyError: from the iterator; others before any pass.
        """
        seed = choose_one_seed(call.seed)
        plan = make_plan(
            self.speech,
            [call.text],
            seed,
            voice=call.voice,
            max_seconds=call.max_seconds,
            batch_size=1,
            repetition_penalty=call.repetition_penalty,
            in_parts=True,
            **sampling_of(call),
        )
        frames = count_chunk_frames(self.speech, call.chunk_seconds)
        decoding = self.choose(call)
        methods = decoding.methods
        n_parts = plan.prompt.batch
        if methods and n_parts > 1:  # their caches would be of other lengths
            raise OptionError(
                f"{methods.slots}: expected a text that the model says at once, received one of "
                f"{n_parts} parts; stream each part, or leave {methods.slots} out"
            )

        def decode(
            put: Callable[[SpeechChunk], None], check: Callable[[], None]
        ) -> tuple[Utterance, Stats]:
            def watch(progress: Progress) -> Tensor | None:
                check()
                return None if call.on_step is None else call.on_step(progress)

            sound = RunningSound(watch, is_canvas=self.model.kind == "canvas")
            send = ChunkSender(self.speech.sample_rate, put)
            for k in range(plan.prompt.batch):
                sound.begin(RowSound(self.speech, plan, k, number=k, frames=frames, send=send))
            parts: list[Utterance] = []

            def finish(row: FinishedRow) -> Utterance:
                sent = sound.end(row)
                return finish_utterance(self.speech, plan, row, index=row.row, sound=sent)

            with alone(self.model), self._at_work(), naming_texts(plan):
                stats = self.decode_rows(
                    decoding,
                    plan,
                    finish=finish,
                    deliver=parts.append,
                    on_step=sound,
                )
            sound.move_seconds(stats)
            stats.seed = seed
            return join_parts(parts), stats

        return SpeechStream(decode)

    @takes(SpeechServe)
    def serve(self, call: SpeechServe) -> Stats:
        """Speak requests with continuous batching; others may join. An utterance depends on its own
        request and on `max_seconds` alone. Other arguments: `__call__`, `TextToImage.serve`.

        Args:
            max_seconds: after which an utterance is cut.
            rows: utterances decoded at a time at most.
            deliver_chunk: called with every request that is `in_chunks` and each of its chunks; the
                waveform of its utterance is these. None: there is no such request.
            deliver: called with every request and its utterance as soon as it is finished, unless
                `on_step` ends it before its first token.
        """
        decoding = self.choose(call)
        params = sampling_of(call) | {"repetition_penalty": call.repetition_penalty}
        frames = count_chunk_frames(self.speech, call.chunk_seconds)
        sound = RunningSound(call.on_step, is_canvas=self.model.kind == "canvas")
        plans: dict[int, SpeechPlan] = {}  # of the running requests

        def begin(joined: dict[int, SpeechRequest]) -> Arrivals:
            for number, request in joined.items():
                plan = plans[number] = make_plan(
                    self.speech,
                    [request.text],
                    [request.seed],
                    voice=request.voice,
                    max_seconds=call.max_seconds,
                    is_joined=True,
                    **params,
                )
                if request.in_chunks and call.deliver_chunk is not None:
                    deliver = partial(call.deliver_chunk, request)
                    send = ChunkSender(self.speech.sample_rate, deliver)
                    row = RowSound(self.speech, plan, 0, number=number, frames=frames, send=send)
                    sound.begin(row)
            return Arrivals(*join_plans([plans[number] for number in joined]))

        def finish(row: FinishedRow) -> tuple[SpeechRequest, Utterance] | None:
            request, plan = running.end(row), plans.pop(row.row)
            sent = sound.end(row)
            if not len(row.tokens):
                return None
            return request, finish_utterance(self.speech, plan, row, index=0, sound=sent)

        running = RunningRequests(begin)
        with alone(self.model), self._at_work():
            prompt, noise = running.admit(call.requests)
            first = next(iter(plans.values()))
            whole = RowPlan(
                prompt=self.make_room(prompt, call, first.length),
                length=first.length,
                max_num_seqs=call.rows,
                params=first.params,
                noise=noise,
                arrivals=running.joining(call.arrivals),
                prefix_tree=call.prefix_tree,
            )
            stats = self.decode_rows(
                decoding,
                whole,
                finish=finish,
                deliver=lambda answered: call.deliver(*answered),  # a request and its utterance
                on_step=call.on_step if call.deliver_chunk is None else sound,
            )
        sound.move_seconds(stats)
        return stats


@contextmanager
def naming_texts(plan: SpeechPlan) -> Iterator[None]:
    """The rows of a `NumericsError` within are indices of texts, not of their parts."""
    try:
        yield
    except NumericsError as error:
        texts = dict.fromkeys(plan.owners[row] for row in error.rows)
        raise NumericsError(str(error), tuple(texts)) from error


def finish_utterance(
    speech: SpeechModel,
    plan: SpeechPlan,
    row: FinishedRow,
    *,
    index: int,  # of the row in the plan
    sound: Tensor | None = None,
) -> Utterance:
    """One row, with all of its tokens, decoded to sound by itself, so that no other row affects it;
    `sound` is what was sent in chunks, if the row was.
    """
    owner = plan.owners[index]
    seed = plan.seeds[index]
    tokens, is_finished = take_codes(row.tokens, speech.layout, plan.n_codes)
    if plan.prompt.slots is not None:
        is_finished = len(row.tokens) == int(plan.prompt.slots[index])
    if sound is None and len(tokens):
        sound = check_sound(speech.render(tokens, seed), row.row)
    return Utterance(
        owner,
        plan.texts[owner],
        plan.voice,
        seed,
        torch.zeros(0, device="cpu", dtype=torch.float32) if sound is None else sound,
        speech.sample_rate,
        tokens.cpu(),
        row.passes,
        is_finished,
        row.total_variation,
    )


def join_parts(parts: Sequence[Utterance]) -> Utterance:
    """The utterance of a text, of the utterances of its parts in their order."""
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[0],
        waveform=torch.cat([part.waveform for part in parts]),
        tokens=torch.cat([part.tokens for part in parts]),
        passes=sum(part.passes for part in parts),
        is_finished=all(part.is_finished for part in parts),
        total_variation=sum(part.total_variation for part in parts),
    )
