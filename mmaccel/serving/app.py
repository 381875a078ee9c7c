"""The HTTP application: OpenAI's images, speech and models, and `/health` and `/metrics`.

A request is checked in this order: size of its body, bearer key, JSON, fields, model, prompt, room
in the queue, which its rows join together.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import generate_latest
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmaccel.checks import show
from mmaccel.errors import OptionError
from mmaccel.serving.engine import Engine, Events, Job
from mmaccel.serving.errors import ApiError, internal, invalid, log_fault, shutting_down
from mmaccel.serving.routes import Body, to_event
from mmaccel.serving.settings import MAX_BODY

logger = logging.getLogger(__package__)


def create_app(engine: Engine) -> ASGIApp:
    settings, route = engine.settings, engine.route
    card: dict[str, Any] = {"id": settings.name, "object": "model", "owned_by": "mmaccel"}
    card |= {"created": int(time.time())}
    app = FastAPI(title="mmaccel", openapi_url=None)

    @app.get("/health")
    async def health() -> Response:
        if engine.is_healthy:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "ending"}, 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        text = generate_latest(engine.metrics.registry)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        _identify(request, settings.api_keys)
        return JSONResponse({"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}")
    async def one_model(request: Request, name: str) -> Response:
        _identify(request, settings.api_keys)
        _check_model(name, settings.name)
        return JSONResponse(card)

    @app.post(route.path)
    async def make(request: Request) -> Response:
        return await _make(engine, request)

    for kind in (HTTPException, ValidationError, Exception):
        app.add_exception_handler(kind, _refuse)
    if settings.cors_origin is None:
        return _record(app, engine)
    return CORSMiddleware(
        _record(app, engine),
        settings.cors_origin.split(","),
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=("x-seed", "x-sample-rate", "x-request-id", "retry-after"),
    )


async def _make(engine: Engine, request: Request) -> Response:
    """Check a request, let its rows wait, and answer it with what is made of them."""
    settings, route = engine.settings, engine.route
    deadline = time.monotonic() + settings.timeout
    data = await _read_body(request, settings.body_timeout)
    client = _identify(request, settings.api_keys)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        message = f"content-type: expected application/json, received {show(media_type)}"
        raise ApiError(415, message, "unsupported_media_type")
    body = route.body.model_validate_json(data)
    _check_model(body.model, settings.name)
    _check_lengths(body, settings.max_prompt)
    if settings.log_prompts:
        logger.info("%s: %a", request.state.request_id, body.text)
    try:
        jobs: list[Job] = await run_in_threadpool(route.jobs, body)
    except OptionError as error:
        raise _refused(body, error) from None
    request.state.jobs.extend(jobs)
    loop = asyncio.get_running_loop()
    told: asyncio.Queue[Any] = asyncio.Queue()
    engine.put(jobs, client, lambda *event: loop.call_soon_threadsafe(told.put_nowait, event))
    gone = asyncio.ensure_future(request.receive())  # after the body, only a disconnect comes
    gone.add_done_callback(lambda _: told.put_nowait((None, "gone", None)))
    events = _read_events(told, len(jobs), deadline)
    headers = {"x-seed": str(jobs[0].item.seed), **route.headers}
    if not body.stream:
        made = {job: value async for job, _, value in events}
        data = await run_in_threadpool(route.encode, body, [made[job] for job in jobs])
        return Response(data, media_type=body.media_type, headers=headers)
    pieces = route.stream(body, events)
    first = await anext(pieces)  # what fails before is an error by itself
    is_sse = body.media_type == "text/event-stream"
    return StreamingResponse(
        _go_on(first, pieces, is_sse), media_type=body.media_type, headers=headers
    )


def _record(app: ASGIApp, engine: Engine) -> ASGIApp:
    """An application that counts and logs every answer and fault, frees what a request leaves, and
    answers what a server that ends leaves. A path with a slash at its end is the one without.
    """

    async def recorded(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removesuffix("/") or "/"
        request_id = secrets.token_hex(8)
        jobs: list[Job] = []
        scope.update({"path": path, "state": {"request_id": request_id, "jobs": jobs}})
        began = time.monotonic()
        status = 0

        async def send_recorded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"].append((b"x-request-id", request_id.encode()))
            await send(message)

        try:
            await app(scope, receive, send_recorded)
        except ClientDisconnect:
            status = 499  # as nginx names a client that went
        except asyncio.CancelledError:  # the server ends
            if not status:
                await _answer(shutting_down())(scope, receive, send_recorded)
        except Exception as error:
            late = error.__cause__  # where an answer had begun
            status = late.status_code if isinstance(late, ApiError) else 500
            if status == 500:
                log_fault(request_id, error, engine.settings.log_prompts)
        finally:
            engine.cancel(jobs)
            seconds = time.monotonic() - began
            named = getattr(scope.get("route"), "path", "other")
            engine.metrics.requests.labels(named, str(status)).inc()
            engine.metrics.request_seconds.labels(named).observe(seconds)
            logger.info("%s %s %s %s %.3f s", request_id, scope["method"], named, status, seconds)

    return recorded


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, ApiError):
        return _answer(error)
    if isinstance(error, ValidationError):
        return _answer(invalid(error))
    if not isinstance(error, HTTPException):
        return _answer(internal())
    known = ", ".join(route.path for route in request.app.routes)
    message = f"url: expected one of {known}, received {request.method} {show(request.url.path)}"
    return _answer(
        ApiError(error.status_code, message, "unknown_url", None, **(error.headers or {}))
    )


def _answer(error: ApiError) -> Response:
    return JSONResponse(error.detail, error.status_code, error.headers)


def _identify(request: Request, keys: tuple[str, ...]) -> str:
    """Who asks: the bearer key where the server has keys, else the address."""
    if not keys:
        return request.client.host if request.client is not None else ""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    key = key.strip()
    is_known = [secrets.compare_digest(key.encode(), known.encode()) for known in keys]
    if scheme.lower() != "bearer" or not any(is_known):
        message = "authorization: expected Authorization: Bearer KEY with a key of this server"
        raise ApiError(401, message, "invalid_api_key", **{"www-authenticate": "Bearer"})
    return key


def _check_model(name: str | None, known: str | None) -> None:
    if name not in (None, known):
        message = f"model: expected {show(known)}, received {show(name)}"
        raise ApiError(404, message, "model_not_found", "model")


async def _read_body(request: Request, seconds: float) -> bytes:
    """The bytes of a body. What is too much is read too and thrown away, because a client
    that still writes does not read an answer.
    """
    data = b""
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                data += chunk[: MAX_BODY + 1 - len(data)]
    except TimeoutError:
        message = f"body: expected it within {seconds:g} s, received a part of it"
        raise ApiError(408, message, "request_timeout", connection="close") from None
    if len(data) > MAX_BODY:
        message = f"body: expected at most {MAX_BODY} bytes, received more; shorten it"
        raise ApiError(413, message, "request_too_large")
    return data


def _check_lengths(body: Body, most: int) -> None:
    for name, value in body:
        if isinstance(value, str) and len(value) > most:
            message = f"{name}: expected at most {most} characters, received {len(value)}"
            raise ApiError(400, message, "string_too_long", name)


def _refused(body: Body, error: OptionError) -> ApiError:
    """What the model does not take; the message begins with a field of a row, or with another
    name of the text.
    """
    name = str(error).partition(":")[0]
    name = "negative_prompt" if name.startswith("negative") else name
    param = name if name in type(body).model_fields else body.text_field
    return ApiError(400, str(error), param=param)


async def _read_events(told: asyncio.Queue[Any], n_jobs: int, deadline: float) -> Events:
    """What the jobs of a request are told until all are done."""
    while n_jobs:
        try:
            event = await asyncio.wait_for(told.get(), deadline - time.monotonic())
        except TimeoutError:
            message = "time: the answer is late; ask for less, or again when fewer wait"
            raise ApiError(504, message, "timeout") from None
        if event[1] == "gone":
            raise ClientDisconnect
        if event[1] == "failed":
            raise internal()
        n_jobs -= event[1] == "done"
        yield event


async def _go_on(first: bytes, pieces: AsyncIterator[bytes], is_sse: bool) -> AsyncIterator[bytes]:
    """The pieces of an answer that has begun. What fails is its last event; without events it has
    no end, as clients see.
    """
    yield first
    try:
        async for piece in pieces:
            yield piece
    except ApiError as error:
        if not is_sse:
            raise
        yield to_event("error", error.detail)
