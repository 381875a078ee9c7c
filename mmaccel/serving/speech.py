"""Speech: requests to jobs, jobs to utterances, and utterances to bytes.

A request is read as the row of a prompt file, as images are. A text that the model does not say at
once is several jobs, as it is several rows of `mmaccel speak`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mmaccel.batch.prompts import make_items, make_row
from mmaccel.batch.speech import SpeechSettings, SpeechSetup
from mmaccel.outputs.sound_files import to_pcm, to_wav
from mmaccel.pipelines.text_to_speech.pipeline import join_parts
from mmaccel.pipelines.text_to_speech.plan import CHUNK_SECONDS, check_seconds
from mmaccel.pipelines.text_to_speech.types import SpeechRequest, Utterance
from mmaccel.samplers.prefix_tree import PrefixTree
from mmaccel.serving.engine import Backend, Receiver
from mmaccel.serving.jobs import Job


class SpeechBackend(Backend):
    """A speech model behind the engine; the item of a job is a request and its settings.

    Args:
        setup: as `mmaccel speak --prompts` has it; of a longer text, `rows` parts are spoken at a
            time at most.
        prefix_tree: see `Backend`.
        chunk_seconds: of sound that is sent in chunks.
    """

    example = "a"
    route = "/v1/audio/speech"

    def __init__(
        self,
        setup: SpeechSetup,
        prefix_tree: PrefixTree | None = None,
        *,
        chunk_seconds: float = CHUNK_SECONDS,
    ) -> None:
        super().__init__(setup, prefix_tree)
        check_seconds(chunk_seconds, "chunk_seconds", usual=CHUNK_SECONDS)
        self._chunk_seconds = chunk_seconds

    @property
    def sample_rate(self) -> int:
        """Of the sound, in Hz."""
        rate: int = self.pipe.speech.sample_rate
        return rate

    def jobs(self, fields: Mapping[str, Any], ticket: Any, partials: int) -> list[Job]:
        (item,) = make_items([make_row(**fields)], 0)
        settings: SpeechSettings = self.setup.plan(item, self.pipe)
        options = dict(settings.options)
        speech = self.pipe.speech
        jobs = []
        for part in speech.split(item.row.prompt):
            request = SpeechRequest(part, item.seed, options["voice"], in_chunks=bool(partials))
            width = len(speech.encode(part, request.voice))
            jobs.append(Job((request, settings), options["max_seconds"], width, ticket))
        ahead = 1 if partials else self.setup.rows
        for job, following in zip(jobs, jobs[ahead:], strict=False):
            job.following = following
        return jobs

    def request(self, job: Job) -> SpeechRequest:
        request: SpeechRequest = replace(job.item[0], tag=job)
        return request

    def call(self, first: Job, finish: Receiver, hand_out: Receiver) -> Callable[..., Any]:
        settings: SpeechSettings = first.item[1]
        options = dict(settings.options)
        del options["voice"]  # a request's own
        return partial(
            self.pipe.serve,
            policy=settings.policy,
            deliver=lambda request, made: finish(request.tag, made),
            chunk_seconds=self._chunk_seconds,
            deliver_chunk=lambda request, chunk: hand_out(request.tag, chunk),
            **options,
        )

    def to_bytes(self, parts: Sequence[Utterance], kind: str) -> bytes:
        """The sound of the parts of a text as "wav", or as "pcm": samples of 16 bits."""
        made = join_parts(parts)
        return to_wav(made.waveform, made.sample_rate) if kind == "wav" else to_pcm(made.waveform)
