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
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request

from mmaccel.checks import show
from mmaccel.errors import OptionError
from mmaccel.outputs.sound_files import to_pcm, wav_head
from mmaccel.serving.bodies import ImageBody, RequestBody, SpeechBody, read_body
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

    _add_route(app, service, *_KINDS[service.backend.route])

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

    recorded = Recorded(app, service)
    if service.settings.cors_origin is None:
        return recorded
    seen = ("x-seed", "x-sample-rate", "x-request-id", "retry-after")
    origins = service.settings.cors_origin.split(",")
    return CORSMiddleware(
        recorded, origins, allow_methods=["*"], allow_headers=["*"], expose_headers=seen
    )


class AnswerCut(Exception):
    """Ends an answer that has begun, before its end.

    Args:
        status: what the answer would have been.
    """

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status


class Recorded:
    """Counts and logs every answer and every fault; answers what a server that ends leaves. A path
    with a slash at its end is the one without.

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
        path = scope["path"].removesuffix("/")
        scope = {**scope, "path": path or "/"}
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


Answer = Callable[[Service, Request, Any, list[Job], float], Awaitable[Response]]
"""Answers a request, whose body was checked and whose jobs wait, before a deadline."""


def _add_route(app: FastAPI, service: Service, kind: type[RequestBody], answer: Answer) -> None:
    @app.post(service.routes[0])
    async def route(request: Request) -> Response:
        deadline = time.monotonic() + service.settings.timeout
        client = service.admit(request)
        body: Any = await read_body(request, kind, service.settings.body_timeout)
        service.check_model(body.model)
        service.check_room(body.n, client)
        body.check(service.settings.max_prompt, service.backend)
        if service.settings.log_prompts:
            shown = ascii(body.text)
            logger.info("%s %s: %s", request.state.request_id, kind.text_field, shown)
        plan = partial(service.backend.jobs, body.row, Ticket(client), body.partial_images)
        try:
            jobs = await run_in_threadpool(plan)
        except OptionError as error:
            raise _refused(kind, error) from None
        later = {job.following for job in jobs}
        service.put([job for job in jobs if job not in later])
        return await answer(service, request, body, jobs, deadline)


async def _answer_images(
    service: Service, request: Request, body: ImageBody, jobs: list[Job], deadline: float
) -> Response:
    backend = service.backend
    kind = body.output_format

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
            "usage": _image_usage(jobs, made),
        }
    )


def _size(made: Any) -> str:
    """Width and height of an image."""
    return f"{made.image.width}x{made.image.height}"


def _image_usage(jobs: list[Job], made: list[Any]) -> dict[str, Any]:
    """Tokens of a request, as OpenAI counts them: the prompt once."""
    n_in = jobs[0].width
    details = {"image_tokens": 0, "text_tokens": n_in}
    return {**_usage(n_in, made), "input_tokens_details": details}


def _usage(n_in: int, made: list[Any]) -> dict[str, int]:
    n_out = sum(len(each.tokens) for each in made)
    return {"input_tokens": n_in, "output_tokens": n_out, "total_tokens": n_in + n_out}


def _refused(kind: type[RequestBody], error: OptionError) -> ApiError:
    """What the model does not take, as an answer; the message begins with the field."""
    name = str(error).partition(":")[0]
    if name.startswith("negative"):
        name = "negative_prompt"
    return invalid(name if name in kind.model_fields else kind.text_field, str(error))


async def _gather(
    service: Service, request: Request, jobs: list[Job], deadline: float
) -> list[Any]:
    """The payloads of the jobs of a request, in their order; cancels them when the client goes or
    time is over.

    Raises:
        ApiError, ClientDisconnect: see `_events`.
    """
    gone = asyncio.ensure_future(request.receive())  # after the body, only a disconnect comes
    try:
        made = {event.job: event.value async for event in _events(service, jobs, deadline, gone)}
    finally:
        gone.cancel()
        _cancel(jobs)
    return [made[job] for job in jobs]


async def _events(
    service: Service, jobs: list[Job], deadline: float, gone: asyncio.Future[Any] | None = None
) -> AsyncIterator[Event]:
    """The events of jobs until all are done.

    Raises:
        ApiError: time is over, a job failed, or the server ends.
        ClientDisconnect: the client went.
    """
    left = set(jobs)
    while left:
        event = await _next(service, jobs[0].ticket, deadline, gone)
        if event.kind == "failed":
            raise internal()
        if event.kind == "done":
            left.remove(event.job)
        yield event


async def _next(
    service: Service, ticket: Ticket, deadline: float, gone: asyncio.Future[Any] | None = None
) -> Event:
    waiting = asyncio.ensure_future(ticket.get())
    aborted = asyncio.ensure_future(service.aborted.wait())
    watched: set[asyncio.Future[Any]] = {waiting, aborted}
    if gone is not None and not gone.cancelled():
        watched.add(gone)
    left = max(0.0, deadline - time.monotonic())
    try:
        done, _ = await asyncio.wait(watched, timeout=left, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        aborted.cancel()
    if waiting in done:
        return waiting.result()
    if gone in done:
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


def _cancel(jobs: list[Job]) -> None:
    """Free the rows of jobs that nobody waits for."""
    for job in jobs:
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
            _cancel(self._jobs)


async def _stream(
    service: Service,
    jobs: list[Job],
    deadline: float,
    to_base64: Callable[[Any], Awaitable[str]],
    kind: str,
) -> AsyncIterator[str]:
    """Events of one image: unfinished ones, then the finished one."""
    index = 0
    try:
        async for event in _events(service, jobs, deadline):
            data: dict[str, Any] = {
                "type": f"image_generation.{_NAMES[event.kind]}",
                "b64_json": await to_base64(event.value),
                "created_at": int(time.time()),
                "size": _size(event.value),
                "background": "opaque",
                "output_format": kind,
                "quality": "auto",
            }
            if event.kind == "partial":
                data["partial_image_index"] = index
                index += 1
            else:
                usage = _image_usage(jobs, [event.value])
                data |= {"seed": event.value.request.seed, "usage": usage}
            yield _event(data["type"], data)
    except ApiError as error:
        yield _event("error", error.body())


def _event(name: str, data: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


async def _answer_speech(
    service: Service, request: Request, body: SpeechBody, jobs: list[Job], deadline: float
) -> Response:
    backend = service.backend
    kind = body.response_format
    headers = {"x-seed": str(body.seed), "x-sample-rate": str(backend.sample_rate)}
    if body.stream_format is None:
        made = await _gather(service, request, jobs, deadline)
        data = await run_in_threadpool(backend.to_bytes, made, kind)
        return Response(data, media_type=f"audio/{kind}", headers=headers)
    events = await _begun(service, request, jobs, deadline)
    head = wav_head(backend.sample_rate) if kind == "wav" else b""
    media_type = f"audio/{kind}"
    pieces: AsyncIterator[Any] = _to_sound(events, head)
    if body.stream_format == "sse":
        media_type = "text/event-stream"
        pieces = _to_sound_events(events, head)
    return JobsResponse(jobs, pieces, media_type=media_type, headers=headers)


async def _begun(
    service: Service, request: Request, jobs: list[Job], deadline: float
) -> AsyncIterator[Event]:
    """The events of jobs whose answer has not begun, once there is one.

    Raises:
        ApiError, ClientDisconnect: see `_events`.
    """
    gone = asyncio.ensure_future(request.receive())
    events = _events(service, jobs, deadline, gone)
    try:
        first = await anext(events)
    except BaseException:
        _cancel(jobs)
        raise
    finally:
        gone.cancel()

    async def all_events() -> AsyncIterator[Event]:
        yield first
        async for event in events:
            yield event

    return all_events()


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
    done = []
    try:
        async for event in events:
            if event.kind == "partial":
                data = head + await run_in_threadpool(to_pcm, event.value.waveform)
                head = b""
                yield _sound_event(data)
            else:
                done.append(event)
        if head:  # no sound came
            yield _sound_event(head)
        n_in = sum(event.job.width for event in done)
        name = "speech.audio.done"
        yield _event(name, {"type": name, "usage": _usage(n_in, [each.value for each in done])})
    except ApiError as error:
        yield _event("error", error.body())


def _sound_event(data: bytes) -> str:
    name = "speech.audio.delta"
    return _event(name, {"type": name, "audio": base64.b64encode(data).decode()})


_KINDS: dict[str, tuple[type[RequestBody], Answer]] = {
    "/v1/images/generations": (ImageBody, _answer_images),
    "/v1/audio/speech": (SpeechBody, _answer_speech),
}
