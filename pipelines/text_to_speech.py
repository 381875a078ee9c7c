"""Text to speech: texts to a codec's codes under a decoding policy, then codes to sound.

Utterances end when the model ends them, so that rows of a batch are of all lengths: the place of a
finished one is taken by the next text (see `mmaccel.places`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mmaccel.contracts import Policy, TokenModel
from mmaccel.pipelines.checkpoint import Place
from mmaccel.pipelines.engine import Engine, UseGraphs
from mmaccel.pipelines.one_run import alone
from mmaccel.pipelines.picture_model import pick_policy
from mmaccel.pipelines.speech import Speech, Utterance
from mmaccel.pipelines.speech_model import SpeechModel
from mmaccel.pipelines.speech_models import open_speech
from mmaccel.pipelines.speech_plan import make_plan
from mmaccel.pipelines.speech_rows import RowSpeaker
from mmaccel.places import Places
from mmaccel.results import OnStep


class TextToSpeech:
    """Speech from text, by any window policy. One run at a time: the model keeps one cache.

    Args:
        speech: the model.
        source: where it lies, if that is known.
        engine: how passes are carried out; None is `Engine()`.
        codec: where its codec lies, if that is known.
    """

    def __init__(
        self,
        speech: SpeechModel,
        source: Path | None = None,
        engine: Engine | None = None,
        codec: Path | None = None,
    ) -> None:
        self.speech, self.source, self.codec = speech, source, codec
        self.engine = engine or Engine()

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        codec: str | Path | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        family: str | None = None,
        cuda_graphs: UseGraphs = "auto",
    ) -> TextToSpeech:
        """Load a model from disk or from the Hugging Face hub.

        Args:
            name: a folder, or an id of the hub (downloaded to its cache).
            codec: the same of what turns codes into sound; None takes the one the family's authors
                published, from the hub.
            device: where to run.
            dtype: of the language model; the codec runs in float32. "bitwise" is promised in
                float32 and float64.
            family: how the checkpoint is to be read; None finds out. See docs/speech.md.
            cuda_graphs: see `mmaccel.pipelines.engine.Engine`.

        Raises:
            OptionError: no such model, codec, device, dtype or family; a bad `cuda_graphs`.
            UnsupportedModelError: nothing we know, or tensors that are missing or too many.
            MissingBackendError: a package that the family's codec needs is not installed.
        """
        how = Engine(cuda_graphs)
        how.check(device)
        speech, source, codec_source = open_speech(name, codec, Place(device, dtype), family)
        return cls(speech, source, how, codec_source)

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        policy: Policy | None = None,
        voice: str | None = None,
        seed: int | Sequence[int] = 0,
        max_seconds: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        batch_size: int | None = None,
        deliver: Callable[[Utterance], None] | None = None,
        on_step: OnStep | None = None,
    ) -> Speech:
        """Say texts.

        Args:
            text: one or several.
            policy: how to decode; `Jacobi()` where none is given.
            voice: who says them, for models that know several; None is the usual one.
            seed: one for all (text b is item b of it), or one per text. With one per text an
                utterance depends on its own seed and text alone, and on `max_seconds`.
            max_seconds: after which an utterance is cut; None is 30, or less where the model has no
                room for so many behind the longest text.
            temperature, top_k, top_p, min_p: see `mmaccel.Filters`. What is None is as the model's
                authors recommend (`speech.filters`); top_k 0 and top_p 1 keep all tokens.
            repetition_penalty: over prompt and utterance, as transformers counts it; 1 is none,
                None as the authors recommend.
            batch_size: utterances in the making at most; None makes all together. The place of a
                finished one is taken by the next.
            deliver: called with every utterance as soon as it is finished, in the order they end;
                an exception from it ends the run and reaches the caller.
            on_step: called after every pass with the state of the running places.

        Returns:
            Utterances in the order of the texts, and stats. A bitwise `policy` and `batch_size`
            change what they cost, not how they sound.

        Raises:
            OptionError: a text or an argument outside its domain, before anything is made.
            UnsupportedModelError: a text of which the tokenizer makes ids the model does not have;
                before anything is made, too.
            NumericsError: the model or its codec returned NaN; its `rows` are indices of texts.
            BusyError: another run of this model has not ended (in another thread, or in `on_step`).
        """
        texts = [text] if isinstance(text, str) else text
        plan = make_plan(
            self.speech, texts, seed, voice=voice, max_seconds=max_seconds, batch_size=batch_size,
            repetition_penalty=repetition_penalty, temperature=temperature, top_k=top_k,
            top_p=top_p, min_p=min_p,
        )  # fmt: skip
        run, model = pick_policy(policy, self.speech.window), self.speech.window
        speaker = RowSpeaker(self.speech, plan, deliver)
        prompt = replace(plan.prompt, places=Places(plan.places, speaker.take))
        with alone(model), torch.no_grad():
            self.engine.prepare(model, prompt, run, plan.filters)
            options: dict[str, Any] = dict(filters=plan.filters, noise=plan.noise, on_step=on_step)
            stats = run.sample(model, prompt, plan.length, **options).stats
        stats.pixel_seconds = speaker.sound_seconds
        stats.seconds -= speaker.seconds
        return Speech([speaker.made[k] for k in range(len(plan.texts))], stats)

    @property
    def model(self) -> TokenModel:
        """What predicts codes."""
        return self.speech.window
