"""Configuration files of checkpoints: JSON read within limits, settings read by declarations."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from mmaccel.checks import Domain, check_value, domains, field_types
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.limits import parse_json

Settings = TypeVar("Settings")

_SIZE = Domain()  # of a number that declares no other
LIMIT = 64 * 2**20  # bytes of a configuration or an index
_SHOWN = 60  # characters of a value in a message


def read_json(file: Path, option: str = "model", *, may_lack: bool = False) -> dict[str, Any]:
    """Read a JSON object, or an UnsupportedModelError: no file (unless `may_lack`: an empty
    object), more than `LIMIT` bytes, other JSON. `option` begins messages.
    """
    if may_lack and not os.path.exists(file):  # False for a name that is too long
        return {}
    try:
        if not file.is_file() or file.stat().st_size > LIMIT:
            raise ValueError(f"no file, or one of more than {LIMIT} bytes")
        content = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        received = " ".join(str(error).split())
    else:
        if isinstance(content, dict):
            return content
        received = f"a {type(content).__name__}"
    raise UnsupportedModelError(
        f"{option}: expected a JSON object in {file}, received {received}; copy the folder again"
    )


def shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def read_settings(
    kind: type[Settings], content: Mapping[str, Any], file: Path, option: str = "model"
) -> Settings:
    """A dataclass out of a file of settings, by its fields' types and domains. None means the
    default; names that are no fields are left out.
    """
    cls: Any = kind
    kinds, known = field_types(cls), domains(cls)
    values = {}
    for each in fields(cls):
        if content.get(each.name) is not None or each.default is MISSING:
            domain = known.get(each.name, _SIZE)
            values[each.name] = read_value(
                content, each.name, kinds[each.name], file, option, domain
            )
    return kind(**values)


def read_value(
    content: Mapping[str, Any],
    name: str,
    kind: Any,
    file: Path,
    option: str = "model",
    domain: Domain = _SIZE,
) -> Any:
    """A value out of a file of settings, lists as tuples; else an UnsupportedModelError."""
    domain = replace(domain, hint="copy the folder again")
    try:
        return check_value(f"{option}: {name} in {file}", content.get(name), kind, domain)
    except OptionError as error:
        raise UnsupportedModelError(str(error)) from error
