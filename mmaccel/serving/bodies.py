"""What a request's body may say, and how it is read: size and time first, then JSON and fields.

OpenAI's fields: https://platform.openai.com/docs/api-reference/images/create and
https://platform.openai.com/docs/api-reference/audio/createSpeech. `seed` and `negative_prompt` are
ours. A field that asks for what no model here does is refused, not ignored.
"""

from __future__ import annotations

import asyncio
import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from starlette.requests import Request

from mmaccel.batch.prompts import FIELDS, spell
from mmaccel.checks import show
from mmaccel.limits import SEEDS
from mmaccel.serving.errors import ApiError, invalid
from mmaccel.serving.settings import MAX_BODY, MAX_PARTIAL_IMAGES, MAX_ROWS

Body = TypeVar("Body", bound=BaseModel)
Seed = Annotated[int, Field(ge=-1, lt=SEEDS)]

_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)
_PREFIX = re.compile("(Input should be|String should have) ")
_NO_JSON = ("json_invalid", "model_type")  # pydantic's errors of a body that is no JSON object


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

    @field_validator("size")
    @classmethod
    def _size(cls, size: str | None) -> str | None:
        """The size; "auto" is the model's own."""
        return None if size == "auto" else size

    def row(self) -> dict[str, Any]:
        """The fields that a row of a prompt file has too."""
        shared = {name for name in ImageBody.model_fields if spell(name) in FIELDS}
        return self.model_dump(include=shared, exclude_none=True)


class SpeechBody(BaseModel):
    """Body of `POST /v1/audio/speech`."""

    model_config = _STRICT

    input: str
    model: str | None = None
    voice: Annotated[str, Field(max_length=100)] | None = None
    response_format: Literal["wav", "pcm"] | None = None
    speed: Annotated[float, Field(ge=1, le=1)] | None = None
    stream_format: Literal["audio", "sse"] | None = None
    seed: Seed | None = None


async def read_body(request: Request, kind: type[Body], seconds: float) -> Body:
    """The fields of a request.

    Args:
        request: whose body was not read yet.
        kind: its fields.
        seconds: that the body may take to arrive.

    Raises:
        ApiError: another type, too many bytes, too slow, no JSON object, or the first wrong field.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(
            415,
            f"content-type: expected application/json, received {show(media_type)}; set the header",
            "unsupported_media_type",
        )
    data = await _read(request, seconds)
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise _refuse(kind, error) from None


async def _read(request: Request, seconds: float) -> bytes:
    """The bytes of a body. What is too much is left to uvicorn, which throws it away once there is
    an answer, so that a client that still writes receives it.

    Raises:
        ApiError: too many bytes, or too slow.
    """
    length = int(request.headers.get("content-length", "0"))  # a number, as h11 has checked
    data = bytearray()
    try:
        async with asyncio.timeout(seconds):
            if length <= MAX_BODY:
                async for chunk in request.stream():
                    data += chunk
                    if len(data) > MAX_BODY:
                        break
    except TimeoutError:
        raise ApiError(
            408,
            f"body: expected it within {seconds:g} s, received a part of it; send it faster",
            "request_timeout",
            headers={"connection": "close"},
        ) from None
    if max(length, len(data)) > MAX_BODY:
        raise ApiError(
            413,
            f"body: expected at most {MAX_BODY} bytes, received more; shorten it",
            "request_too_large",
        )
    return bytes(data)


def _refuse(kind: type[BaseModel], error: ValidationError) -> ApiError:
    """The answer to a body, by the first thing that is wrong in it."""
    first = error.errors(include_url=False, include_context=False)[0]
    expected = _PREFIX.sub("", first["msg"])
    if first["type"] in _NO_JSON:
        message = f"body: expected a JSON object in UTF-8, received something else ({expected})"
        return ApiError(400, f"{message}; mend it", "invalid_json")
    name = str(first["loc"][0])[:100]
    if first["type"] == "missing":
        return invalid(name, f"{name}: expected it, received none; add it", "missing_field")
    if first["type"] == "extra_forbidden":
        known = ", ".join(kind.model_fields)
        message = f"{name!a}: expected one of {known}, received another field; leave it out"
        return invalid(name, message, "unknown_parameter")
    received = _shown(first["input"])
    return invalid(name, f"{name}: expected {expected}, received {received}; change it")


def check_text(param: str, text: str, most: int) -> None:
    """Check a prompt or a text to say.

    Raises:
        ApiError: an empty one, one that is too long, or one with NUL.
    """
    if len(text) > most:
        message = f"{param}: expected at most {most} characters, received {len(text)}; shorten it"
        raise invalid(param, message, "string_too_long")
    if not text.strip():
        raise invalid(param, f"{param}: expected text, received none; write some", "missing_field")
    if "\0" in text:
        raise invalid(param, f"{param}: expected text, received NUL in it; remove it")


def _shown(value: Any) -> str:
    """A value for a message; long ones by their type."""
    if isinstance(value, str | list | dict) and len(value) > 100:
        return f"a {type(value).__name__} of length {len(value)}"
    return show(value)
