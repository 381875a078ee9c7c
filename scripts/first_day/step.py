"""What a first-day step is: what somebody does, what is printed, and for a mistake the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Run:
    """A command or a Python program, and what it must print.

    Attributes:
        text: a line of a shell, or source of Python.
        says: regular expression that the output has, with blanks and line ends as one blank.
        code: exit status.
        is_python: whether `text` is Python.
        net: "hub", a hub on localhost; or "none", nobody answers.
        stop_at: it gets Ctrl-C as soon as a file matches this pattern, or, after `text:`, as soon
            as this text is printed.
    """

    text: str
    says: str
    code: int = 0
    is_python: bool = False
    net: str = "none"
    stop_at: str = ""


@dataclass(frozen=True)
class Step:
    """A task of the first day, or a mistake (`remedy`, `then`).

    Attributes:
        title: in the user's words.
        run: what is done first.
        remedy: of a mistake: a part of its message, which `then` does.
        then: of a mistake: what follows the message, and succeeds. Of a task: what is done next.
        files: text files that are there, by name.
        server: a command that runs meanwhile; `{port}` is a free port, also in `run` and `then`.
        lacks: packages without which the step makes sense; it is left out where one is installed.
        needs: packages or paths without which it is left out.
    """

    title: str
    run: Run
    remedy: str = ""
    then: Run | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    server: str = ""
    lacks: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


def shell(text: str, says: str, code: int = 0, *, net: str = "none", stop_at: str = "") -> Run:
    """A line of a shell."""
    return Run(text, says, code, net=net, stop_at=stop_at)


def python(text: str, says: str, code: int = 0) -> Run:
    """Source of Python; a blank line at its ends is left out."""
    return Run(text.strip("\n"), says, code, is_python=True)
