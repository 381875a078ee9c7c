"""What a request's body may say, and how it is read: size and time first, then JSON and fields.

OpenAI's fields: https://platform.openai.com/docs/api-reference/images/create and
https://platform.openai.com/docs/api-reference/audio/createSpeech. `seed` and `negative_prompt` are
ours. A field that asks for what no model here does is refused, not ignored.
"""

from __future__ import annotations

import asyncio
import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from starlette.requests import Request

from mmaccel.batch.prompts import FIELDS, spell
from mmaccel.checks import show
from mmaccel.limits import SEEDS
from mmaccel.samplers.noise import draw_new_seed
from mmaccel.serving.errors import ApiError, invalid
from mmaccel.serving.settings import MAX_BODY, MAX_PARTIAL_IMAGES, MAX_ROWS

Body = TypeVar("Body", bound="RequestBody")

_PREFIX = re.compile("(Input should be|String should have) ")
_NO_JSON = ("json_invalid", "model_type")  # pydantic's errors of a body that is no JSON object


class RequestBody(BaseModel):
    """What all bodies have; a field that is null is as if left out, also one that is not known.

    Attributes:
        text_field: name of the field with what is shown or said.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)
    text_field: ClassVar[str]

    model: str | None = None
    seed: Annotated[int, Field(ge=-1, lt=SEEDS)] = -1

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, given: Any) -> Any:
        """A body without its nulls."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}

    @field_validator("seed")
    @classmethod
    def _draw(cls, seed: int) -> int:
        """The seed; one is drawn for -1."""
        return draw_new_seed() if seed < 0 else seed

    @property
    def text(self) -> str:
        """What is shown or said."""
        text: str = getattr(self, self.text_field)
        return text

    def check(self, max_prompt: int, backend: Any) -> None:
        """Check what the fields say together, and of a model.

        Raises:
            ApiError: the first field that is wrong.
        """
        check_text(self.text_field, self.text, max_prompt)

    @property
    def row(self) -> dict[str, Any]:
        """The fields that a row of a prompt file has too, by their names there."""
        given = self.model_dump(exclude_none=True).items()
        shared = {spell(name): value for name, value in given if spell(name) in FIELDS}
        return {**shared, "prompt": self.text}


class ImageBody(RequestBody):
    """Body of `POST /v1/images/generations`; `user` is read and not used."""

    text_field = "prompt"

    prompt: str
    n: Annotated[int, Field(ge=1, le=MAX_ROWS)] = 1
    size: str | None = None
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = None
    quality: Literal["auto", "standard"] | None = None
    style: None = None
    background: Literal["auto", "opaque"] | None = None
    moderation: Literal["auto", "low"] | None = None
    user: Annotated[str, Field(max_length=1000)] | None = None
    stream: bool = False
    partial_images: Annotated[int, Field(ge=0, le=MAX_PARTIAL_IMAGES)] = 0
    negative_prompt: str | None = None

    @field_validator("size")
    @classmethod
    def _size(cls, size: str | None) -> str | None:
        """The size; "auto" is the model's own."""
        return None if size == "auto" else size

    def check(self, max_prompt: int, backend: Any) -> None:
        super().check(max_prompt, backend)
        if self.negative_prompt is not None and self.negative_prompt.strip():
            check_text("negative_prompt", self.negative_prompt, max_prompt)
        if self.stream and self.n > 1:
            message = f"n: expected 1 with stream, received {self.n}; ask for each by itself"
            raise invalid("n", message)
        if not self.partial_images:
            return
        name = "partial_images"
        received = f"received {self.partial_images}"
        if not self.stream:
            raise invalid(name, f"{name}: expected stream with it, {received} without; set stream")
        if not backend.has_partial_images:
            message = f"{name}: expected 0 for this model, whose images are not shown before they "
            raise invalid(name, f"{message}are finished, {received}; leave it out")


class SpeechBody(RequestBody):
    """Body of `POST /v1/audio/speech`."""

    text_field = "input"
    n: ClassVar[int] = 1

    input: str
    voice: Annotated[str, Field(max_length=100)] | None = None
    response_format: Literal["wav", "pcm"] = "wav"
    speed: Annotated[float, Field(ge=1, le=1)] | None = None
    stream_format: Literal["audio", "sse"] | None = None

    @field_validator("voice")
    @classmethod
    def _voice(cls, voice: str | None) -> str | None:
        """The voice; OpenAI's client always sends one, and these are the model's own."""
        return None if voice in ("default", "auto", "") else voice

    @property
    def partial_images(self) -> int:
        """Chunks are unfinished sound."""
        return int(self.stream_format is not None)


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
