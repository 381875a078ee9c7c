"""Bodies of requests that are refused, as their answers say it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request

from mmaccel.serving.bodies import ImageBody, SpeechBody, check_text, read_body
from mmaccel.serving.errors import ApiError
from tests.messages.case import Refused

_JSON = "application/json"


def _body(
    name: str, data: bytes, *says: str, kind: type[BaseModel] = ImageBody, content_type: str = _JSON
) -> Refused:
    """A body; one without bytes does not arrive."""

    async def receive() -> dict[str, Any]:
        if not data:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": data, "more_body": len(data) > 10**5}

    async def read() -> Any:
        headers = [(b"content-type", content_type.encode())]
        return await read_body(Request({"type": "http", "headers": headers}, receive), kind, 0.01)

    return Refused(name, lambda: asyncio.run(read()), says=says, error=ApiError)


def _field(name: str, *says: str, kind: type[BaseModel] = ImageBody, **fields: Any) -> Refused:
    text = {ImageBody: "prompt", SpeechBody: "input"}[kind]
    return _body(name, json.dumps({text: "x", **fields}).encode(), *says, kind=kind)


def _text(name: str, text: str, *says: str) -> Refused:
    return Refused(
        name, lambda: check_text("input", text, 9), says=("input", *says), error=ApiError
    )


CASES = (
    _body("a form", b"{}", "content-type", _JSON, "'text/plain'", content_type="text/plain"),
    _body("a slow body", b"", "body", "within 0.01 s", "send it faster"),
    _body("a long body", b"a" * 300_000, "body", "at most 262144 bytes", "shorten it"),
    _body("no JSON", b"{'n': 1}", "body", "a JSON object in UTF-8", "line 1 column 2"),
    _body("a list", b"[]", "body", "a JSON object in UTF-8"),
    _body("no prompt", b"{}", "prompt: expected it", "add it"),
    _field("no image", "n: expected greater than or equal to 1, received 0", n=0),
    _field("a number as text", "n: expected a valid integer, received '1'", n="1"),
    _field("a url", "response_format: expected 'b64_json', received 'url'", response_format="url"),
    _field(
        "a long list", "size: expected a valid string", "a list of length 500", size=["x"] * 500
    ),
    _field("a long name", "user: expected at most 1000 characters", "length 1001", user="x" * 1001),
    _field("an unknown field", "'steps'", "model, seed, prompt", "leave it out", steps=3),
    _field("faster", "speed: expected less than or equal to 1", kind=SpeechBody, speed=2),
    _text("a long text", "a" * 10, "at most 9 characters", "10", "shorten it"),
    _text("no text", " ", "expected text, received none"),
    _text("NUL", "a\0", "NUL", "remove it"),
)
