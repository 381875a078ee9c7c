"""What a request's body may say, and how it is read: size and time first, then JSON, then fields.

OpenAI's fields: https://platform.openai.com/docs/api-reference/images/create and
https://platform.openai.com/docs/api-reference/audio/createSpeech. `seed` and `negative_prompt` are
ours. A field that asks for what no model here does is refused, not ignored.
"""

from __future__ import annotations

import asyncio
import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from mmaccel.checks import show
from mmaccel.limits import parse_json
from mmaccel.serving.errors import ApiError, invalid
from mmaccel.serving.settings import MAX_BODY, MAX_DRAINED, MAX_PARTIAL_IMAGES, MAX_ROWS

Body = TypeVar("Body", bound=BaseModel)
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]

_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)
_NO_TEXT = re.compile(r"[\x00\ud800-\udfff]")


class ImageBody(BaseModel):
    """Body of `POST /v1/images/generations`; `user` is read and not used."""

    model_config = _STRICT

    prompt: str
    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ROWS)] | None = None
    size: str | None = None
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = None
    quality: Literal["auto", "standard"] | None = None
    style: None = None
    background: Literal["auto", "opaque"] | None = None
    moderation: Literal["auto", "low"] | None = None
    user: Annotated[str, Field(max_length=1000)] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Field(ge=0, le=MAX_PARTIAL_IMAGES)] | None = None
    seed: Seed | None = None
    negative_prompt: str | None = None


class SpeechBody(BaseModel):
    """Body of `POST /v1/audio/speech`."""

    model_config = _STRICT

    input: str
    model: str | None = None
    voice: Annotated[str, Field(max_length=100)] | None = None
    response_format: Literal["wav", "pcm"] | None = None
    speed: Annotated[float, Field(ge=1, le=1)] | None = None
    stream_format: Literal["audio"] | None = None
    seed: Seed | None = None


async def read_json(request: Request, seconds: float) -> Any:
    """The JSON of a request.

    Args:
        request: whose body was not read yet.
        seconds: that the body may take to arrive.

    Raises:
        ApiError: another type, too many bytes, too slow, or no JSON object.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, f"content-type: expected application/json, received {show(kind)}; set the header",
            "unsupported_media_type",
        )  # fmt: skip
    data = await _read(request, seconds)
    try:
        value = parse_json(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(
            400, f"body: expected JSON in UTF-8, received {type(error).__name__} ({error})"[:300],
            "invalid_json",
        ) from None  # fmt: skip
    if not isinstance(value, dict):
        raise ApiError(400, "body: expected a JSON object in braces", "invalid_json")
    return value


async def _read(request: Request, seconds: float) -> bytes:
    """The bytes of a body; those of one that is too long are read and thrown away, so that a client
    that still writes receives the answer.
    """
    declared = request.headers.get("content-length", "0")
    length = int(declared) if declared.isdecimal() and len(declared) < 16 else MAX_DRAINED + 1
    data, received = bytearray(), 0
    try:
        async with asyncio.timeout(seconds):
            if length <= MAX_DRAINED:
                async for chunk in request.stream():
                    received += len(chunk)
                    if received > MAX_DRAINED:
                        break
                    if received <= MAX_BODY and length <= MAX_BODY:
                        data += chunk
    except TimeoutError:
        if max(received, length) <= MAX_BODY:
            raise ApiError(
                408, f"body: expected it within {seconds:g} s; send it faster", "request_timeout",
                headers={"connection": "close"},
            ) from None  # fmt: skip
    if max(received, length) > MAX_BODY:
        raise ApiError(
            413, f"body: expected at most {MAX_BODY} bytes, received more; shorten it",
            "request_too_large", headers={"connection": "close"},
        )  # fmt: skip
    return bytes(data)


def parse(kind: type[Body], value: Any) -> Body:
    """Check the fields of a body.

    Raises:
        ApiError: the first wrong field.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    name = str(first["loc"][0])[:100] if first["loc"] else "body"
    if first["type"] == "missing":
        raise invalid(name, f"{name}: expected it, received none; add it", "missing_field")
    if first["type"] == "extra_forbidden":
        known = ", ".join(kind.model_fields)
        raise invalid(name, f"{name!a}: expected one of {known}; leave it out", "unknown_parameter")
    expected = first["msg"][:1].lower() + first["msg"][1:]
    raise invalid(name, f"{name}: {expected}, received {_shown(first['input'])}")


def check_text(param: str, text: str, most: int) -> str:
    """Check a prompt or a text to say.

    Raises:
        ApiError: an empty one, one that is too long, or characters that no text has.
    """
    if len(text) > most:
        raise invalid(
            param, f"{param}: expected at most {most} characters, received {len(text)}; shorten it",
            "string_too_long",
        )  # fmt: skip
    if not text.strip():
        raise invalid(param, f"{param}: expected text, received none; write some", "missing_field")
    if _NO_TEXT.search(text):
        raise invalid(param, f"{param}: expected text, received NUL or surrogates; remove them")
    return text


def _shown(value: Any) -> str:
    """A value for a message; long ones by their type."""
    if isinstance(value, str | list | dict) and len(value) > 100:
        return f"a {type(value).__name__} of length {len(value)}"
    return show(value)
