"""Errors that a client gets, in the shape of OpenAI's API.

https://platform.openai.com/docs/guides/error-codes
"""

from __future__ import annotations

import logging
import traceback

from fastapi import HTTPException
from pydantic import ValidationError

logger = logging.getLogger(__package__)

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_CODES = {  # of pydantic's errors
    "missing": "missing_field",
    "extra_forbidden": "unknown_parameter",
    "json_invalid": "invalid_json",
    "model_type": "invalid_json",
}


class ApiError(HTTPException):
    """An answer `{"error": {"message", "type", "param", "code"}}`; `param` is the wrong field."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str = "invalid_value",
        param: str | None = None,
        **headers: str,
    ) -> None:
        kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        error = {"message": message, "type": kind, "param": param, "code": code}
        super().__init__(status, {"error": error}, headers)


def invalid(error: ValidationError) -> ApiError:
    """The answer to a body, by the first thing that is wrong in it."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = str(first["loc"][0])[:100] if first["loc"] else None
    code = _CODES.get(first["type"], "invalid_value")
    return ApiError(400, f"{param or 'body'}: {first['msg']}", code, param)


def internal() -> ApiError:
    return ApiError(500, "server: a fault; see its log for this request", "internal")


def shutting_down() -> ApiError:
    message = "server: it ends; ask another one"
    return ApiError(503, message, "shutting_down", **{"retry-after": "10"})


def log_fault(what: str, error: Exception, with_message: bool) -> None:
    """Log a fault; its message may quote a prompt."""
    message = f": {error}" if with_message else ""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s failed: %s%s\n%s", what, type(error).__name__, message, frames)
