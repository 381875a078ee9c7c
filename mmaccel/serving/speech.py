"""Speech: requests to jobs, jobs to utterances, and utterances to bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmaccel.batch.speech import SpeechSetup
from mmaccel.catalog import make_policy
from mmaccel.loading import pick_name
from mmaccel.options import given
from mmaccel.outputs.sound_files import to_pcm, to_wav
from mmaccel.pipelines.text_to_speech.pipeline import TextToSpeech
from mmaccel.pipelines.text_to_speech.plan import CHUNK_SECONDS, check_seconds, make_plan
from mmaccel.pipelines.text_to_speech.types import SpeechRequest, Utterance
from mmaccel.samplers.prefix_tree import PrefixTree
from mmaccel.serving.jobs import Job, Ticket

if TYPE_CHECKING:
    from mmaccel.serving.engine import Run

_DEFAULT_VOICES = ("default", "auto", "")  # OpenAI's client always sends a voice


class SpeechBackend:
    """A speech model behind the engine.

    Args:
        setup: model, codec, policy and sampling parameters, as `mmaccel speak --prompts` has them;
            without `guidance_scale`, which no speech model has. A voice is each request's own.
        chunk_seconds: of sound that is sent in chunks.
        prefix_tree: keeps prompts for later requests; None: nothing does.

    Attributes:
        prefix_tree: see above.

    Raises:
        OptionError, UnsupportedModelError: the model cannot be opened.
    """

    def __init__(
        self,
        setup: SpeechSetup,
        *,
        chunk_seconds: float = CHUNK_SECONDS,
        prefix_tree: PrefixTree | None = None,
    ) -> None:
        self.prefix_tree = prefix_tree
        name, fields = pick_name(setup.policy, dict(setup.options), "window")
        self._policy = make_policy(name, **fields)
        self.pipe: TextToSpeech = setup.open()
        check_seconds(chunk_seconds, "chunk_seconds", usual=CHUNK_SECONDS)
        self._chunk_seconds = chunk_seconds
        self._call = {"max_seconds": setup.max_seconds, **given(setup.sampling)}

    @property
    def sample_rate(self) -> int:
        """Of the sound, in Hz."""
        return self.pipe.speech.sample_rate

    def job(
        self, text: str, voice: str | None, seed: int, ticket: Ticket, *, in_chunks: bool = False
    ) -> Job:
        """Check a request and make its job. Called in any thread; nothing is decoded.

        Args:
            text: what is said.
            voice: who says it; None, "default" and "auto" are the model's default voice.
            seed: of the utterance.
            ticket: receives what becomes of it.
            in_chunks: whether that is each chunk of sound, as an event "partial", and then the
                utterance; else the utterance alone.

        Raises:
            OptionError: what this model cannot say.
        """
        voice = None if voice is None or voice in _DEFAULT_VOICES else voice
        plan = make_plan(self.pipe.speech, [text], [seed], voice=voice, **self._call)
        request = SpeechRequest(text, seed, voice, in_chunks=in_chunks)
        return Job(request, "speech", plan.prompt.tokens.shape[1], ticket)

    def run(self, run: Run, rows: int) -> None:
        def deliver(request: SpeechRequest, made: Utterance) -> None:
            run.finish(request.tag, made, len(made.tokens), made.passes)

        self.pipe.serve(
            [_request(job) for job in run.jobs],
            policy=self._policy,
            rows=rows,
            deliver=deliver,
            chunk_seconds=self._chunk_seconds,
            deliver_chunk=lambda request, chunk: run.hand_out(request.tag, chunk),
            on_step=run.step,
            arrivals=lambda most: [_request(job) for job in run.arrivals(most)],
            prompt_width=run.width,
            prefix_tree=self.prefix_tree,
            **self._call,
        )

    def render_partial(self, job: Job, tokens: Tensor, is_known: Tensor) -> Any:
        """See `Backend.render_partial`; no job here asks for it."""
        raise NotImplementedError

    def warm_up(self) -> None:
        """Run two passes of an example, which also shows whether this model can be served.

        Raises:
            OptionError, UnsupportedModelError: it cannot.
        """

        def stop(progress: Any) -> Any:
            return torch.zeros_like(progress.lengths) if progress.passes >= 2 else None

        self.pipe.serve(
            [SpeechRequest("a", 0)],
            policy=self._policy,
            rows=1,
            deliver=lambda *made: None,
            on_step=stop,
            arrivals=lambda most: [],
            prefix_tree=self.prefix_tree,
            **self._call,
        )

    def to_bytes(self, made: Utterance, kind: str) -> bytes:
        """The sound of an utterance as "wav", or as "pcm": samples of 16 bits."""
        return to_wav(made.waveform, made.sample_rate) if kind == "wav" else to_pcm(made.waveform)


def _request(job: Job) -> SpeechRequest:
    asked: SpeechRequest = job.item
    return replace(asked, tag=job)
