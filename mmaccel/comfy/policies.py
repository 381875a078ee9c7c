"""One node for each policy of the catalog, with widgets and tooltips from its dataclass.

A field that the tables below do not name gets a widget of its type with wide bounds: the policy
itself refuses what it cannot take.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from mmaccel.catalog import METHODS, POLICIES, load, make_policy
from mmaccel.comfy.table import (
    MODEL,
    POLICY,
    PREFIX,
    Host,
    NodeResult,
    NodeSpec,
    Output,
    Socket,
    Widget,
)
from mmaccel.comfy.widgets import AUTO
from mmaccel.errors import OptionError
from mmaccel.pipelines.text_to_image.model import pick_policy
from mmaccel.samplers.acceptance import COUPLINGS
from mmaccel.samplers.canvas.cache_plan import KINDS
from mmaccel.samplers.canvas.masked_parallel import SCHEDULES
from mmaccel.samplers.canvas.orders import ORDERS
from mmaccel.samplers.drafting.coarse import Coarse
from mmaccel.samplers.drafting.coarse_model import check_coarse
from mmaccel.samplers.drafting.sources import NAMES

_HOW = {"window": "token after token", "canvas": "in any order"}
_EXACTNESS = {
    "bitwise": "the same seed gives the same result as token by token",
    "distribution": "other results than token by token, from the same distribution",
    "relaxed": "other results than token by token, from another distribution",
}
_MANY, _LARGE = 2**20, 1e6  # of fields that the library does not bound
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
_CHOICES: dict[str, Sequence[str]] = {  # field -> choices; a policy may refuse some
    "drafts": NAMES,
    "tree": tuple(METHODS["tree"]),
    "coupling": COUPLINGS,
    "order": ORDERS,
    "cache": KINDS,
    "layout": ("rows", "entries"),
    "schedule": SCHEDULES,
    "rule": ("threshold", "frechet"),
    "revise": ("shadow", "edit", "redo"),
    "choose": ("last", "first"),
}
_NOTES = {  # field -> tooltip, where Python takes more than a widget
    "cache": "What passes reuse: none is always right; prefix keeps what is left of the active "
    "block, dual everything but the block, vicinity everything but the block and the columns "
    "next to it; block keeps earlier blocks of a block-causal model, which is exact.",
    "draft_model": "A smaller model with the same vocabulary, from MMAccel Load Model; without "
    "one, drafts are looked up in the tokens so far.",
}
_FOLDER = Widget(
    "coarse_folder", "path", "",
    "A folder with a coarse model, made for the generator that runs; it takes the place of what "
    "drafts says. Empty leaves that as it is.",
)  # fmt: skip
_SECTION = re.compile(r"^(?:Args|Attributes):$")
_ENTRY = re.compile(r"^    (\w+(?:, \w+)*): (.*)$")
_LIST = re.compile(r"`mmaccel[\w.]*\.[A-Z]+`")


@dataclass(frozen=True)
class NamedPolicy:
    """A policy and the short name it was chosen by."""

    name: str
    policy: Any


def choose_policy(host: Host, name: str, /, **fields: Any) -> NodeResult:
    """Build a policy. A linked loaded model is replaced by its token model.

    Raises:
        OptionError: a bad value, or a folder without a coarse model.
    """
    own = {key: getattr(value, "pipe", value) for key, value in fields.items()}
    own = {key: getattr(value, "model", value) for key, value in own.items()}
    return NodeResult((NamedPolicy(name, _make(name, **own)),))


def _make(name: str, /, coarse_folder: str = "", **fields: Any) -> Any:
    """`make_policy` with the folder of a coarse model as an input of its own."""
    if coarse_folder:
        check_coarse(Path(coarse_folder))
        fields["drafts"] = Coarse(coarse_folder)
    return make_policy(name, **fields)


def default_policy(model: Any) -> NamedPolicy:
    """The exact policy that decodes a model where none is chosen."""
    name = "jacobi" if model.kind == "window" else "lossless-unmask"
    return NamedPolicy(name, pick_policy(None, model))


def policy_id(name: str) -> str:
    """The id of a policy's node."""
    return f"{PREFIX}{name.title().replace('-', '')}Policy"


def policy_node(name: str) -> NodeSpec:
    """The node of a policy, by its short name."""
    entry = POLICIES[name]
    exactness = make_policy(name).exactness

    def run(host: Host, **fields: Any) -> NodeResult:
        return choose_policy(host, name, **fields)

    return NodeSpec(
        id=policy_id(name),
        title=f"MMAccel Policy: {name}",
        summary=f"{entry.summary[0].upper()}{entry.summary[1:]}. Exactness {exactness}: "
        f"{_EXACTNESS[exactness]}. For models that are decoded {_HOW[entry.slot]}.",
        inputs=policy_inputs(name),
        outputs=(Output("policy", POLICY, f"The policy {name}, for Generate and Compare."),),
        run=run,
        check=partial(_make, name),
        folder=f"policies/{entry.slot}",
    )


def policy_inputs(name: str) -> tuple[Widget | Socket, ...]:
    """The inputs of a policy's node, one for each field its short name leaves open.

    A policy that takes a coarse model has an input for its folder as well.
    """
    cls, preset = load(POLICIES[name].target), POLICIES[name].preset
    notes = field_tooltips(cls) | _NOTES
    open_fields = [f for f in fields(cls) if f.name not in preset]
    inputs = tuple(_input(name, f, notes[f.name]) for f in open_fields)
    return (*inputs, _FOLDER) if any("DraftSource" in str(f.type) for f in open_fields) else inputs


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
            instead = default if isinstance(default, str) else "adaptive"
            return _number(name, "int", default, note, (low, high, 1), (0, instead))
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
        shown = AUTO if default is None else default
        auto = ((AUTO, None),)
        note = _in_its_words(note, None, AUTO)
        return Widget(name, "choice", shown, note, choices=(AUTO, *choices), stands_for=auto)
    return Widget(name, "choice", default, note, choices=choices)


def _takes(policy: str, name: str, text: str) -> bool:
    try:
        make_policy(policy, **{name: text})
    except OptionError:
        return False
    return True


def field_tooltips(cls: type) -> dict[str, str]:
    """Field -> text, from the docstrings of a class and its parents.

    The nearest class wins, but a text "as in …" yields to that of a parent.
    """
    found: dict[str, str] = {}
    for base in cls.__mro__:
        for name, text in _read_entries(base.__dict__.get("__doc__") or "").items():
            if name not in found or found[name].startswith("as in "):
                found[name] = text
    return {name: _to_sentence(text) for name, text in found.items()}


def _read_entries(doc: str) -> dict[str, str]:
    """The entries of a docstring's `Args` and `Attributes`."""
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


def _to_sentence(text: str) -> str:
    """The text without code marks and without the list of choices, which the widget shows."""
    text = _LIST.sub("these", text).replace("`", "").replace("one of these: ", "")
    text = text.removesuffix(", one of these.").rstrip(".") + "."
    return text[0].upper() + text[1:]
