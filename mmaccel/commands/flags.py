"""Flags of commands, made from dataclasses of options.

A field is a flag where it was declared by `mmaccel.options.option` with a help text, or where its
type carries a `typer.Option`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.models import OptionInfo

from mmaccel.checks import members, show
from mmaccel.commands.options import parse_path
from mmaccel.commands.process import pause_collector
from mmaccel.errors import OptionError
from mmaccel.options import FusedSwitch, Switch
from mmaccel.own_code import TypedName

_WORDS = {"auto": "auto", "on": True, "off": False}


class Without:
    """Names the fields of a group that a command has no flags for."""

    def __init__(self, *names: str) -> None:
        self.names = names


def as_command(kind: type[Any], *, pauses: bool = True) -> Callable[..., None]:
    """A command from a dataclass of its flags, whose `run` it calls; the docstring is its help.

    A dataclass of options in it has a flag for each of its fields. Where the command `pauses`,
    cycles are not collected until its work begins.
    """
    hints = get_type_hints(kind, include_extras=True)
    groups: dict[str, tuple[Any, list[str]]] = {}
    parameters: list[Parameter] = []
    for each in fields(kind):
        group, *marks = get_args(hints[each.name]) or (hints[each.name],)
        if not (isinstance(group, type) and is_dataclass(group)):
            parameters.append(_to_flag(each, hints[each.name]))
            continue
        left_out = [name for mark in marks for name in mark.names]
        flags = [flag for flag in _flags_of(group) if flag.name not in left_out]
        groups[each.name] = group, [flag.name for flag in flags]
        parameters += flags

    def command(**given: Any) -> None:
        if pauses:
            pause_collector()
        for name, (group, names) in groups.items():
            given[name] = group(**{flag: given.pop(flag) for flag in names})
        kind(**given).run()

    command.__name__ = kind.__name__.lower()
    command.__doc__ = kind.__doc__
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _flags_of(kind: type) -> list[Parameter]:
    """The parameters that typer makes flags of, in the order of a dataclass' fields."""
    hints = get_type_hints(kind, include_extras=True)
    return [
        _to_flag(each, hints[each.name])
        for each in fields(kind)
        if each.metadata.get("help")
        or any(isinstance(mark, OptionInfo) for mark in get_args(hints[each.name])[1:])
    ]


def _to_flag(each: Field[Any], kind: Any) -> Parameter:
    """The parameter of a field; its type is the field's own where that has no help."""
    default = Parameter.empty if each.default in (MISSING, ...) else each.default
    more = {name: value for name, value in each.metadata.items() if name != "domain"}
    if more.get("help"):
        flag = "--" + each.name.replace("_", "-")
        names = more.pop("names", (flag,))  # of a switch without --no-…
        if kind in (Switch, FusedSwitch):
            if more.pop("text", False):
                kind, read = str, _read_word(flag)
            else:
                kind, read = bool | None, _read_switch(default)
                names, default = (f"{flag}/--no-{flag[2:]}",), None
            more["callback"] = read
        elif kind is Any:
            kind = str
        elif Path in members(kind):
            more = {"parser": parse_path, "metavar": "PATH", **more}
        elif TypedName in members(kind):
            more |= {"parser": TypedName, "metavar": "TEXT"}
        is_argument = more.pop("argument", False)
        mark = typer.Argument(**more) if is_argument else typer.Option(*names, **more)
        kind = Annotated[kind, mark]
    return Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _read_switch(default: Any) -> Callable[[Any], Any]:
    return lambda value: default if value is None else value


def _read_word(flag: str) -> Callable[[Any], Any]:
    def read(value: str) -> Any:
        if value not in _WORDS:
            raise OptionError(
                f"{flag}: expected one of {', '.join(_WORDS)}, received {show(value)}; auto uses "
                "them where they work"
            )
        return _WORDS[value]

    return read
