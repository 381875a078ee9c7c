"""What the command line says about options that it does not have, and outputs that are inputs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from mmaccel.checks import show
from mmaccel.errors import OptionError

_OUTPUTS = ("--json", "--items", "--out", "-o")  # options that name a file to write


def check_outputs(arguments: Sequence[str]) -> None:
    """Refuse an output that another argument names too: writing would replace what is read."""
    named = [each.partition("=")[2] if each.startswith("-") else each for each in arguments]
    for argument, value, following in zip(arguments, named, [*named, ""][1:], strict=True):
        option, file = argument.partition("=")[0], value or following
        if option in _OUTPUTS and sum(_is_same_file(file, each) for each in named) > 1:
            raise OptionError(
                f"{option}: expected a file that is named once, received {show(file)}, which the "
                "command reads or writes too; name another file"
            )


def _is_same_file(one: str, other: str) -> bool:
    return os.path.isfile(one) and os.path.isfile(other) and os.path.samefile(one, other)


def explain_usage(error: Any) -> str:
    """One line for an error of typer about the arguments; empty where typer has said all."""
    complaint = error.format_message().rstrip(".")
    named = getattr(getattr(error, "ctx", None), "command_path", "mmaccel")
    return f"{complaint}; see {named} --help" if complaint else ""
