"""What a node is, and its inputs, most of them made from fields of dataclasses: a field's type
decides what its input is, its documentation is the tooltip.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, replace
from functools import partial
from typing import Any

from mmaccel.catalog import METHODS
from mmaccel.checks import Domain, check_length, check_value, show
from mmaccel.errors import MMAccelError
from mmaccel.limits import MAX_LINE, MAX_VALUE
from mmaccel.pipelines.hosts.loading.placement import AUTO
from mmaccel.samplers.acceptance import COUPLINGS
from mmaccel.samplers.canvas.cache_plan import KINDS
from mmaccel.samplers.canvas.orders import ORDERS
from mmaccel.samplers.drafting.sources import NAMES
from mmaccel.samplers.trees.siblings.contract import SiblingRule

_MANY, _LARGE = 2**20, 1e6  # of fields that the library does not bound
_SHARE = (0.0, 1.0, 0.01)
_LAYER = (-_MANY, _MANY, 1)  # counted from the last one
_RANGES: dict[str, dict[str, tuple[float, float, float]]] = {  # type, field -> least, most, step
    "float": {
        "": (0.0, _LARGE, 0.01),
        **dict.fromkeys(("threshold", "anchor", "relaxed", "tau", "least", "delta"), _SHARE),
        "end_threshold": _SHARE,
        "max_gap": (1e-6, 1.0, 0.01),
        "cap": (1.0, _LARGE, 0.1),
        "shift": (0.01, 100.0, 0.01),
        "settled": (0.0, _LARGE, 0.001),
        "kl": (0.0, _LARGE, 0.001),
        "rising": (0.0, 10.0, 0.1),
        "radius": (0.0, _LARGE, 0.05),
    },
    "int": {
        "": (0, _MANY, 1),
        "window": (1, 4096, 1),
        "drafts": (1, 256, 1),
        "group": (0, 2**31 - 1, 1),
        **dict.fromkeys(("block", "cached", "steps", "neighbours"), (1, _MANY, 1)),
        **dict.fromkeys(("early", "late", "layer"), _LAYER),
    },
}
_CHOICES: dict[str, Sequence[str]] = {  # field or type -> choices; a method may refuse some
    "order": ORDERS,
    "DraftSource": NAMES,
    "TreeShape": tuple(METHODS["tree"]),
    "SiblingRule": tuple(METHODS["siblings"]),
    "Coupling": COUPLINGS,
    "CachePlan": KINDS,
    "Features": (AUTO, "merged", "all"),
}
_LINKS = {  # type -> kind of the input
    "TokenModel": "MMACCEL_MODEL",
    "TokenReducer": "MMACCEL_VISUAL_TOKENS",
    "CacheMethod": "MMACCEL_KV_CACHE",
}
_TYPES = {"INT": int, "FLOAT": float, "BOOLEAN": bool}  # of widgets; others are texts

_ENTRY = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n     .*)*)", re.MULTILINE)
_LIST = re.compile(r"`mmaccel[\w.]*\.[A-Z]+`")


@dataclass(frozen=True)
class Port:
    """An input or an output of a node; an input with a default is a widget, another one a link.

    Attributes:
        kind: ComfyUI's name of its type.
        options: of a widget, as ComfyUI's class of the kind takes them.
        read: a widget's value as the library takes it.
        is_optional: whether a graph may leave it out, which counts as the default.
        is_open: of a choice: whether it takes more than the choices.
    """

    name: str
    kind: str
    tooltip: str
    options: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Any], Any] = lambda value: value
    is_optional: bool = False
    is_open: bool = False

    @property
    def default(self) -> Any:
        return self.options.get("default")

    def take(self, value: Any) -> Any:
        """A widget's value as the library takes it; None, which a link fills, is the default."""
        value = self.default if value is None else value
        if isinstance(value, str):
            most = MAX_LINE if self.options.get("multiline") else MAX_VALUE
            check_length(self.name, value, most)
        domain = Domain(
            self.options.get("min", 0),
            self.options.get("max", 0),
            f"{show(self.default)} is what a new node has",
            choices=() if self.is_open else self.options.get("options", ()),
        )
        check_value(self.name, value, _TYPES.get(self.kind, str), domain)
        return self.read(value)


@dataclass(frozen=True)
class Node:
    """A node. Its id, the name in saved workflows, never changes.

    Attributes:
        inputs, outputs: in the order of the page.
        run: `run(**inputs)`, with widgets' values as the library takes them; outputs in order, or
            what `host.output` made.
        check: `check(**widgets)`; raises `OptionError` before anything runs.
        fingerprint: `fingerprint(**widgets)`, a text that changes when equal inputs give another
            result.
        is_output: whether it runs although no other node uses its outputs.
        is_graph: whether it runs other nodes.
    """

    id: str
    title: str
    category: str
    summary: str
    inputs: Sequence[Port]
    outputs: Sequence[Port]
    run: Callable[..., Any]
    check: Callable[..., Any] = lambda **_: None
    fingerprint: Callable[..., str] = lambda **_: ""
    is_output: bool = False
    is_graph: bool = False

    @property
    def widgets(self) -> list[Port]:
        return [each for each in self.inputs if each.default is not None]

    @property
    def links(self) -> list[Port]:
        return [each for each in self.inputs if each.default is None]

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of widgets as the library takes them; one that is missing is its default."""
        read = {each.name: each.take(values.get(each.name)) for each in self.widgets}
        self.check(**read)
        return read

    def refusal(self, values: Mapping[str, Any]) -> str | None:
        """Why it cannot run with these values of its widgets; None if it can."""
        try:
            self.read(values)
        except (MMAccelError, OSError) as error:  # OSError: a path that is too long
            return str(error)
        return None


def reads(meanings: Mapping[Any, Any]) -> Callable[[Any], Any]:
    """A `Port.read` of values that mean something a widget cannot hold, such as 0 for None."""
    return lambda value: meanings.get(value, value)


def stripped(value: str) -> str | None:
    """A `Port.read` of a text that an empty one leaves out."""
    return value.strip() or None


def unquoted(value: str) -> str | None:
    """The same of a path, which file managers copy in quotes."""
    return value.strip(" \t\r\n\"'") or None


def advanced(port: Port) -> Port:
    """A widget that a page hides until it is asked for, if it can."""
    return replace(port, options={**port.options, "extra_dict": {"advanced": True}})


def text(name: str, default: str, note: str, **more: Any) -> Port:
    return Port(name, "STRING", note, {"default": default}, **more)


def lines(name: str, default: str, note: str, **more: Any) -> Port:
    return Port(name, "STRING", note, {"default": default, "multiline": True}, **more)


def choice(name: str, default: str, note: str, choices: Sequence[str], **more: Any) -> Port:
    return Port(name, "COMBO", note, {"default": default, "options": list(choices)}, **more)


def number(
    name: str, default: Any, note: str, least: float, most: float, step: float = 1, **more: Any
) -> Port:
    """An integer where its steps are integers."""
    options = {"default": default, "min": least, "max": most, "step": step}
    if isinstance(step, int):
        return Port(name, "INT", note, options, **more)
    return Port(name, "FLOAT", note, {**options, "round": False}, **more)  # else to steps


def unset_number(
    name: str,
    default: Any,
    note: str,
    shown: float,
    most: float,
    step: float = 1,
    meant: Any = None,
) -> Port:
    """A number whose least value stands for what is meant; `note` may name that."""
    note = _in_its_words(note, meant, f"{shown:g}")
    default = shown if default == meant else default
    return number(name, default, note, shown, most, step, read=reads({shown: meant}))


def choices_of(each: Field[Any], domain: Domain | None) -> Sequence[str]:
    """What a field may be that takes listed texts, of which a method may refuse some."""
    types = _types_of(each)
    for name in (each.name, *types):
        if name in _CHOICES:
            return _CHOICES[name]
    return domain.choices if domain and "str" in types else ()  # type: ignore[return-value]


def field_port(each: Field[Any], note: str, choices: Sequence[str]) -> Port:
    """The input of a field of a dataclass whose annotations are texts."""
    name = each.name
    types = _types_of(each)
    is_optional = "None" in types
    default: Any = () if each.default is MISSING else each.default
    for kind in types:
        if kind in _LINKS:
            return Port(name, _LINKS[kind], note, is_optional=True)
    if "bool" in types:
        return Port(name, "BOOLEAN", note, {"default": default})
    for kind, shown in (("float", -1.0), ("int", 0)):  # a float of 0 is a value of its own
        if kind in types:
            known = _RANGES[kind]
            least, most, step = known.get(name, known[""])
            if is_optional or "str" in types:
                other = default if isinstance(default, str) else "adaptive"
                meant = None if is_optional else other
                return unset_number(name, default, note, shown, most, step, meant)
            if default < least:  # a logarithm, of either sign
                least, most = -_LARGE, _LARGE
            return number(name, default, note, least, most, step)
    if is_optional or default is None:
        note = _in_its_words(note, None, AUTO if choices else "empty")
    if types[0].startswith("tuple["):
        ids = ", ".join(map(str, default or ()))
        return text(name, ids, note, read=partial(_read_ids, default))
    if isinstance(default, SiblingRule):
        default = default.name
    if choices and is_optional:
        return choice(name, default or AUTO, note, (AUTO, *choices), read=reads({AUTO: None}))
    if choices:
        return choice(name, default, note, choices)
    return text(name, default or "", note, read=reads({"": None} if is_optional else {}))


def _types_of(each: Field[Any]) -> list[str]:
    return str(each.type).split(" | ")


def _in_its_words(note: str, meant: Any, shown: str) -> str:
    """A note that names a value as the page shows it."""
    mark = re.compile(rf'"{meant}"|\b{meant}\b')
    return mark.sub(shown, note) if mark.search(note) else f"{note} {shown} leaves it out."


def _read_ids(default: Any, value: str) -> Any:
    """Whole numbers, which the library reads; an empty text is None where that is the default."""
    parts = value.replace(",", " ").split()
    if not parts:
        return None if default is None else ()
    return f"({', '.join(parts)},)"


def field_tooltips(cls: type) -> dict[str, str]:
    """Field -> text, from the docstrings of a class and its parents; the nearest class wins, but a
    text "as in …" yields to that of a parent.
    """
    tooltips: dict[str, str] = {}
    for base in cls.__mro__:
        for names, words in _ENTRY.findall(inspect.cleandoc(base.__doc__ or "")):
            for name in names.split(", "):
                if tooltips.get(name, "as in ").startswith("as in "):
                    tooltips[name] = " ".join(words.split())
    return {name: to_sentence(words) for name, words in tooltips.items()}


def to_sentence(words: str) -> str:
    """The text without code marks and without the list of choices, which the widget shows."""
    words = _LIST.sub("these", words).replace("`", "").replace("one of these: ", "")
    words = words.removesuffix(", one of these.").rstrip(".") + "."
    return words[0].upper() + words[1:]
