"""Inputs and outputs that several nodes share; those of options are made from their fields.

A field of `LoadOptions` or `SamplingOptions` that has a help text is a widget. Nodes that were
saved know the widgets named in `_SAVED`; a field that is added later is optional and comes last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import Field, fields, replace
from typing import Literal

from mmaccel.comfy.fields import Numbers, field_input, number, switch, to_sentence
from mmaccel.comfy.table import POLICY, STATS, Output, Socket, Widget
from mmaccel.limits import SEEDS
from mmaccel.options import LoadOptions, SamplingOptions
from mmaccel.pipelines.loading.placement import AUTO
from mmaccel.results import EXACT_DTYPE

OWN = "None takes what the model's authors recommend."

POLICY_INPUT = Socket(
    "policy", POLICY, "How to decode; without one, an exact policy.", is_optional=True
)
STATS_OUTPUT = Output("stats", STATS, "For MMAccel Stats.")

_SAVED = {"device", "dtype", "family", "cuda_graphs", "fused", "temperature", "top_k", "top_p"}
_SAVED |= {"min_p", "guidance_scale"}
_NOT_HERE = {
    "trust_remote_code",  # a workflow comes from others too: it may not say whom to trust
    "revision",  # the cache of models knows the files of the branch that is downloaded by default
}
_SUGGESTED = {  # field -> what its widget offers; the library takes more, such as cuda:1 and bf16
    "device": (AUTO, "cpu", "cuda", "mps", "xpu"),
    "dtype": (AUTO, EXACT_DTYPE, "bfloat16", "float16"),
}
_NOTES = {  # field -> tooltip, where ComfyUI differs from the command line
    "device": "Where it runs; auto is where ComfyUI computes.",
    "family": "How the checkpoint is read; None finds out.",
    "dtype": f"Of the {{part}}. auto is bfloat16 on a GPU that computes it and {EXACT_DTYPE} on a "
    f"CPU. {EXACT_DTYPE} keeps every guarantee bit for bit, the others up to rounding.",
}
_UNSET = (-1.0, None)
_DOMAINS = {  # field -> of its widget; the library itself knows no upper bound of some
    "guidance_scale": Numbers(0.0, 100, 0.1, _UNSET),
    "temperature": Numbers(0.0, 100, 0.05, _UNSET),
    "top_k": Numbers(0, 2**31 - 1, 1, (-1, None)),
    "top_p": Numbers(0.0, 1, 0.01, _UNSET),
    "min_p": Numbers(0.0, 1, 0.01, _UNSET),
    "top_h": Numbers(0.0, 1, 0.01, _UNSET),
    "eta_cutoff": Numbers(0.0, 1, 0.0001, _UNSET),
}


def load_widgets(part: str, families: Iterable[str] = ()) -> dict[str, Widget]:
    """Field of `LoadOptions` -> its widget.

    Args:
        part: the part of the model that the dtype applies to.
        families: how the checkpoint may be read; without any there is no such widget.
    """
    shown = [f for f in fields(LoadOptions) if f.metadata.get("help") and f.name not in _NOT_HERE]
    families = tuple(families)
    made = {
        f.name: _load_widget(f, part, families) for f in shown if families or f.name != "family"
    }
    return {
        name: widget if name in _SAVED else replace(widget, is_optional=True)
        for name, widget in made.items()
    }


def _load_widget(field: Field[object], part: str, families: Sequence[str]) -> Widget:
    name = field.name
    note = _NOTES.get(name, to_sentence(field.metadata["help"])).format(part=part)
    if name in _SUGGESTED:
        return Widget(name, "choice", AUTO, note, choices=_SUGGESTED[name], is_open=True)
    if field.type in ("Switch", "FusedSwitch"):
        return switch(name, note, AUTO if field.default == AUTO else "off")
    made = field_input(field, note, families if name == "family" else ())
    assert isinstance(made, Widget)  # no option is an object of another node
    return replace(made, is_advanced=True)


def sampling_widgets(unset: str = OWN, without: Sequence[str] = ()) -> tuple[Widget, ...]:
    """A widget for each field of `SamplingOptions`.

    Args:
        unset: says what None is, which the widget shows as -1.
        without: fields that a node has no widget for.
    """
    shown = [f for f in fields(SamplingOptions) if f.metadata.get("help") and f.name not in without]
    return tuple(_sampling_widget(f, unset) for f in shown)


def _sampling_widget(field: Field[object], unset: str) -> Widget:
    name = field.name
    note = f"{to_sentence(field.metadata['help'])} {unset}"
    domain = _DOMAINS.get(name, Numbers(0.0, 1e6, 0.01, _UNSET))
    kind: Literal["int", "float"] = "int" if isinstance(domain.step, int) else "float"
    made = number(name, kind, None, note, domain)
    return replace(made, is_advanced=name != "guidance_scale", is_optional=name not in _SAVED)


def seed_widget(note: str) -> Widget:
    """The seed; `note` says what it is the seed of."""
    note += " -1 draws one at every run. A browser counts exactly up to 9007199254740992; larger "
    note += "ones come out rounded."
    return Widget("seed", "int", 0, note, -1, SEEDS - 1, 1, is_seed=True)


def batch_widget(note: str) -> Widget:
    """How many rows are decoded at a time."""
    note += " at a time at most: more take more memory, and less time each."
    return Widget("batch_size", "int", 1, note, 1, 256, 1)


def read_prompts(text: str) -> list[str]:
    """One prompt a line. Blank lines are left out; a text of blank lines alone is one prompt ""."""
    return [line.strip() for line in text.splitlines() if line.strip()] or [""]
