"""The sections of methods on the family pages, from docstrings.

A method's class docstring begins with what it does. Behind its `Args:` stand paragraphs that begin
with one of `PARTS`; where the class has no "Departures:", those at the head of its file are shown.
Papers are the arXiv numbers at the head of the file and in the docstring. So a new method needs its
row in the catalog, and its docstring.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mmaccel
from mmaccel.catalog import METHODS, load
from mmaccel.reduction.visual_tokens.contract import TokenReducer

ROOT = Path(__file__).resolve().parent.parent
PAGES = {  # slot -> the page of its family, below docs/
    "window": "window-policies.md",
    "canvas": "canvas.md",
    "drafts": "drafts.md",
    "tree": "trees.md",
    "siblings": "trees.md",
    "visual_tokens": "visual-tokens.md",
    "kv_cache": "cache-policies.md",
    "attention": "sparse-attention.md",
}
_SHARED = ("n_keep", "end_threshold", "drop_suffix", "settled")
"""Fields of a family, about which its page says something at the beginning."""
PARTS = ("Departures", "Cost", "Memory", "Loses", "Figures")
_PART = re.compile(rf"^({'|'.join(PARTS)}): (.*(?:\n(?!\w+: ).*)*)", re.MULTILINE)
_NAMELESS = (  # bases of sources and rules of drafts, some of which have no short name
    "mmaccel.samplers.drafting.contract:DraftSource",
    "mmaccel.samplers.drafting.lengths.contract:DraftLength",
)
_PAPER = re.compile(
    r"arXiv[: ](\d{4}\.\d{5})\)?"
    r"((?:(?:,| and| to) (?:sections? |algorithms? |listing )?\d[\d.]*\b)*)"
)
_STAGES = {
    "pixels": "before the encoder",
    "encoder_layer": "in the encoder",
    "encoder_exit": "behind the encoder",
    "llm_layer": "in the language model",
}


def classes(slot: str) -> dict[str, list[str]]:
    """Class -> its short names, in the order of the catalog; then public ones that have none."""
    names: dict[str, list[str]] = {}
    for name, entry in METHODS[slot].items():
        names.setdefault(entry.class_name, []).append(name)
    if slot == "drafts":
        bases = tuple(map(load, _NAMELESS))
        public = {name: getattr(mmaccel, name) for name in mmaccel.__all__[1:]}
        nameless = [n for n, c in public.items() if inspect.isclass(c) and issubclass(c, bases)]
        names |= {name: [] for name in nameless if name not in names}
    return names


def find_class(slot: str, public: str) -> Any:
    """The class of a method by its name."""
    targets = (e.target for e in METHODS[slot].values() if e.class_name == public)
    return next(map(load, targets), None) or getattr(mmaccel, public)


def link(slot: str, public: str) -> str:
    """A link to a method's section, from a page in docs/."""
    return f"[`{public}`]({PAGES[slot]}#{public.lower()})"


def method_sections(slot: str) -> Iterator[str]:
    """A section in Markdown for each method of a slot."""
    for public, names in classes(slot).items():
        short = [f'`"{name}"`{_preset(METHODS[slot][name].preset)}' for name in names]
        yield section(find_class(slot, public), public, short)


def section(cls: Any, public: str, short: list[str]) -> str:
    """What a method's docstrings say of it, under its name; `short` are its short names."""
    paragraphs = inspect.cleandoc(cls.__doc__ or "").split("\n\n")
    head = str(sys.modules[cls.__module__].__doc__)
    from_file, _, departures = head.partition("\n\nDepartures: ")
    parts = {"Departures": departures.partition("\n\n")[0]}
    prose = []
    for paragraph in paragraphs:
        texts = dict(_PART.findall(paragraph))
        parts |= texts
        if not texts and not re.match(r"\w+:\n", paragraph):
            prose.append(_line(paragraph))
    papers = _papers(f"{from_file} {' '.join(prose)}")
    source = "own study" if "publication is known" in head else papers
    file = Path(inspect.getfile(cls)).resolve().relative_to(ROOT).as_posix()
    stage = _STAGES[cls.stage] if issubclass(cls, TokenReducer) else ""
    call = ""  # of some draft sources the short name is the only one
    if public in mmaccel.__all__:
        call = f"[`{_call(cls, public)}`](api.md#mmaccel.{public})"
    facts = [_guarantee(cls), stage, call, ", ".join(short)]
    line = "; ".join(fact for fact in [*facts, source, f"`{file}`"] if fact)
    bullets = [f"- *{part}*: {_line(parts[part])}" for part in PARTS if parts.get(part)]
    body = "\n".join(bullets)
    return "\n\n".join(text for text in [f"### {public}", *prose, f"{line}.", body] if text)


def _preset(fields: Mapping[str, Any]) -> str:
    """The fields that a short name fixes."""
    values = ", ".join(f"{field}={value!r}" for field, value in fields.items())
    return f" (`{values}`)" if values else ""


def _guarantee(cls: Any) -> str:
    """The word of `docs/exactness.md` for default fields; a draft source has none."""
    word = getattr(cls, "exactness", None)
    word = cls().exactness if isinstance(word, property) else word
    return f"**{word}**" if word else ""


def _line(text: str) -> str:
    return " ".join(text.split())


def _papers(text: str) -> str:
    """Links to the papers that a text names, each once, with the section where it stands."""
    places: dict[str, str] = {}
    for number, place in _PAPER.findall(_line(text)):
        places.setdefault(number, place)
    return "; ".join(f"[arXiv {n}](https://arxiv.org/abs/{n}){at}" for n, at in places.items())


def _call(cls: Any, public: str) -> str:
    """A method with its fields' defaults; long ones are left out."""
    arguments = []
    for name, parameter in inspect.signature(cls).parameters.items():
        default = repr(parameter.default)
        if parameter.default is parameter.empty or name == "keep":
            arguments.append(name)
        elif name not in _SHARED:
            arguments.append(f"{name}={default if len(default) < 40 else '…'}")
    return f"{public}({', '.join(arguments)})"
