"""Limits and options of a server."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmaccel.checks import Domain, check_fields
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_BATCH, MAX_PROMPT
from mmaccel.options import option

MAX_BODY = 256 * 1024  # bytes: two prompts of 4000 characters, each written as \ud83d\ude00
MAX_HEAD = 16 * 1024  # bytes of a request's line and headers together
_TOKENS = Domain(0, 10**9, "0 is without")
_SECONDS = Domain(0, 1e6, "give seconds above 0", above_low=True)


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Options of a server; `mmaccel serve` has a flag for each field with a `help`.

    Attributes:
        max_connections: at a time at most; others are answered 503.
        api_keys: a request needs one of these; none is needed where this is empty.
    """

    host: str = option("127.0.0.1", "0.0.0.0 listens to other machines")
    port: int = option(
        8000, "0 takes a free one", domain=Domain(0, 2**16 - 1, "0 takes a free one")
    )
    name: str | None = option(
        None, "the model's name in requests; by default as --model", names=("--served-model-name",)
    )
    rows: int = option(
        16,
        "images or utterances decoded at a time",
        names=("--batch-size",),
        domain=Domain(1, MAX_BATCH),
    )
    queue: int = option(32, "how many more may wait; then 429", domain=Domain(1, 100_000))
    timeout: float = option(600.0, "seconds from request to answer at most", domain=_SECONDS)
    body_timeout: float = option(10.0, "seconds that a request may take to arrive", domain=_SECONDS)
    max_prompt: int = option(4000, "characters of a prompt at most", domain=Domain(1, MAX_PROMPT))
    prefix_cache: int = option(
        0,
        "tokens of prompts that are kept for later ones that begin alike; 0 keeps none",
        domain=_TOKENS,
    )
    prefix_shared_from: int = option(
        0,
        "a common beginning of so many tokens is stored once for all rows; 0: each has a copy",
        domain=_TOKENS,
    )
    log_prompts: bool = option(False, "write prompts to the log")
    cors_origin: str | None = option(
        None, "web pages of this origin may ask, as https://a.org; * is any; several with commas"
    )
    max_connections: int = 1024
    api_keys: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.prefix_shared_from and not self.prefix_cache:
            raise OptionError(
                f"--prefix-shared-from: expected prompts that are kept, received "
                f"{self.prefix_shared_from} without --prefix-cache; give both"
            )
