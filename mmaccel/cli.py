"""The command line: `mmaccel generate | speak | animate | answer | bench | evaluate` and others.

Exit codes: 0 done, 1 failed, 2 wrong use, 3 done with failures (items failed, a guarantee was
broken), 130 stopped by Ctrl-C, SIGTERM or SIGHUP. Errors are one line on stderr. Nothing heavy is
imported before a sub-command runs.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any

import typer

from mmaccel import __version__
from mmaccel.checks import show
from mmaccel.commands.bench import bench
from mmaccel.commands.comfy import comfy
from mmaccel.commands.doctor import doctor
from mmaccel.commands.evaluate import evaluate
from mmaccel.commands.media import animate, answer, generate, speak
from mmaccel.commands.models import models
from mmaccel.commands.process import (
    STOPPED,
    Stopped,
    StopSignals,
    quiet_imports,
    restored_collector,
)
from mmaccel.commands.serve import serve
from mmaccel.commands.streams import guarded_streams, stdout_error
from mmaccel.commands.train_head import train_head
from mmaccel.commands.usage import check_outputs, explain_usage
from mmaccel.errors import MMAccelError, OptionError

_MAX_LINE = 10_000  # characters of an error: twenty wrong rows, each with its reason
_CODES = {1: "fatal", 2: "usage", STOPPED: "interrupted"}

app = typer.Typer(
    name="mmaccel",
    help="The same images from several times fewer forward passes.",
    no_args_is_help=True,
    rich_markup_mode=None,  # rich would double the time of --help
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    """The same images from several times fewer forward passes."""
    if version:
        print(f"mmaccel {__version__}")
        raise typer.Exit()
    try:
        os.getcwd()
    except FileNotFoundError as error:  # torch would end the process at its import
        raise OptionError(
            "working folder: expected one that exists, received one that was removed; change to "
            "another with cd"
        ) from error


for command in (generate, speak, animate, answer, serve, bench, comfy, doctor, models):
    app.command()(command)
app.command("train-head")(train_head)
app.add_typer(evaluate)


@cache
def _command() -> Any:
    """As click has it; typer builds it anew at every call of `app`."""
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code. Arguments are without the program's name."""
    argv = sys.argv[1:] if arguments is None else list(arguments)
    with StopSignals() as signals, guarded_streams():
        try:
            code = _finish(_run(argv))
        except KeyboardInterrupt:  # while an error was reported
            code = _finish(_report(argv, "stopped", STOPPED))
        if arguments is None:
            signals.end_process(code)
    return code


def _run(argv: Sequence[str]) -> int:
    try:
        check_outputs(argv)
        with restored_collector(), quiet_imports():
            code = _command()(args=argv, prog_name="mmaccel", standalone_mode=False)
    except Stopped as error:
        return _report(argv, error, STOPPED)
    except (KeyboardInterrupt, typer.Abort):
        return _report(argv, "stopped", STOPPED)
    except OptionError as error:
        return _report(argv, error, 2)
    except (MMAccelError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            expected = "path: expected a name that this system takes"
            given = f"received {show(error.filename)} ({error.strerror})"
            return _report(argv, f"{expected}, {given}; shorten it", 2)
        return _report(argv, error, 1)
    except Exception as error:
        # Typer's own errors about the arguments, whose class moved between its versions.
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the whole help
            print(error.format_message())
            return 2
        complaint = explain_usage(error)
        return _report(argv, complaint, 2) if complaint else 2
    if code == STOPPED:  # the result of typer for Ctrl-C
        return _report(argv, "stopped", STOPPED)
    return code if isinstance(code, int) else 0


def _finish(code: int) -> int:
    """Report a result that stdout did not take; one that goes, as `head`, has what it wanted."""
    error = stdout_error()
    if error is None or isinstance(error, BrokenPipeError):
        return code
    print(
        f"mmaccel: stdout: expected space for the result, received: {error.strerror}; what was "
        "written to files is kept, free some space and run it again",
        file=sys.stderr,
    )
    return code or 1


def _report(argv: Sequence[str], error: object, code: int) -> int:
    from mmaccel.commands.terminal import print_envelope, printable

    line = " ".join(str(error).split())
    line = line if len(line) <= _MAX_LINE else f"{line[: _MAX_LINE - 3]}..."
    print(f"mmaccel: {printable(line)}", file=sys.stderr)
    if argv[:1] in (["generate"], ["speak"], ["animate"]) and {"--json", "--json-stream"} & set(
        argv
    ):
        print_envelope(None, {"code": _CODES[code], "message": line})
    return code


if __name__ == "__main__":
    sys.exit(main())
