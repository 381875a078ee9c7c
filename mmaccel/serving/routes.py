"""Images and speech as routes: what a body may say, how its rows are decoded, what its answer is.

A body is read as the row of a prompt file, so that PNG files and sound are, byte for byte, those of
`mmaccel generate` or `speak --prompts`. OpenAI's fields:
https://platform.openai.com/docs/api-reference. A field that no model here serves is refused, not
ignored.
"""

from __future__ import annotations

import json
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Sequence
from io import BytesIO
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.concurrency import run_in_threadpool

from mmaccel.batch.modalities import Images, Modality, Speech
from mmaccel.batch.prompts import Item, check_row, make_items
from mmaccel.errors import OptionError
from mmaccel.limits import SEEDS
from mmaccel.outputs.image_files import to_png
from mmaccel.outputs.sound_files import to_pcm, to_wav, wav_head
from mmaccel.pipelines.text_to_image.model import ImageModel, encode_prompts
from mmaccel.pipelines.text_to_image.outputs import Request, RequestOutput
from mmaccel.pipelines.text_to_speech.pipeline import join_parts
from mmaccel.pipelines.text_to_speech.plan import CHUNK_SECONDS
from mmaccel.pipelines.text_to_speech.types import SpeechRequest, Utterance
from mmaccel.samplers.noise import draw_new_seed
from mmaccel.serving.engine import Events, Job


class Body(BaseModel):
    """What all bodies say; a field that is null is as if left out, also one that is not known.
    `text_field` names the one with what is shown or said.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    text_field: ClassVar[str]

    model: str | None = None
    seed: Annotated[int, Field(ge=-1, lt=SEEDS)] = -1

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def text(self) -> str:
        text: str = getattr(self, self.text_field)
        return text

    def items(self, **fields: Any) -> list[Item]:
        """What a prompt file's row with these fields asks for; a seed is drawn for -1."""
        seed = draw_new_seed() if self.seed < 0 else self.seed
        return make_items([check_row({"prompt": self.text, "seed": seed, **fields})], 0)


class ImageBody(Body):
    """Of an image; `user` is read and not used, `seed` and `negative_prompt` are ours."""

    text_field = "prompt"

    prompt: str
    stream: bool = False
    n: Annotated[int, Field(ge=1, le=10)] = 1
    size: str | None = None
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_compression: Annotated[int, Field(ge=0, le=100)] = 95
    quality: Literal["auto", "standard"] | None = None
    style: None = None
    background: Literal["auto", "opaque"] | None = None
    moderation: Literal["auto", "low"] | None = None
    user: Annotated[str, Field(max_length=1000)] | None = None
    partial_images: Annotated[int, Field(ge=0, le=3)] = 0
    negative_prompt: str | None = None

    @property
    def media_type(self) -> str:
        return "text/event-stream" if self.stream else "application/json"


class SpeechBody(Body):
    """Of an utterance; `seed` is ours."""

    text_field = "input"

    input: str
    voice: Annotated[str, Field(max_length=100)] | None = None
    response_format: Literal["wav", "pcm"] = "wav"
    speed: Annotated[float, Field(ge=1, le=1)] | None = None
    stream_format: Literal["audio", "sse"] | None = None

    @property
    def stream(self) -> bool:
        return self.stream_format is not None

    @property
    def media_type(self) -> str:
        is_sse = self.stream_format == "sse"
        return "text/event-stream" if is_sse else f"audio/{self.response_format}"


class Route:
    """A model behind the engine. A child has

    - `path` and `body` of its requests, `headers` of its answers, and an `example` of a text;
    - `jobs`, which checks a request and makes its jobs, in any thread;
    - `serve`, which runs the pipeline: it begins with `requests`, whose settings are those of
      `first`, and lets `receive` have each job with what is made of it, or with a piece of that;
    - `encode` and `stream`, which make the answer, in any thread, and in pieces.
    """

    def __init__(self, setup: Modality) -> None:
        self.setup: Any = setup
        self.pipe: Any = setup.open()


class ImageRoute(Route):
    """A text-to-image model."""

    path = "/v1/images/generations"
    body = ImageBody
    headers: ClassVar[dict[str, str]] = {}

    def __init__(self, setup: Images) -> None:
        super().__init__(setup)
        self.example = self.pipe.prompted_model.examples[0]
        self._hashes = setup.hash_files(self.pipe)
        self._pipes = {self.pipe.size: self.pipe}

    def jobs(self, body: ImageBody) -> list[Job]:
        size = None if body.size == "auto" else body.size
        items = body.items(n=body.n, size=size, negative=body.negative_prompt)
        row = items[0].row
        pipe = self._pipes.get(row.size or self.pipe.size)
        if pipe is None:
            pipe = self._pipes[row.size] = self.pipe.resize(row.size)
        if body.stream and body.n > 1:
            raise OptionError(f"n: expected 1 with stream, received {body.n}; ask for each alone")
        shown = body.partial_images
        model = pipe.prompted_model
        can_show = body.stream and type(model).render is ImageModel.render and model.layout.rows
        if shown and not can_show:
            raise OptionError(
                f"partial_images: expected stream, and a model that shows images before they are "
                f"finished, received {shown}; leave it out"
            )
        settings = self.setup.plan(items[0], pipe)
        negative = self.setup.negative_of(row)
        prompt = encode_prompts(pipe.prompted_model, [row.prompt], [negative], settings.params)
        steps = [pipe.length * (k + 1) // (shown + 1) for k in range(shown)]
        jobs = [Job(item, settings, pipe.size, prompt.width, partials=steps) for item in items]
        for job in jobs:
            job.request = Request(row.prompt, job.item.seed, job, negative)
        return jobs

    def serve(
        self, first: Job, requests: list[Any], receive: Callable[..., None], **options: Any
    ) -> None:
        self._pipes[first.group].serve(
            requests,
            first.settings.params,
            policy=first.settings.policy,
            deliver=lambda made: receive(made.request.tag, made),
            **options,
        )

    def show(self, job: Job, progress: Any, slot: int) -> RequestOutput:
        """An unfinished image. Slots without a token get the last known one, where the layout
        demands none.
        """
        tokens = progress.tokens[slot]
        places = torch.arange(len(tokens), device=tokens.device)
        is_known = places < progress.lengths[slot]
        if hasattr(progress, "is_committed"):
            is_known = progress.is_committed[slot]
        last = tokens[is_known][-1:] if is_known.any() else torch.zeros_like(tokens[:1])
        filled = torch.where(is_known, tokens, last)
        model = self._pipes[job.group].prompted_model
        forced = model.layout.forced(places[None])
        if forced is not None:
            filled = torch.where(forced >= 0, forced, filled)
        request: Request = job.request
        image = model.render(filled.view(1, -1), [request.prompt], [request.seed])[0]
        return RequestOutput(request, image, filled.view(-1).cpu(), 0)

    def encode(self, body: ImageBody, made: list[RequestOutput]) -> bytes:
        images = [
            {"b64_json": self._to_base64(body, each), "seed": each.request.seed} for each in made
        ]
        answer = {
            "created": int(time.time()),
            "data": images,
            "usage": _count_tokens(made[0].request.tag.width, made),
            **self._facts(body, made[0]),
        }
        return json.dumps(answer).encode()

    async def stream(self, body: ImageBody, events: Events) -> AsyncIterator[bytes]:
        index = 0
        async for job, kind, made in events:
            data = {
                "type": "image_generation.completed",
                "b64_json": await run_in_threadpool(self._to_base64, body, made),
                "created_at": int(time.time()),
                "quality": "auto",
                **self._facts(body, made),
            }
            if kind == "partial":
                data |= {"type": "image_generation.partial_image", "partial_image_index": index}
                index += 1
            else:
                data |= {"seed": made.request.seed, "usage": _count_tokens(job.width, [made])}
            yield to_event(data["type"], data)

    def _to_base64(self, body: ImageBody, made: RequestOutput) -> str:
        """The file of an image; only PNG says how it was made."""
        if body.output_format == "png":
            job = made.request.tag
            facts = self.setup.describe(job.item, job.settings, self._hashes, self.pipe.model)
            data = to_png(made.image, {**facts, **self.setup.measure(made)})
        else:
            file = BytesIO()
            quality = body.output_compression
            made.image.save(file, format=body.output_format, quality=quality)
            data = file.getvalue()
        return b64encode(data).decode()

    def _facts(self, body: ImageBody, made: RequestOutput) -> dict[str, Any]:
        size = f"{made.image.width}x{made.image.height}"
        return {"size": size, "background": "opaque", "output_format": body.output_format}


class SpeechRoute(Route):
    """A text-to-speech model. A text that it does not say at once is several jobs, as it is several
    rows of `mmaccel speak`; the setup's `rows` of them are spoken at a time at most.
    """

    path = "/v1/audio/speech"
    body = SpeechBody
    example = "a"

    def __init__(self, setup: Speech, chunk_seconds: float = CHUNK_SECONDS) -> None:
        super().__init__(setup)
        self.headers = {"x-sample-rate": str(self.pipe.speech.sample_rate)}
        self._chunk_seconds = chunk_seconds

    def jobs(self, body: SpeechBody) -> list[Job]:
        # OpenAI's client always names a voice; these are the model's own
        voice = None if body.voice in ("default", "auto", "") else body.voice
        (item,) = body.items(voice=voice)
        settings = self.setup.plan(item, self.pipe)
        options = dict(settings.options)
        voice = options["voice"]
        jobs = []
        for part in self.pipe.speech.split(body.text):
            width = len(self.pipe.speech.encode(part, voice))
            job = Job(item, settings, options["max_seconds"], width)
            job.request = SpeechRequest(part, item.seed, voice, job, in_chunks=body.stream)
            jobs.append(job)
        ahead = 1 if body.stream else self.setup.rows
        for job, following in zip(jobs, jobs[ahead:], strict=False):
            job.following = following
        return jobs

    def serve(
        self, first: Job, requests: list[Any], receive: Callable[..., None], **options: Any
    ) -> None:
        of_row = dict(first.settings.options)
        del of_row["voice"]  # a request's own
        self.pipe.serve(
            requests,
            policy=first.settings.policy,
            deliver=lambda request, made: receive(request.tag, made),
            deliver_chunk=lambda request, chunk: receive(request.tag, chunk, is_whole=False),
            chunk_seconds=self._chunk_seconds,
            **of_row,
            **options,
        )

    def encode(self, body: SpeechBody, made: list[Utterance]) -> bytes:
        whole = join_parts(made)
        if body.response_format == "pcm":
            return to_pcm(whole.waveform)
        return to_wav(whole.waveform, whole.sample_rate)

    async def stream(self, body: SpeechBody, events: Events) -> AsyncIterator[bytes]:
        def pack(sound: bytes) -> bytes:
            if body.stream_format == "audio":
                return sound
            return to_event(name, {"type": name, "audio": b64encode(sound).decode()})

        name = "speech.audio.delta"
        is_wav = body.response_format == "wav"
        head = wav_head(self.pipe.speech.sample_rate) if is_wav else b""
        n_in, utterances = 0, []
        async for job, kind, value in events:
            if kind == "done":
                n_in += job.width
                utterances.append(value)
            else:
                yield pack(head + to_pcm(value.waveform))
                head = b""
        if head:  # no sound came
            yield pack(head)
        if body.stream_format == "sse":
            done = {"type": "speech.audio.done", "usage": _count_tokens(n_in, utterances)}
            yield to_event("speech.audio.done", done)


def to_event(name: str, data: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


def _count_tokens(n_in: int, made: Sequence[Any]) -> dict[str, Any]:
    """Usage as OpenAI counts it; the prompt of several images counts once."""
    n_out = sum(len(each.tokens) for each in made)
    usage = {"input_tokens": n_in, "output_tokens": n_out, "total_tokens": n_in + n_out}
    return {**usage, "input_tokens_details": {"image_tokens": 0, "text_tokens": n_in}}
