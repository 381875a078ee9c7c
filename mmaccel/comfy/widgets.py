"""Inputs and outputs that several nodes share."""

from __future__ import annotations

from dataclasses import replace

from mmaccel.comfy.table import POLICY, STATS, Output, Socket, Widget
from mmaccel.pipelines.loading.placement import AUTO
from mmaccel.results import EXACT_DTYPE

SEEDS = 2**64
OWN = "-1 takes what the model's authors recommend."
NO_FLOAT = ((-1.0, None),)

POLICY_INPUT = Socket(
    "policy", POLICY, "How to decode; without one, an exact policy.", is_optional=True
)
STATS_OUTPUT = Output("stats", STATS, "For MMAccel Stats.")
CUDA_GRAPHS = Widget(
    "cuda_graphs", "choice", AUTO,
    "Whether forward passes are captured in CUDA graphs; auto does where that works.",
    choices=(AUTO, "on", "off"), stands_for=(("on", True), ("off", False)), is_advanced=True,
)  # fmt: skip
FUSED = Widget(
    "fused", "choice", AUTO,
    "Whether forward passes run over packed weights in fewer operations; auto does where the "
    "model is recognised.",
    choices=(AUTO, "on", "off"), stands_for=(("on", True), ("off", False)), is_advanced=True,
)  # fmt: skip


def device_widgets(part: str) -> tuple[Widget, Widget]:
    """The device and dtype of a `part` of a model."""
    note = (
        f"Of the {part}. auto is bfloat16 on a GPU that computes it and {EXACT_DTYPE} on a CPU. "
        f"{EXACT_DTYPE} keeps every guarantee bit for bit, the others up to rounding."
    )
    return (
        Widget(
            "device", "choice", AUTO, "Where it runs; auto is where ComfyUI computes.",
            choices=(AUTO, "cpu", "cuda", "mps", "xpu"), is_open=True,  # such as cuda:1
        ),
        Widget(
            "dtype", "choice", AUTO, note,
            choices=(AUTO, EXACT_DTYPE, "bfloat16", "float16"), is_open=True,  # such as bf16
        ),
    )  # fmt: skip


def sampling_widgets(own: str = OWN) -> tuple[Widget, ...]:
    """Temperature, top-k, top-p and min-p; `own` says what -1 is."""
    widgets = (
        Widget(
            "temperature", "float", -1.0,
            "How freely tokens are drawn: 0 always takes the likeliest, 1 the model's own "
            f"distribution. {own}",
            -1, 100, 0.05, stands_for=NO_FLOAT,
        ),
        Widget(
            "top_k", "int", -1, f"Keep the k likeliest tokens; 0 keeps all. {own}",
            -1, 2**31 - 1, 1, stands_for=((-1, None),),
        ),
        Widget(
            "top_p", "float", -1.0,
            f"Keep the likeliest tokens that make up this share; 1 keeps all. {own}",
            -1, 1, 0.01, stands_for=NO_FLOAT,
        ),
        Widget(
            "min_p", "float", -1.0,
            f"Keep tokens with this share of the likeliest one's; 0 keeps all. {own}",
            -1, 1, 0.01, stands_for=NO_FLOAT,
        ),
    )  # fmt: skip
    return tuple(replace(widget, is_advanced=True) for widget in widgets)


def seed_widget(note: str) -> Widget:
    """The seed; `note` says what it is the seed of."""
    note += " A browser counts exactly up to 9007199254740992; larger ones come out rounded."
    return Widget("seed", "int", 0, note, 0, SEEDS - 1, 1, is_seed=True)


def read_prompts(text: str) -> list[str]:
    """One prompt a line. Blank lines are left out; a text of blank lines alone is one prompt ""."""
    return [line.strip() for line in text.splitlines() if line.strip()] or [""]
