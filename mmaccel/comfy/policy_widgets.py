"""The widgets of a policy, from the fields of its dataclass.

A field that nothing here names gets a widget of its type with wide bounds: the policy itself
refuses what it cannot take.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

from mmaccel.catalog import POLICIES, load, make_policy
from mmaccel.comfy.field_notes import field_notes
from mmaccel.comfy.table import MODEL, Socket, Widget
from mmaccel.errors import OptionError
from mmaccel.samplers.acceptance import COUPLINGS
from mmaccel.samplers.canvas.cache_plan import KINDS
from mmaccel.samplers.canvas.masked_parallel import SCHEDULES
from mmaccel.samplers.canvas.orders import ORDERS
from mmaccel.samplers.window.proposers import SOURCES

_MANY, _LARGE = 2**20, 1e6  # where the library knows no bound
_COUNTS = {  # field -> least, most
    "window": (1, 4096),
    "drafts": (1, 256),
    "group": (0, 2**31 - 1),
    "block": (1, _MANY),
    "steps": (1, _MANY),
}
_NUMBERS = {  # field -> least, most, step
    **dict.fromkeys(("threshold", "anchor", "relaxed", "tau", "least"), (0.0, 1.0, 0.01)),
    "end_threshold": (0.0, 1.0, 0.01),
    "max_gap": (1e-6, 1.0, 0.01),
    "settled": (0.0, _LARGE, 0.001),
    "kl": (0.0, _LARGE, 0.001),
}
_CHOICES: dict[str, Sequence[str]] = {  # field -> what may be possible; each policy has its say
    "drafts": SOURCES,
    "coupling": COUPLINGS,
    "order": ORDERS,
    "cache": KINDS,
    "layout": ("rows", "entries"),
    "schedule": SCHEDULES,
    "rule": ("threshold", "frechet"),
    "revise": ("shadow", "edit", "redo"),
    "choose": ("last", "first"),
}
_AUTO = "auto"
_NOTES = {  # field -> what a page says of it, where Python can be given more
    "cache": "What passes reuse: none is always right; prefix keeps what is left of the active "
    "block, dual everything but the block, vicinity everything but the block and the columns "
    "beside it; block keeps earlier blocks of a block-causal model, which is exact.",
    "draft_model": "A smaller model with the same vocabulary, from MMAccel Load Model; without "
    "one, drafts are looked up in what was made so far.",
}


def policy_inputs(name: str) -> tuple[Widget | Socket, ...]:
    """The inputs of a policy's node, one for each field its short name leaves open."""
    cls, preset = load(POLICIES[name].target), POLICIES[name].preset
    notes = field_notes(cls) | _NOTES
    return tuple(_input(name, f, notes[f.name]) for f in fields(cls) if f.name not in preset)


def _input(policy: str, field: Field[Any], note: str) -> Widget | Socket:
    types = [part.strip() for part in str(field.type).split("|")]
    default = field.default if field.default is not MISSING else ()
    name, is_optional = field.name, "None" in types
    if "TokenModel" in types:
        return Socket(name, MODEL, note, is_optional=True)
    if "bool" in types:
        return Widget(name, "bool", default, note)
    if types[0].startswith("tuple["):
        return Widget(name, "ids", ", ".join(map(str, default)), note)
    if "float" in types:
        least, most, step = _NUMBERS.get(name, (0.0, _LARGE, 0.01))
        if is_optional:  # 0 is a value of its own
            return _number(name, "float", default, note, (least, most, step), (-1.0, None))
        return _number(name, "float", default, note, (least, most, step))
    if "int" in types:
        low, high = _COUNTS.get(name, (0, _MANY))
        if is_optional:
            return _number(name, "int", default, note, (low, high, 1), (0, None))
        if "str" in types:
            return _number(name, "int", default, note, (low, high, 1), (0, "adaptive"))
        return _number(name, "int", default, note, (low, high, 1))
    return _text(policy, name, default, note, is_optional)


def _number(
    name: str,
    kind: Any,
    default: Any,
    note: str,
    bounds: tuple[float, float, float],
    instead: tuple[Any, Any] | None = None,
) -> Widget:
    """A number; `instead` is a value below its domain, and what it stands for."""
    least, most, step = bounds
    if instead is None:
        return Widget(name, kind, default, note, least, most, step)
    shown, meant = instead
    note = _in_its_words(note, meant, f"{shown:g}")
    default = shown if default == meant else default
    return Widget(name, kind, default, note, shown, most, step, stands_for=((shown, meant),))


def _in_its_words(note: str, meant: Any, shown: str) -> str:
    """A note that names a value as the page shows it."""
    mark = re.compile(rf'"{meant}"|\b{meant}\b')
    return mark.sub(shown, note) if mark.search(note) else f"{note} {shown} leaves it out."


def _text(policy: str, name: str, default: Any, note: str, is_optional: bool) -> Widget:
    """A choice among what the policy takes, or a text where nothing is known of it."""
    choices = tuple(text for text in _CHOICES.get(name, ()) if _takes(policy, name, text))
    if not choices:
        return Widget(name, "text", default or "", note)
    if is_optional:
        shown = _AUTO if default is None else default
        auto = ((_AUTO, None),)
        note = _in_its_words(note, None, _AUTO)
        return Widget(name, "choice", shown, note, choices=(_AUTO, *choices), stands_for=auto)
    return Widget(name, "choice", default, note, choices=choices)


def _takes(policy: str, name: str, text: str) -> bool:
    try:
        make_policy(policy, **{name: text})
    except OptionError:
        return False
    return True
