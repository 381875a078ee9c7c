"""Text to speech: texts to a codec's tokens under a decoding policy, then tokens to sound.

Utterances end where the model ends them, so the rows of a batch have different lengths. Rows are
decoded with continuous batching: the next text starts when one has finished.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Unpack

import torch

from mmaccel.checks import check_callable
from mmaccel.contracts import Arrivals, FinishedRow
from mmaccel.errors import NumericsError
from mmaccel.options import LoadKeywords, sampling_of, takes
from mmaccel.pipelines.call_options import DecodingOptions, ServeOptions, TokenOptions
from mmaccel.pipelines.media import RowPlan, collect_payloads
from mmaccel.pipelines.pipeline import Pipeline, read_loading
from mmaccel.pipelines.runner.run_lock import alone
from mmaccel.pipelines.text_to_speech.plan import SpeechPlan, join_plans, make_plan
from mmaccel.pipelines.text_to_speech.registry import open_speech
from mmaccel.pipelines.text_to_speech.types import Speech, SpeechModel, SpeechRequest, Utterance
from mmaccel.results import OnStep, Stats
from mmaccel.samplers.noise import choose_seed


@dataclass(frozen=True, kw_only=True)
class SpeechCall(DecodingOptions, TokenOptions):
    """The arguments of `TextToSpeech.__call__`, which explains them."""

    text: str | Sequence[str] = field(kw_only=False)
    voice: str | None = None
    seed: int | Sequence[int] | None = None
    max_seconds: float | None = None
    repetition_penalty: float | None = None
    batch_size: int | None = None
    deliver: Callable[[Utterance], None] | None = None
    on_step: OnStep | None = None
    return_dict: bool = True


@dataclass(frozen=True, kw_only=True)
class SpeechServe(ServeOptions, TokenOptions):
    """The arguments of `TextToSpeech.serve`, which explains them."""

    max_seconds: float
    repetition_penalty: float | None = None


class TextToSpeech(Pipeline):
    """Speech from text, by any window policy. One run at a time: the model keeps one cache.

    Args:
        host: the model, a `SpeechModel`.
        source, engine, codec: see `mmaccel.pipelines.pipeline.Pipeline`.
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
            name: "voices", a folder, or an id of the hub (downloaded to its cache).
            codec: the same of the codec, which turns tokens into sound and runs in float32; None
                takes the one that the family's authors published, from the hub, or that is in the
                model's folder.
            **options: see `mmaccel.options.LoadOptions`; families are in docs/speech.md.

        Raises:
            OptionError: no such model, codec, option, device, dtype or family, or a bad value.
            UnsupportedModelError: an unknown family, missing or surplus tensors, files that cannot
                be read or do not fit each other, or code that is not trusted.
            MissingBackendError: a package that the family's codec needs is not installed, or
                accelerate for a device map.
        """
        loading = read_loading(options)
        speech, source, codec_source = open_speech(name, codec, loading.config, loading.family)
        return cls(speech, source, loading.engine, codec_source)

    @property
    def speech(self) -> SpeechModel:
        """The model with its layout, prompts and codec."""
        speech: SpeechModel = self.host
        return speech

    @takes(SpeechCall)
    def __call__(self, call: SpeechCall) -> Speech:
        """Speak texts.

        Args:
            text: one or several.
            policy: how to decode; None is `Jacobi()`.
            kv_cache, attention: methods of the model's layers, as in `mmaccel.attach`; all rows
                then begin together.
            voice: the speaker, for models with several voices; None is the model's default.
            seed: one for all (text b is item b of it), or one per text. With one per text an
                utterance depends on its own seed and text alone, and on `max_seconds`. None draws
                one from torch's global generator; `stats.seed` says which.
            max_seconds: after which an utterance is cut, or each part of a text that is too long
                for the model. None is 30, or less where the model has no positions for 30 s after
                the longest text.
            temperature, top_k, top_p, min_p: see `mmaccel.SamplingParams`.
            top_n_sigma, top_h, eta_cutoff: see `mmaccel.SamplingParams`.
            entropy_temperature: see `mmaccel.SamplingParams`.
                None takes the value that the model's authors recommend (`speech.params`);
                top_k 0 and top_p 1 keep all tokens.
            repetition_penalty: over prompt and utterance, as transformers counts it. 1 is none;
                None takes the value that the authors recommend.
            batch_size: utterances that are decoded at a time at most; None decodes all together.
                The next text starts when one has finished.
            deliver: called with every utterance as soon as it is finished, in the order they end.
                An exception from it ends the run and reaches the caller.
            on_step: called after every pass with the state of the running rows.
            return_dict: False returns a tuple of the waveforms alone, as diffusers' pipelines do.

        Returns:
            Utterances in the order of the texts, and stats. A bitwise `policy` and `batch_size`
            change the cost, not the sound.

        Raises:
            OptionError: a text or an argument outside its domain, before any pass.
            UnsupportedModelError: a tokenizer with ids that the model does not have, before any
                pass.
            NumericsError: the model or its codec returned NaN; its `rows` are indices of texts.
            BusyError: another run of this model has not ended (in another thread, or in `on_step`).
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
        made: dict[int, Utterance] = {}
        collect = collect_payloads(made, call.deliver)
        check_callable("on_step", call.on_step)

        parts: dict[int, dict[int, Utterance]] = defaultdict(dict)
        counts = Counter(plan.owners)

        def finish(row: FinishedRow) -> Utterance | None:
            part = finish_utterance(self.speech, plan, row)
            own = parts[part.index]
            own[row.row] = part
            if len(own) < counts[part.index]:
                return None
            return join_parts([own[k] for k in sorted(own)])

        with alone(self.model), self._at_work():
            try:
                stats = self.decode_rows(
                    decoding, plan, finish=finish, deliver=collect, on_step=call.on_step
                )
            except NumericsError as error:
                texts = dict.fromkeys(plan.owners[row] for row in error.rows)
                raise NumericsError(str(error), tuple(texts)) from error
        stats.seed = seed
        speech = Speech([made[k] for k in range(len(plan.texts))], stats)
        if not call.return_dict:
            return ([one.waveform for one in speech.utterances],)  # type: ignore[return-value]
        return speech

    @takes(SpeechServe)
    def serve(self, call: SpeechServe) -> Stats:
        """Speak requests with continuous batching; others may join. An utterance depends on its own
        request and on `max_seconds` alone.

        Args:
            requests: at least one.
            max_seconds: after which an utterance is cut.
            policy, kv_cache, attention: as in `__call__`.
            rows: utterances decoded at a time at most.
            deliver: called with every request and its utterance as soon as it is finished. A row
                that `on_step` ends before its first token is not delivered.
            on_step: called after every pass with the state of the running rows.
            arrivals, prompt_width, prefix_tree: as in `TextToImage.serve`.
            temperature, top_k, top_p, min_p, repetition_penalty: as in `__call__`.
            top_n_sigma, top_h, eta_cutoff: as in `__call__`.
            entropy_temperature: as in `__call__`.

        Returns:
            Stats of all requests.

        Raises:
            OptionError: a request or an argument outside its domain.
            UnsupportedModelError, NumericsError, BusyError: as in `__call__`.
        """
        decoding = self.choose(call)
        call.check()
        arrivals = call.arrivals
        params = sampling_of(call) | {"repetition_penalty": call.repetition_penalty}

        def plan(request: SpeechRequest) -> SpeechPlan:
            return make_plan(
                self.speech,
                [request.text],
                [request.seed],
                voice=request.voice,
                max_seconds=call.max_seconds,
                **params,
            )

        running = {k: (request, plan(request)) for k, request in enumerate(call.requests)}
        numbers = count(len(running))
        first = [own for _, own in running.values()]

        def finish(row: FinishedRow) -> tuple[SpeechRequest, Utterance] | None:
            request, own = running.pop(row.row)
            if not len(row.tokens):
                return None
            return request, finish_utterance(self.speech, own, replace(row, row=0))

        def receive(most: int) -> Arrivals | None:
            assert arrivals is not None
            asked = [(request, plan(request)) for request in arrivals(most)]
            if not asked:
                return None
            running.update((next(numbers), each) for each in asked)
            return Arrivals(*join_plans([own for _, own in asked]))

        with alone(self.model), self._at_work():
            length = first[0].length
            width = self.fit_prompt(call.prompt_width, length)
            prompt, noise = join_plans(first, 0 if arrivals is None else width)
            whole = RowPlan(
                prompt=prompt,
                length=length,
                max_num_seqs=call.rows,
                params=first[0].params,
                noise=noise,
                arrivals=None if arrivals is None else receive,
                prefix_tree=call.prefix_tree,
            )
            return self.decode_rows(
                decoding,
                whole,
                finish=finish,
                deliver=lambda made: call.deliver(*made),
                on_step=call.on_step,
            )


def finish_utterance(speech: SpeechModel, plan: SpeechPlan, row: FinishedRow) -> Utterance:
    """Decode one row to sound, by itself, so that no other row affects it.

    Raises:
        NumericsError: the codec returned NaN.
    """
    owner = plan.owners[row.row]
    tokens = row.tokens
    seed = plan.seeds[row.row]
    is_finished = bool(len(tokens)) and int(tokens[-1]) in speech.layout.ends
    columns = speech.layout.columns
    whole = min(len(tokens) - is_finished, plan.length - 1) // columns * columns
    tokens = tokens[:whole]
    sound = speech.render(tokens, seed) if whole else tokens.new_zeros(0).float()
    if bool(sound.isnan().any()):
        raise NumericsError(
            "waveform: expected samples in -1..1, received NaN from the codec; "
            "copy its weights again",
            (row.row,),
        )
    return Utterance(
        owner,
        plan.texts[owner],
        plan.voice,
        seed,
        sound,
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
