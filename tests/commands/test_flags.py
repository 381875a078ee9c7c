"""Flags made from dataclasses of options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from mmaccel.commands.flags import Without, as_command
from mmaccel.errors import OptionError
from mmaccel.options import LoadOptions, option


@dataclass(frozen=True, kw_only=True)
class Colours:
    """Options of a test."""

    paint: str = option("red", "of the wall", names=("--paint", "-p"))
    is_wet: bool = option(False, "whether it is wet")
    hidden: int = 7


def run(*arguments: str) -> dict[str, Any]:
    """What a command receives."""
    seen: dict[str, Any] = {}

    @dataclass(frozen=True, kw_only=True)
    class Paint:
        """A command."""

        wall: str = option(..., "to paint", argument=True)
        colours: Colours
        load: Annotated[LoadOptions, Without("revision")]
        times: int = option(1, "how often")

        def run(self) -> None:
            seen.update(vars(self))

    app = typer.Typer()
    app.command()(as_command(Paint))
    result = CliRunner().invoke(app, arguments)
    if isinstance(result.exception, OptionError):
        raise result.exception
    seen["code"] = result.exit_code
    return seen


def test_a_command_receives_its_options_as_objects() -> None:
    seen = run("north", "-p", "blue", "--is-wet", "--times", "2", "--no-fused", "--dtype", "bf16")
    assert (seen["wall"], seen["times"]) == ("north", 2)
    assert seen["colours"] == Colours(paint="blue", is_wet=True)
    assert seen["load"] == LoadOptions(fused=False, dtype="bf16")
    seen = run("north")
    assert seen["colours"] == Colours() and seen["load"] == LoadOptions()


def test_switches_in_words() -> None:
    for text, value in (("auto", "auto"), ("on", True), ("off", False)):
        assert run("north", "--cuda-graphs", text)["load"].cuda_graphs == value
    with pytest.raises(OptionError, match="--cuda-graphs: expected one of auto, on, off"):
        run("north", "--cuda-graphs", "yes")


@pytest.mark.parametrize("flag", ["--hidden", "--revision", "--no-is-wet", "--token"])
def test_no_flag(flag: str) -> None:
    assert run("north", flag, "1")["code"] == 2
