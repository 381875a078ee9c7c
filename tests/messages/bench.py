"""`mmaccel bench`: options that are refused before a model is opened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mmaccel import loading
from mmaccel.commands.bench import peers, window
from tests.fixtures.commands import Said, say
from tests.messages.case import Refused


def _bench(*arguments: object) -> Callable[[], Any]:
    def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            for module in (loading, peers, window):
                patch.setattr(module, "open_pipeline", lambda *_, **__: pytest.fail("opened"))
            say("bench", *arguments)

    return run


def _case(arguments: tuple[object, ...], *says: str) -> Refused:
    return Refused(" ".join(map(str, arguments)), _bench(*arguments), says, Said)


def _canvas(arguments: tuple[object, ...], *says: str) -> Refused:
    model = () if "--model" in arguments else ("--model", "toys")
    return _case(("--family", "canvas", *model, *arguments), *says)


SHARED = (
    _case(("--guidance", ""), "--guidance", "at least one"),
    _case(("--guidance", ","), "--guidance", "at least one"),
    _case(("--guidance", "one"), "--guidance", "numbers with commas", "'one'", "1.0,2.0"),
    _case(("--temperature", "-1"), "temperature: expected"),
    _case(("--device", "cdua"), "device: expected a device of this machine"),
    _case(("--json", "."), "--json: expected a file name"),
    _case(("--json", "-"), "--json: expected a file name, received '-'"),
    _case(("--count", "0"), "--count", "at least 1"),
)
WINDOWS = (
    _case(("--policies", ","), "--policies", "at least one"),
    _case(("--windows", ""), "--windows", "at least one"),
    _case(("--dtypes", ""), "--dtypes", "at least one"),
    _case(("--drafts", ","), "--drafts", "at least one"),
    _case(
        ("--policies", "jacobi,sjd", "--windows", "adaptive"), "--windows", "a fixed width for sjd"
    ),
    _case(("--policies", "jacobi,nonsense", "--windows", "adaptive"), "'nonsense'"),
    _case(("--policies", "autoregressive", "--windows", "adaptive,0"), "window: expected"),
    _case(("--policies", "autoregressive", "--drafts", "coarse"), "--drafts", "add jacobi"),
)
CANVAS = (
    _canvas(("--policies", "stepwise,quick"), "--policies", "labels out of stepwise", "quick"),
    _canvas(("--policies", ","), "--policies", "received none"),
    _canvas(("--policies", "autoregressive"), "one that can run on toys"),
    _canvas(("--policies", "entropy-bounded 0.5 end"), "one that can run on toys"),
    _canvas(("--model", "nowhere"), "model: expected a folder"),
    _canvas(("--count", "0"), "count: expected at least 1"),
    _canvas(("--device", "cdua"), "a device of this machine", "'cdua'"),
    _canvas(("--json", "-"), "--json: expected a file name, received '-'"),
    *(
        _canvas(given, given[0] if given[0].startswith("-") else "a prompt", "expected none with")
        for given in (
            ("a red circle",),
            ("--guidance", "1"),
            ("--temperature", "0"),
            ("--windows", "16"),
            ("--drafts", "coarse"),
            ("--dtypes", "bfloat16"),
            ("--size", "64"),
            ("--decoder", "."),
        )
    ),
)
CASES = (*SHARED, *WINDOWS, *CANVAS)
