"""Inputs of nodes made from fields of dataclasses: methods of the catalog, and options.

A field's type decides what its input is, its documentation is the tooltip. A field that the tables
below do not name gets wide bounds: the library itself refuses what it cannot take.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, Field, dataclass
from typing import Any, Literal

from mmaccel.catalog import METHODS
from mmaccel.comfy.table import KV_CACHE, MODEL, VISUAL_TOKENS, Socket, Widget
from mmaccel.pipelines.loading.placement import AUTO
from mmaccel.samplers.acceptance import COUPLINGS
from mmaccel.samplers.canvas.cache_plan import KINDS
from mmaccel.samplers.canvas.masked_parallel import SCHEDULES
from mmaccel.samplers.canvas.orders import ORDERS
from mmaccel.samplers.drafting.sources import NAMES
from mmaccel.samplers.trees.siblings.contract import SiblingRule

SWITCH = (AUTO, "on", "off")

_MANY = 2**20  # of fields that the library does not bound
_LARGE = 1e6
_COUNTS = {  # field -> least, most
    "window": (1, 4096),
    "drafts": (1, 256),
    "group": (0, 2**31 - 1),
    "block": (1, _MANY),
    "steps": (1, _MANY),
    "early": (-_MANY, _MANY),  # layers may be counted from the last one
    "late": (-_MANY, _MANY),
    "layer": (-_MANY, _MANY),
    "neighbours": (1, _MANY),
}
_NUMBERS = {  # field -> least, most, step
    **dict.fromkeys(("threshold", "anchor", "relaxed", "tau", "least", "delta"), (0.0, 1.0, 0.01)),
    "end_threshold": (0.0, 1.0, 0.01),
    "max_gap": (1e-6, 1.0, 0.01),
    "cap": (1.0, _LARGE, 0.1),
    "settled": (0.0, _LARGE, 0.001),
    "kl": (0.0, _LARGE, 0.001),
    "rising": (0.0, 10.0, 0.1),
    "radius": (0.0, _LARGE, 0.05),
}
_CHOICES: dict[str, Sequence[str]] = {  # field -> choices; a method may refuse some
    "drafts": NAMES,
    "tree": tuple(METHODS["tree"]),
    "siblings": tuple(METHODS["siblings"]),
    "coupling": COUPLINGS,
    "order": ORDERS,
    "cache": KINDS,
    "layout": ("rows", "entries"),
    "schedule": SCHEDULES,
    "rule": ("threshold", "frechet"),
    "revise": ("shadow", "edit", "redo"),
    "choose": ("last", "first"),
    "groups": ("ranks", "latent"),
    "vectors": ("embeddings", "codes"),
    "queries": ("cls", "all"),
    "features": (AUTO, "merged", "all"),
}
_SOCKETS = {  # type -> kind of the input
    "TokenModel": MODEL,
    "TokenReducer": VISUAL_TOKENS,
    "CacheMethod": KV_CACHE,
}

_SECTION = re.compile(r"^(?:Args|Attributes):$")
_ENTRY = re.compile(r"^    (\w+(?:, \w+)*): (.*)$")
_LIST = re.compile(r"`mmaccel[\w.]*\.[A-Z]+`")


@dataclass(frozen=True)
class Numbers:
    """The domain of a number's widget.

    Attributes:
        least, most, step: of the widget.
        unset: a value below the domain, and what it stands for; None where every value is one.
    """

    least: float
    most: float
    step: float
    unset: tuple[Any, Any] | None = None


def number(
    name: str, kind: Literal["int", "float"], default: Any, note: str, domain: Numbers
) -> Widget:
    """A number. `note` names what the unset value stands for where it is meant."""
    if domain.unset is None:
        return Widget(name, kind, default, note, domain.least, domain.most, domain.step)
    shown, meant = domain.unset
    return Widget(
        name,
        kind,
        shown if default == meant else default,
        _in_its_words(note, meant, f"{shown:g}"),
        shown,
        domain.most,
        domain.step,
        stands_for=((shown, meant),),
    )


def switch(name: str, note: str, default: str = AUTO) -> Widget:
    """The widget of a `Switch`: on, off, or what the library chooses."""
    return Widget(
        name,
        "choice",
        default,
        note,
        choices=SWITCH,
        stands_for=(("on", True), ("off", False)),
        is_advanced=True,
    )


def choices_of(name: str) -> Sequence[str]:
    """What a field of this name may be, of which a method may refuse some."""
    return _CHOICES.get(name, ())


def field_input(field: Field[Any], note: str, choices: Sequence[str]) -> Widget | Socket:
    """The input of a field.

    Args:
        field: of a dataclass whose annotations are texts.
        note: the tooltip.
        choices: texts that the field takes; empty where any is.
    """
    types = [part.strip() for part in str(field.type).split("|")]
    name = field.name
    default = () if field.default is MISSING else field.default
    is_optional = "None" in types
    for kind in types:
        if kind in _SOCKETS:
            return Socket(name, _SOCKETS[kind], note, is_optional=True)
    if "bool" in types:
        return Widget(name, "bool", default, note)
    if types[0].startswith("tuple["):
        return _ids(name, default, note)
    if "float" in types:
        unset = (-1.0, None) if is_optional else None  # 0 is a value of its own
        bounds = _NUMBERS.get(name, (0.0, _LARGE, 0.01))
        if isinstance(default, float) and default < bounds[0]:  # a logarithm, of either sign
            bounds = (-_LARGE, _LARGE, 0.01)
        return number(name, "float", default, note, Numbers(*bounds, unset))
    if "int" in types:
        return _integer(name, types, default, note)
    return _text(name, default, note, choices, is_optional=is_optional)


def _integer(name: str, types: Sequence[str], default: Any, note: str) -> Widget:
    """An integer, of which 0 may stand for None or for a text."""
    unset: tuple[Any, Any] | None = None
    if "None" in types:
        unset = (0, None)
    elif "str" in types:
        unset = (0, default if isinstance(default, str) else "adaptive")
    least, most = _COUNTS.get(name, (0, _MANY))
    return number(name, "int", default, note, Numbers(least, most, 1, unset))


def _ids(name: str, default: Any, note: str) -> Widget:
    """A text of whole numbers; an empty one stands for None where that is the default."""
    if default is not None:
        return Widget(name, "ids", ", ".join(map(str, default)), note)
    return Widget(name, "ids", "", _in_its_words(note, None, "empty"), stands_for=(("", None),))


def _text(
    name: str, default: Any, note: str, choices: Sequence[str], *, is_optional: bool
) -> Widget:
    """A choice, or a text where nothing is known of it; auto or an empty text stands for None."""
    if not choices:
        if not is_optional:
            return Widget(name, "text", default or "", note)
        text = _in_its_words(note, None, "empty")
        return Widget(name, "text", default or "", text, stands_for=(("", None),))
    if not is_optional:
        named = default.name if isinstance(default, SiblingRule) else default
        return Widget(name, "choice", named, note, choices=tuple(choices))
    return Widget(
        name,
        "choice",
        AUTO if default is None else default,
        _in_its_words(note, None, AUTO),
        choices=(AUTO, *choices),
        stands_for=((AUTO, None),),
    )


def _in_its_words(note: str, meant: Any, shown: str) -> str:
    """A note that names a value as the page shows it."""
    mark = re.compile(rf'"{meant}"|\b{meant}\b')
    return mark.sub(shown, note) if mark.search(note) else f"{note} {shown} leaves it out."


def field_tooltips(cls: type) -> dict[str, str]:
    """Field -> text, from the docstrings of a class and its parents.

    The nearest class wins, but a text "as in …" yields to that of a parent.
    """
    found: dict[str, str] = {}
    for base in cls.__mro__:
        for name, text in _read_entries(base.__dict__.get("__doc__") or "").items():
            if name not in found or found[name].startswith("as in "):
                found[name] = text
    return {name: to_sentence(text) for name, text in found.items()}


def _read_entries(doc: str) -> dict[str, str]:
    """The entries of a docstring's `Args` and `Attributes`."""
    entries: dict[str, list[str]] = {}
    names: list[str] = []
    inside = False
    for line in inspect.cleandoc(doc).splitlines():
        if line and not line.startswith(" "):
            inside = bool(_SECTION.match(line))
            names = []
        elif inside and (entry := _ENTRY.match(line)):
            names = entry[1].split(", ")
            entries.update((name, [entry[2]]) for name in names)
        else:
            for name in names:
                entries[name].append(line.strip())
    return {name: _join(lines) for name, lines in entries.items()}


def _join(lines: Iterable[str]) -> str:
    return " ".join(filter(None, lines))


def to_sentence(text: str) -> str:
    """The text without code marks and without the list of choices, which the widget shows."""
    text = _LIST.sub("these", text).replace("`", "").replace("one of these: ", "")
    text = text.removesuffix(", one of these.").rstrip(".") + "."
    return text[0].upper() + text[1:]
