"""Limits and options of a server."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmaccel.options import option

MAX_ROWS = 10  # images of one request, as OpenAI's `n`
MAX_BODY = 256 * 1024  # bytes: two prompts of 4000 characters, each written as \ud83d\ude00
MAX_HEAD = 16 * 1024  # bytes of a request's line and headers together
MAX_PARTIAL_IMAGES = 3  # of one request, as OpenAI's `partial_images`


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Options of a server; `mmaccel serve` has a flag for each field with a `help`.

    Attributes:
        host, port: where it listens; port 0 takes a free one.
        name: the model's name in requests and answers.
        rows: images or utterances decoded at a time at most.
        queue: those that may wait at most.
        timeout: seconds from a request to its answer at most.
        body_timeout: seconds that a request's head, and then its body, may take to arrive.
        max_prompt: characters of a prompt or text at most.
        prefix_cache: tokens of prompts that are kept for later requests, see
            `mmaccel.samplers.prefix_tree`; 0 keeps none.
        prefix_shared_from: tokens of a beginning from which on rows read it together; 0: each has
            a copy.
        log_prompts: whether the log may contain prompts.
        max_connections: connections at a time at most; others are answered 503.
        cors_origin: of web pages that may read answers, with commas; None: of none.
        api_keys: a request needs one of these; none is needed where this is empty.
    """

    host: str = option("127.0.0.1", "0.0.0.0 listens to other machines")
    port: int = option(8000, "0 takes a free one")
    name: str | None = option(
        None, "the model's name in requests; by default as --model", names=("--served-model-name",)
    )
    rows: int = option(16, "images or utterances decoded at a time", names=("--batch-size",))
    queue: int = option(32, "how many more may wait; then 429")
    timeout: float = option(600.0, "seconds from request to answer at most")
    body_timeout: float = option(10.0, "seconds that a request may take to arrive")
    max_prompt: int = option(4000, "characters of a prompt at most")
    prefix_cache: int = option(
        0, "tokens of prompts that are kept for later ones that begin alike; 0 keeps none"
    )
    prefix_shared_from: int = option(
        0, "a common beginning of so many tokens is stored once for all rows; 0: each has a copy"
    )
    log_prompts: bool = option(False, "write prompts to the log")
    cors_origin: str | None = option(
        None, "web pages of this origin may ask, as https://a.org; * is any; several with commas"
    )
    max_connections: int = 1024
    api_keys: tuple[str, ...] = field(default=(), repr=False)
