"""The routes: OpenAI's images, speech and models, and `/health` and `/metrics`.

A request is checked in this order, and each check costs less than the next: bearer key, room in the
queue, size of the body, JSON, fields, model, prompt. Then its rows join the queue together.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import secrets
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from mmaccel.checks import show
from mmaccel.errors import OptionError
from mmaccel.outputs.sound_files import to_pcm, wav_head
from mmaccel.samplers.noise import choose_one_seed, draw_new_seed
from mmaccel.serving.bodies import ImageBody, SpeechBody, check_text, read_body
from mmaccel.serving.errors import ApiError, internal, invalid, shutting_down
from mmaccel.serving.jobs import Event, Job, Ticket
from mmaccel.serving.service import Service

logger = logging.getLogger(__package__)

_NAMES = {"partial": "partial_image", "done": "completed"}  # of events
_ENDS = "server: expected to answer, received a signal to end at once"


def create_app(service: Service) -> Any:
    """The ASGI application of a service."""
    app = FastAPI(title="mmaccel", openapi_url=None)
    created = int(time.time())

    @app.get("/health")
    async def health() -> Response:
        if not service.is_healthy:
            return JSONResponse({"status": "ending"}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(
            service.metrics.to_text(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    model = {"id": service.settings.name, "object": "model", "created": created}
    model |= {"owned_by": "mmaccel"}

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        service.identify(request)
        return JSONResponse({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def one_model(request: Request, name: str) -> Response:
        service.identify(request)
        service.check_model(name)
        return JSONResponse(model)

    if service.images is not None:
        app.post("/v1/images/generations")(_images_route(service))
    if service.speech is not None:
        app.post("/v1/audio/speech")(_speech_route(service))

    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(Exception)  # raised again afterwards, and logged by `Recorded`
    async def fail(request: Request, error: Exception) -> Response:
        return JSONResponse(internal().body(), 500)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: Any) -> Response:
        known = ApiError(
            error.status_code,
            f"url: expected a route and method of this server, received {request.method} "
            f"{show(request.url.path)}; it has {', '.join(service.routes)}",
            "unknown_url",
        )
        return JSONResponse(known.body(), error.status_code, error.headers)

    return Recorded(app, service)


class AnswerCut(Exception):
    """Ends an answer that has begun, before its end.

    Args:
        status: what the answer would have been.
    """

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status


class Recorded:
    """Counts and logs every answer and every fault; answers what a server that ends leaves.

    Args:
        app: an ASGI application.
        service: whose metrics count.
    """

    def __init__(self, app: Any, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status = 0
        request_id = secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_recorded(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, send_recorded)
        except ClientDisconnect:
            status = status or 499  # as nginx names a client that went
        except asyncio.CancelledError:  # the server ends
            if not status:
                error = shutting_down(_ENDS)
                answer = JSONResponse(error.body(), error.status, error.headers)
                await answer(scope, receive, send_recorded)
        except AnswerCut as error:
            status = error.status
        except Exception as error:
            _report(error, request_id, self._service.settings.log_prompts)
        finally:
            seconds = time.monotonic() - began
            path = scope["path"]
            route = next((r for r in self._service.routes if path == r), None)
            if route is None:
                route = "/v1/models" if path.startswith("/v1/models/") else "other"
            self._service.metrics.requests.labels(route, str(status)).inc()
            self._service.metrics.request_seconds.labels(route).observe(seconds)
            logger.info("%s %s %s %s %.3f s", request_id, scope["method"], route, status, seconds)


def _report(error: Exception, request_id: str, with_message: bool) -> None:
    """Log a fault; its message may quote a prompt."""
    message = f": {error}" if with_message else ""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s failed: %s%s\n%s", request_id, type(error).__name__, message, frames)


def _images_route(service: Service) -> Callable[[Request], Awaitable[Response]]:
    backend = service.images
    assert backend is not None

    async def images(request: Request) -> Response:
        deadline = time.monotonic() + service.settings.timeout
        client = service.admit(request)
        body = await read_body(request, ImageBody, service.settings.body_timeout)
        service.check_model(body.model)
        n = body.n or 1
        service.check_room(n, client)
        _check_images(body, service.settings.max_prompt, backend.has_partial_images)
        if service.settings.log_prompts:
            logger.info("%s prompt: %s", request.state.request_id, ascii(body.prompt))
        fields = {**body.row(), "seed": choose_one_seed(body.seed, draw_new_seed)}
        ticket = Ticket(client)

        def plan() -> list[Job]:
            return backend.jobs(backend.plan(fields), ticket, body.partial_images or 0)

        try:
            jobs = await run_in_threadpool(plan)
        except OptionError as error:
            raise _refused(error) from None
        service.put(jobs)
        kind = body.output_format or "png"

        async def to_base64(made: Any) -> str:
            data = await run_in_threadpool(backend.to_bytes, made, kind, body.output_compression)
            return base64.b64encode(data).decode("ascii")

        if body.stream:
            events = _stream(service, jobs, deadline, to_base64, kind)
            return JobsResponse(jobs, events, media_type="text/event-stream")
        made = await _gather(service, request, jobs, deadline)
        data = [{"b64_json": await to_base64(each), "seed": each.request.seed} for each in made]
        return JSONResponse(
            {
                "created": int(time.time()),
                "data": data,
                "background": "opaque",
                "output_format": kind,
                "size": _size(made[0]),
                "usage": _usage(jobs, made),
            }
        )

    return images


def _check_images(body: ImageBody, max_prompt: int, has_partial_images: bool) -> None:
    """Check what the fields of a body say together, and of this model.

    Raises:
        ApiError: the first field that is wrong.
    """
    check_text("prompt", body.prompt, max_prompt)
    if body.negative_prompt is not None and body.negative_prompt.strip():
        check_text("negative_prompt", body.negative_prompt, max_prompt)
    if body.stream and (body.n or 1) > 1:
        message = f"n: expected 1 with stream, received {body.n}; ask for each by itself"
        raise invalid("n", message)
    if not body.partial_images:
        return
    name = "partial_images"
    received = f"received {body.partial_images}"
    if not body.stream:
        raise invalid(name, f"{name}: expected stream with it, {received} without; set stream")
    if not has_partial_images:
        message = f"{name}: expected 0 for this model, whose images are not shown before they are "
        raise invalid(name, f"{message}finished, {received}; leave it out")


def _size(made: Any) -> str:
    """Width and height of an image."""
    return f"{made.image.width}x{made.image.height}"


def _usage(jobs: list[Job], made: list[Any]) -> dict[str, Any]:
    """Tokens of a request, as OpenAI counts them: the prompt once."""
    n_in = jobs[0].width
    n_out = sum(len(each.tokens) for each in made)
    return {
        "input_tokens": n_in,
        "input_tokens_details": {"image_tokens": 0, "text_tokens": n_in},
        "output_tokens": n_out,
        "total_tokens": n_in + n_out,
    }


def _refused(error: OptionError) -> ApiError:
    """What the model does not take, as an answer; the message begins with the field."""
    message = str(error)
    name = message.partition(":")[0]
    names = {"prompt": "prompt", "size": "size", "seed": "seed", "n": "n"}
    param = "negative_prompt" if name.startswith("negative") else names.get(name, "prompt")
    return invalid(param, message)


async def _gather(
    service: Service, request: Request, jobs: list[Job], deadline: float
) -> list[Any]:
    """The payloads of the jobs of a request, in their order; cancels them when the client goes or
    time is over.

    Raises:
        ApiError: time is over, a job failed, or the server ends.
        ClientDisconnect: the client went.
    """
    made: dict[Job, Any] = {}
    gone = asyncio.ensure_future(request.receive())  # after the body, only a disconnect comes
    try:
        while len(made) < len(jobs):
            event = await _next(service, jobs[0].ticket, deadline, gone)
            made[event.job] = _value(event)
    finally:
        gone.cancel()
        _cancel(jobs, made)
    return [made[job] for job in jobs]


async def _next(
    service: Service, ticket: Ticket, deadline: float, gone: asyncio.Future[Any] | None = None
) -> Event:
    waiting = asyncio.ensure_future(ticket.get())
    aborted = asyncio.ensure_future(service.aborted.wait())
    watched = {waiting, aborted} if gone is None else {waiting, aborted, gone}
    left = max(0.0, deadline - time.monotonic())
    try:
        done, _ = await asyncio.wait(watched, timeout=left, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        aborted.cancel()
    if waiting in done:
        return waiting.result()
    if gone is not None and gone in done:
        raise ClientDisconnect
    if aborted in done:
        raise shutting_down(_ENDS)
    seconds = service.settings.timeout
    raise ApiError(
        504,
        f"time: expected an answer within {seconds:g} s, received none; ask for less, or ask again "
        "when fewer wait",
        "timeout",
    )


def _value(event: Event) -> Any:
    """The payload of a job that is done.

    Raises:
        ApiError: the job failed.
    """
    if event.kind == "failed":
        raise internal()
    return event.value


def _cancel(jobs: list[Job], made: dict[Job, Any]) -> None:
    """Free the rows of jobs that nobody waits for."""
    for job in jobs:
        if job not in made:
            job.is_cancelled = True


class JobsResponse(StreamingResponse):
    """An answer in pieces, at whose end its jobs are cancelled, even if no piece was asked for.

    Args:
        jobs: whose payload is sent.
        content: the pieces.
        options: of `StreamingResponse`.
    """

    def __init__(self, jobs: list[Job], content: AsyncIterator[Any], **options: Any) -> None:
        super().__init__(content, **options)
        self._jobs = jobs

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See ASGI."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            _cancel(self._jobs, {})


async def _stream(
    service: Service,
    jobs: list[Job],
    deadline: float,
    to_base64: Callable[[Any], Awaitable[str]],
    kind: str,
) -> AsyncIterator[str]:
    """Events of one image: unfinished ones, then the finished one."""
    is_made = False
    index = 0
    try:
        while not is_made:
            event = await _next(service, jobs[0].ticket, deadline)
            value = _value(event)
            data: dict[str, Any] = {
                "type": f"image_generation.{_NAMES[event.kind]}",
                "b64_json": await to_base64(value),
                "created_at": int(time.time()),
                "size": _size(value),
                "background": "opaque",
                "output_format": kind,
                "quality": "auto",
            }
            if event.kind == "partial":
                data["partial_image_index"] = index
                index += 1
            else:
                is_made = True
                data |= {"seed": value.request.seed, "usage": _usage(jobs, [value])}
            yield _event(data["type"], data)
    except ApiError as error:
        yield _event("error", error.body())


def _event(name: str, data: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


def _speech_route(service: Service) -> Callable[[Request], Awaitable[Response]]:
    backend = service.speech
    assert backend is not None

    async def speech(request: Request) -> Response:
        deadline = time.monotonic() + service.settings.timeout
        client = service.admit(request)
        body = await read_body(request, SpeechBody, service.settings.body_timeout)
        service.check_model(body.model)
        check_text("input", body.input, service.settings.max_prompt)
        if service.settings.log_prompts:
            logger.info("%s input: %s", request.state.request_id, ascii(body.input))
        seed = choose_one_seed(body.seed, draw_new_seed)
        ticket = Ticket(client)

        def plan() -> Job:
            in_chunks = body.stream_format is not None
            return backend.job(body.input, body.voice, seed, ticket, in_chunks=in_chunks)

        try:
            job = await run_in_threadpool(plan)
        except OptionError as error:
            param = "voice" if str(error).startswith("voice") else "input"
            raise invalid(param, str(error)) from None
        service.put([job])
        kind = body.response_format or "wav"
        headers = {"x-seed": str(seed), "x-sample-rate": str(backend.sample_rate)}
        if body.stream_format is None:
            (made,) = await _gather(service, request, [job], deadline)
            data = await run_in_threadpool(backend.to_bytes, made, kind)
            return Response(data, media_type=f"audio/{kind}", headers=headers)
        first = await _first(service, request, job, deadline)
        events = _chunks(service, job, first, deadline)
        head = wav_head(backend.sample_rate) if kind == "wav" else b""
        if body.stream_format == "audio":
            return JobsResponse(
                [job], _to_sound(events, head), media_type=f"audio/{kind}", headers=headers
            )
        return JobsResponse(
            [job], _to_sound_events(events, head), media_type="text/event-stream", headers=headers
        )

    return speech


async def _first(service: Service, request: Request, job: Job, deadline: float) -> Event:
    """The first event of a job whose answer has not begun.

    Raises:
        ApiError, ClientDisconnect: see `_gather`.
    """
    gone = asyncio.ensure_future(request.receive())
    try:
        event = await _next(service, job.ticket, deadline, gone)
        _value(event)
    except BaseException:
        job.is_cancelled = True
        raise
    finally:
        gone.cancel()
    return event


async def _chunks(
    service: Service, job: Job, event: Event, deadline: float
) -> AsyncIterator[Event]:
    """The events of a job from its first one on, the last of which has the utterance.

    Raises:
        ApiError: time is over, the job failed, or the server ends.
    """
    yield event
    while event.kind == "partial":
        event = await _next(service, job.ticket, deadline)
        _value(event)
        yield event


async def _to_sound(events: AsyncIterator[Event], head: bytes) -> AsyncIterator[bytes]:
    """`head` and the samples of chunks.

    Raises:
        AnswerCut: a later chunk failed; clients see that the answer has no end.
    """
    yield head
    try:
        async for event in events:
            if event.kind == "partial":
                yield await run_in_threadpool(to_pcm, event.value.waveform)
    except ApiError as error:
        raise AnswerCut(error.status) from error


async def _to_sound_events(events: AsyncIterator[Event], head: bytes) -> AsyncIterator[str]:
    """The same in OpenAI's events."""
    try:
        async for event in events:
            if event.kind == "partial":
                data = head + await run_in_threadpool(to_pcm, event.value.waveform)
                head = b""
                yield _sound_event(data)
            else:
                if head:  # no sound came
                    yield _sound_event(head)
                name = "speech.audio.done"
                yield _event(name, {"type": name, "usage": _sound_usage(event)})
    except ApiError as error:
        yield _event("error", error.body())


def _sound_event(data: bytes) -> str:
    name = "speech.audio.delta"
    return _event(name, {"type": name, "audio": base64.b64encode(data).decode()})


def _sound_usage(event: Event) -> dict[str, int]:
    """Tokens of a request, as OpenAI counts them."""
    n_in = event.job.width
    n_out = len(event.value.tokens)
    return {"input_tokens": n_in, "output_tokens": n_out, "total_tokens": n_in + n_out}
