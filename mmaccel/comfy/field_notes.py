"""What the docstrings of a class say of its fields, for tooltips."""

from __future__ import annotations

import inspect
import re

_SECTION = re.compile(r"^(?:Args|Attributes):$")
_ENTRY = re.compile(r"^    (\w+(?:, \w+)*): (.*)$")
_LIST = re.compile(r"`mmaccel[\w.]*\.[A-Z]+`")


def field_notes(cls: type) -> dict[str, str]:
    """Field -> text, of a class and those it inherits from, the nearest that says something.

    A text that only points elsewhere ("as in …") yields to one further up.
    """
    found: dict[str, str] = {}
    for base in cls.__mro__:
        for name, text in _read(base.__dict__.get("__doc__") or "").items():
            if name not in found or found[name].startswith("as in "):
                found[name] = text
    return {name: _plain(text) for name, text in found.items()}


def _read(doc: str) -> dict[str, str]:
    """The entries of a docstring's sections on fields."""
    entries: dict[str, list[str]] = {}
    names: list[str] = []
    inside = False
    for line in inspect.cleandoc(doc).splitlines():
        if line and not line.startswith(" "):
            inside, names = bool(_SECTION.match(line)), []
        elif inside and (entry := _ENTRY.match(line)):
            names = entry[1].split(", ")
            for name in names:
                entries[name] = [entry[2]]
        else:
            for name in names:
                entries[name].append(line.strip())
    return {name: " ".join(filter(None, lines)) for name, lines in entries.items()}


def _plain(text: str) -> str:
    """A sentence or two without marks: what a list of choices holds is on the page already."""
    text = _LIST.sub("these", text).replace("`", "").replace("one of these: ", "")
    text = text.removesuffix(", one of these.").rstrip(".") + "."
    return text[0].upper() + text[1:]
