"""Limits and options of a server."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_ROWS = 10  # images of one request, as OpenAI's `n`
MAX_BODY = 256 * 1024  # bytes: two prompts of 4000 characters, each written as \ud83d\ude00
MAX_HEAD = 16 * 1024  # bytes of a request's line and headers together
MAX_DRAINED = 64 * 1024**2  # bytes of a refused body that are read and thrown away
MAX_PARTIAL_IMAGES = 3  # of one request, as OpenAI's `partial_images`


@dataclass(frozen=True)
class ServerSettings:
    """Options of a server.

    Attributes:
        name: the model's name in requests and answers.
        host, port: where it listens; port 0 takes a free one.
        rows: images or utterances decoded at a time at most.
        queue: those that may wait at most.
        max_prompt: characters of a prompt or text at most.
        timeout: seconds from a request to its answer at most.
        body_timeout: seconds that a request's head, and then its body, may take to arrive.
        max_connections: connections at a time at most; others are answered 503.
        api_keys: a request needs one of these; none is needed where this is empty.
        log_prompts: whether the log may contain prompts.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    rows: int = 16
    queue: int = 32
    max_prompt: int = 4000
    timeout: float = 600.0
    body_timeout: float = 10.0
    max_connections: int = 1024
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    log_prompts: bool = False
