"""Errors that a client gets, in the shape of OpenAI's API.

https://platform.openai.com/docs/guides/error-codes: `{"error": {"message", "type", "param",
"code"}}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmaccel.errors import MMAccelError

_MAX_MESSAGE = 1000  # characters


class ApiError(MMAccelError):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: for people.
        code: for programs.
        param: the field of the request that is wrong.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        message = str(self)
        if len(message) > _MAX_MESSAGE:
            message = f"{message[: _MAX_MESSAGE - 3]}..."
        return {
            "error": {
                "message": message,
                "type": _type_of(self.status),
                "param": self.param,
                "code": self.code,
            }
        }


def _type_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """A request with a wrong field."""
    return ApiError(400, message, code, param)


def internal() -> ApiError:
    """What a client is told of a fault of the server."""
    return ApiError(
        500,
        "server: expected to answer, received a fault; see its log for this request",
        "internal",
    )


def shutting_down(message: str) -> ApiError:
    """A request to a server that ends."""
    return ApiError(
        503, f"{message}; ask another one", "shutting_down", headers={"retry-after": "10"}
    )
