"""`mmaccel bench`: options that are refused before a model is opened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mmaccel import loading
from tests.fixtures.commands import Said, say
from tests.messages.case import Refused


def _bench(*arguments: object) -> Callable[[], Any]:
    def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loading, "open_pipeline", lambda *_, **__: pytest.fail("opened"))
            say("bench", *arguments)

    return run


def _case(arguments: tuple[object, ...], *says: str) -> Refused:
    return Refused(" ".join(map(str, arguments)), _bench(*arguments), says, Said)


CASES = (
    _case(("--guidance", "one"), "guidance_scale", "a finite number", "'one'"),
    _case(("--json", "-"), "--json: expected a file name, received '-'"),
    _case(("--policies", "jacobi,mc-sjd", "--windows", "adaptive"), "a fixed width for mc-sjd"),
    _case(("--policies", "autoregressive", "--drafts", "left"), "--drafts: expected none"),
)
