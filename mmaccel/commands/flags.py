"""Flags of commands, made from dataclasses of options.

A command has parameters that are dataclasses; `with_flags` gives it one flag for each of their
fields in their place. A field is a flag where it was declared by `mmaccel.options.option` with a
help text, or where its type carries a `typer.Option`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.models import OptionInfo

from mmaccel.checks import show
from mmaccel.commands.process import pause_collector
from mmaccel.errors import OptionError
from mmaccel.options import FusedSwitch, Switch

GRAPHS = {"auto": "auto", "on": True, "off": False}
_SWITCHES = (Switch, FusedSwitch)


@dataclass(frozen=True)
class Without:
    """Names the fields of a group that a command has no flags for."""

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """A command with a flag for each field of its parameters that are dataclasses."""
    own = inspect.signature(command, eval_str=True)
    groups: dict[str, tuple[type, list[Flag]]] = {}
    parameters = []
    for name, parameter in own.parameters.items():
        kind, *marks = get_args(parameter.annotation) or (parameter.annotation,)
        if not (isinstance(kind, type) and is_dataclass(kind)):
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
            continue
        left_out = [each for mark in marks if isinstance(mark, Without) for each in mark.names]
        flags = [flag for flag in flags_of(kind) if flag.name not in left_out]
        groups[name] = (kind, flags)
        parameters += [flag.parameter() for flag in flags]

    @wraps(command)
    def run(**given: Any) -> None:
        for name, (kind, flags) in groups.items():
            values = {flag.name: flag.read(given.pop(flag.name)) for flag in flags}
            given[name] = kind(**values)
        command(**given)

    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def as_command(kind: type[Any], *, pauses: bool = True) -> Callable[..., None]:
    """A command from a dataclass of its flags, whose `run` it calls; the docstring is its help.

    Where it `pauses`, cycles are not collected until its work begins, see
    `mmaccel.commands.process`.
    """
    hints = get_type_hints(kind, include_extras=True)

    def command(**given: Any) -> None:
        if pauses:
            pause_collector()
        kind(**given).run()

    command.__name__ = kind.__name__.lower()
    command.__doc__ = kind.__doc__
    own = {each.name: Flag(each, hints[each.name]) for each in fields(kind)}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            own[name].parameter()
            if own[name].field.metadata.get("help")
            else each.replace(kind=each.KEYWORD_ONLY, annotation=hints[name])
            for name, each in inspect.signature(kind).parameters.items()
        ]
    )
    return with_flags(command)


@dataclass(frozen=True)
class Flag:
    """The flag of a field.

    Attributes:
        field: of a dataclass.
        annotation: its type, `Annotated` where it carries a `typer.Option`.
    """

    field: Field[Any]
    annotation: Any

    @property
    def name(self) -> str:
        """Of the field."""
        return self.field.name

    def parameter(self) -> inspect.Parameter:
        """The parameter that typer makes the flag of."""
        default = self.field.default
        annotation = self.annotation
        if not _has_option(annotation):
            annotation, default = self._annotate()
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )

    def _annotate(self) -> tuple[Any, Any]:
        """The type of the flag, and its default."""
        metadata = self.field.metadata
        flag = "--" + self.name.replace("_", "-")
        names = metadata.get("names", (flag,))
        kind = self.annotation
        default = self.field.default
        if kind is bool:
            names = (flag,)  # without a --no-…
        elif kind in _SWITCHES and metadata.get("text"):
            kind = str
        elif kind in _SWITCHES:
            names = (f"{flag}/--no-{flag[2:]}",)
            kind = bool | None
            default = None
        elif kind is Any:
            kind = str
        return Annotated[kind, typer.Option(*names, help=metadata["help"])], default

    def read(self, value: Any) -> Any:
        """The value of the field for a value of the flag.

        Raises:
            OptionError: a switch in other words than auto, on and off.
        """
        if self.annotation not in _SWITCHES:
            return value
        if value is None or isinstance(value, bool):
            return self.field.default if value is None else value
        if value not in GRAPHS:
            option = self.name.replace("_", "-")
            raise OptionError(
                f"--{option}: expected one of {', '.join(GRAPHS)}, received {show(value)}; auto "
                "uses them where they work"
            )
        return GRAPHS[value]


def flags_of(kind: type) -> Iterator[Flag]:
    """The flags of a dataclass of options, in the order of its fields."""
    hints = get_type_hints(kind, include_extras=True)
    for each in fields(kind):
        annotation = hints[each.name]
        if _has_option(annotation) or each.metadata.get("help") is not None:
            yield Flag(each, annotation)


def _has_option(annotation: Any) -> bool:
    return any(isinstance(mark, OptionInfo) for mark in get_args(annotation)[1:])
